"""The fleet of a run under a policy: what there is at the beginning, and who shapes it from then on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pearl.core.actions import GiveBack, Sleep
from pearl.core.decision import Moment, Situation
from pearl.core.policy import Borrow, Policy
from pearl.core.state import (
    Activity,
    ActivityChanged,
    Gpu,
    GpuOwner,
    GpusJoined,
    Role,
    StateEvent,
    WorkerAdded,
)
from pearl.elastic.executor import Executor
from pearl.elastic.hands import Hands
from pearl.elastic.loans import Loans
from pearl.elastic.meter import Meter
from pearl.elastic.rebuild import Rebuilder
from pearl.elastic.scheduler import Scheduler
from pearl.elastic.tracker import Tracker
from pearl.errors import PearlError, RunFailed
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.run import FleetContext
from pearl.ports import GpuSource, JournalSink, WorkerSpec
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.training import Manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """What a policy shapes a fleet with."""

    policy: Policy
    situation: Situation
    """Before anything was measured: priors of workload and platform, and of what borrowing costs."""
    reserved: tuple[Gpu, ...]
    training: tuple[Gpu, ...]
    overlap_tp: int
    """Of the workers on training GPUs."""
    refit_share: float
    first_worker_s: float = 1800.0
    """Until a worker must serve."""
    return_timeout_s: float = 300.0
    change_timeout_s: float = 60.0
    """For a worker to sleep, wake, end, or take another role, and for the trainer to lend GPUs or take them back. A return waits
    for several of these, one after the other, so it is much less than `return_timeout_s`."""


@dataclass(slots=True)
class ElasticFleet:
    """A fleet that a policy shapes: the `FleetControl` of a run."""

    options: ElasticOptions
    source: GpuSource | None = None
    _tracker: Tracker | None = None
    _scheduler: Scheduler | None = None
    _asleep: asyncio.Task[None] | None = None
    """Starts overlap workers."""
    _rebuilder: Rebuilder | None = None

    def journal(self, sink: JournalSink) -> JournalSink:
        """The runtime tracker listens to what is journalled."""
        options = self.options
        self._tracker = Tracker(sink=sink, profile=options.situation.profile, share=options.refit_share)
        return self._tracker

    @property
    def scheduler(self) -> Scheduler:
        """Of a run that has begun."""
        assert self._scheduler is not None, "the run has not begun"
        return self._scheduler

    async def start(self, context: FleetContext, manifest: Manifest) -> None:
        """The policy decides, overlap workers are started and put to sleep meanwhile, and the run begins with the first worker.

        Raises:
            RunFailed: overlap workers do not start, or no worker serves in time.
        """
        options = self.options
        scheduler = self._scheduler = self._make(context)
        scheduler.listen()
        tracker = scheduler.tracker
        meter = tracker.meter = Meter(workers=context.workers, profile=lambda: tracker.profile)
        context.nursery.spawn(meter.run(), name="elastic: meter of iterations")
        context.workers.begin(manifest)
        for gpus in (options.reserved, options.training):
            if gpus:
                self._submit(GpusJoined(gpus=gpus))
        if overlap := self._add_overlap():
            self._asleep = context.nursery.spawn(self._start_overlap(context, overlap), name="elastic: overlap workers")
        # A policy that never uses GPUs from outside does not take them either: they cost what they cost.
        if self.source is not None and options.policy.external:
            self._rebuilder = Rebuilder(source=self.source, scheduler=scheduler)
            context.nursery.spawn(self._rebuilder.run(), name="elastic: GPU source")
        scheduler.begin()
        try:
            async with guard(options.first_worker_s, "the first rollout worker"):
                await scheduler.serving()
        except GuardExpired as error:
            gpus_here = len([gpu for gpu in scheduler.state.gpus.values() if gpu.owner is not GpuOwner.TRAINING])
            raise RunFailed(
                f"no rollout worker serves within {options.first_worker_s:g} s: there are {gpus_here} GPUs for rollout and "
                f"{len(options.training)} of the trainer under policy {options.policy.name}; {scheduler.last}"
            ) from error

    async def stop(self) -> None:
        """As the scheduler has it, and take no more GPUs; nothing where the run has not begun."""
        if self._rebuilder is not None:
            self._rebuilder.is_closing = True
        if self._scheduler is not None:
            await self._scheduler.stop()

    async def leave(self) -> None:
        """What is lent goes back to the trainer, what came from outside to its source."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        if why_not := await scheduler.hands.reclaim():
            _log.warning("end of the run: the trainer does not take its GPUs back: %s", why_not)
        gpus = scheduler.state.gpus
        external = tuple(gpu for gpu in sorted(gpus) if gpus[gpu].owner is GpuOwner.EXTERNAL)
        try:
            if external:
                await scheduler.hands.perform(GiveBack(gpus=external, to=GpuOwner.EXTERNAL))
        except PearlError as error:
            _log.warning("end of the run: GPUs from outside are not given back: %s", error)

    async def training_begin(self, version: WeightVersion) -> None:
        """As the scheduler has it, once the trainer has the GPUs back on which overlap workers were started."""
        if self._asleep is not None:
            await self._asleep
        await self.scheduler.training_begin(version)

    async def training_finished(self, version: WeightVersion) -> None:
        """As the scheduler has it, whatever the version."""
        del version
        await self.scheduler.training_finished()

    def _make(self, context: FleetContext) -> Scheduler:
        options = self.options
        assert self._tracker is not None, "the journal of the run goes through the tracker"
        loans = Loans(trainer=context.trainer, nursery=context.nursery, timeout_s=options.change_timeout_s)
        hands = Hands(
            workers=context.workers,
            loans=loans,
            source=self.source,
            nursery=context.nursery,
            timeout_s=options.change_timeout_s,
        )
        return Scheduler(
            policy=options.policy,
            workers=context.workers,
            hands=hands,
            executor=Executor(hands=hands, nursery=context.nursery),
            tracker=self._tracker,
            nursery=context.nursery,
            progress=context.progress,
            toggle=options.situation.toggle,
            lease_prior_s=options.situation.lease_prior_s,
            start_s=context.start_s,
            return_timeout_s=options.return_timeout_s,
        )

    def _add_overlap(self) -> list[WorkerSpec]:
        """Training workers, in the first slots, and the workers that share their GPUs, yet to be started."""
        options, slot = self.options, 0
        nodes = [tuple(gpu.id for gpu in gpus) for _, gpus in groupby(options.training, key=lambda gpu: gpu.node)]
        for gpus in nodes:
            self._submit(WorkerAdded(worker=WorkerId(slot), gpus=gpus, role=Role.TRAINING))
            self._submit(ActivityChanged(worker=WorkerId(slot), activity=Activity.INACTIVE))
            slot += 1
        if options.policy.borrow is Borrow.NEVER:
            return []
        tp = options.overlap_tp
        blocks = [gpus[at : at + tp] for gpus in nodes for at in range(0, len(gpus) - tp + 1, tp)]
        specs = [
            WorkerSpec(worker=WorkerId(slot + number), gpus=gpus, role=Role.COLOCATED)
            for number, gpus in enumerate(blocks)
        ]
        for spec in specs:
            self._submit(WorkerAdded(worker=spec.worker, gpus=spec.gpus, role=spec.role))
        return specs

    async def _start_overlap(self, context: FleetContext, specs: Sequence[WorkerSpec]) -> None:
        """On GPUs that the trainer lends for it; then they sleep, and it has them back."""
        lent = [gpu for spec in specs for gpu in spec.gpus]
        loans, workers = self.scheduler.hands.loans, context.workers
        self._fail_if(await loans.lend(lent))
        report = await workers.fleet.start(specs, workers.start_timeout_s)
        if report.failed:
            self._fail_if("; ".join(f"worker {worker}: {detail}" for worker, detail in report.failed.items()))
        # One that is lost on the way has been removed, and costs the others nothing.
        await asyncio.gather(*(self.scheduler.hands.perform(Sleep(worker=spec.worker)) for spec in specs))
        await self.scheduler.hands.ended(lent)
        self._fail_if(await loans.reclaim(lent))
        self.scheduler.tell(Moment.WORKERS_CHANGED)

    def _fail_if(self, why_not: str | None) -> None:
        if why_not is not None:
            raise RunFailed(f"rollout workers on training GPUs: {why_not}")

    def _submit(self, event: StateEvent) -> None:
        if refusal := self.scheduler.workers.state.submit(event):
            raise RunFailed(f"fleet: {refusal.detail}")
