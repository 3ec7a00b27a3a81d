"""Rollout workers of a run: started, given the newest weights, admitted, and restarted when they are lost.

Laws: weights before admission; one version is loaded at a time over the fleet, so that a worker which starts during a
publication ends up with the newest; every change goes through the fleet state first; restarts are bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pearl.core.state import (
    Activity,
    ActivityChanged,
    Gpu,
    GpusJoined,
    Role,
    StateEvent,
    WorkerAdded,
    WorkerRemoved,
)
from pearl.errors import RunFailed, WeightsError, WorkerLost
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.pipeline.router import Router
from pearl.pipeline.state import StateHolder
from pearl.ports import Fleet, WorkerSpec
from pearl.records.ids import WorkerId
from pearl.records.training import LoadMode, Manifest

STOP_GRACE_S = 5.0
"""What a worker gets to end by itself; its tokens are with the router already."""


@dataclass(slots=True, kw_only=True)
class Workers:
    """The rollout fleet as the pipeline sees it; one per run."""

    fleet: Fleet
    state: StateHolder
    nursery: Nursery
    start_timeout_s: float
    load_timeout_s: float
    load_mode: LoadMode
    max_restarts: int
    max_turn_attempts: int
    silence_s: float
    """As `pearl.pipeline.router` has it."""
    restarts: int = 0
    router: Router = field(init=False)
    _specs: dict[WorkerId, WorkerSpec] = field(default_factory=dict)
    _restarting: dict[WorkerId, asyncio.Task[None]] = field(default_factory=dict)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _newest: Manifest | None = None
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.router = Router(
            self.nursery,
            self.max_turn_attempts,
            self.lost,
            load_timeout_s=self.load_timeout_s,
            silence_s=self.silence_s,
        )

    async def start(self, gpus: Sequence[Gpu], specs: Sequence[WorkerSpec], manifest: Manifest) -> None:
        """Start the fleet and admit it; a worker that is lost before it serves is restarted like any other.

        Raises:
            RunFailed: no such fleet can be, or a process did not start; none is left running.
        """
        self._newest = manifest
        self._require(GpusJoined(gpus=tuple(gpus)))
        for spec in specs:
            self._add(spec)
        report = await self.fleet.start(specs, self.start_timeout_s)
        if report.failed:
            raise RunFailed(f"rollout workers: {_failures(report.failed)}; none was started")
        self._specs = {spec.worker: spec for spec in specs}
        self.nursery.spawn(self._watch(), name="workers: fleet events")
        async with self._loading:
            reasons = await asyncio.gather(*(self._admit(spec, restart=None) for spec in specs))
        for spec, why_not in zip(specs, reasons, strict=True):
            if why_not is not None:
                self.lost(spec.worker, why_not)

    async def publish(self, manifest: Manifest) -> None:
        """Load a new version into every serving worker; afterwards nobody serves older weights."""
        async with self._loading:
            self._newest = manifest
            await self.router.load(manifest, self.load_mode)

    async def stop(self) -> None:
        """End all workers, those that are being restarted included; none is restarted from now on."""
        self._stopping = True
        self.router.close()
        restarts = list(self._restarting.values())
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        workers = self.state.snapshot.workers
        for worker in sorted(workers):
            if workers[worker].role is not Role.TRAINING:
                self.state.submit(WorkerRemoved(worker=worker))
        await self.fleet.stop(tuple(self._specs), STOP_GRACE_S)

    def lost(self, worker: WorkerId, detail: str) -> None:
        """A worker died, hangs or refuses to load: take it out and start it again. Repeating it does nothing."""
        if self._stopping:
            return
        self.router.retire(worker, detail)
        if worker not in self._specs or worker in self._restarting:
            return
        self.state.submit(WorkerRemoved(worker=worker))
        self._restarting[worker] = self.nursery.spawn(
            self._restart(self._specs[worker], detail), name=f"restart worker {worker}"
        )

    async def _watch(self) -> None:
        async for event in self.fleet.events():
            self.lost(event.worker, event.detail)

    async def _restart(self, spec: WorkerSpec, detail: str) -> None:
        while True:
            self.restarts += 1
            if self.restarts > self.max_restarts:
                raise RunFailed(
                    f"rollout worker {spec.worker}: lost ({detail}), and all cluster.max_worker_restarts = "
                    f"{self.max_restarts} are used up"
                )
            self._add(spec)
            await self.fleet.stop([spec.worker], 0.0)
            report = await self.fleet.start([spec], self.start_timeout_s)
            why_not = _failures(report.failed) or None
            if why_not is None:
                async with self._loading:
                    why_not = await self._admit(spec, restart=asyncio.current_task())
            if why_not is None:
                del self._restarting[spec.worker]
                return
            detail = why_not
            self.state.submit(WorkerRemoved(worker=spec.worker))

    def _add(self, spec: WorkerSpec) -> None:
        self._require(WorkerAdded(worker=spec.worker, gpus=spec.gpus, role=spec.role))

    def _require(self, event: StateEvent) -> None:
        if refusal := self.state.submit(event):
            raise RunFailed(f"rollout workers: {refusal.detail}")

    async def _admit(self, spec: WorkerSpec, *, restart: asyncio.Task[None] | None) -> str | None:
        """Load the newest weights, under the lock, and let the worker serve; or why not.

        `restart` is the task that restarts it: another one means that the worker was taken for lost meanwhile.
        """
        manifest = self._newest
        assert manifest is not None, "weights are published before a fleet starts"
        try:
            engine = self.fleet.engine(spec.worker)
            async with guard(self.load_timeout_s, f"worker {spec.worker}: loading weights {manifest.version}"):
                await engine.load(manifest, self.load_mode)
        except (WorkerLost, WeightsError, GuardExpired) as error:
            return str(error)
        if self._restarting.get(spec.worker) is not restart:
            return "taken for lost while it loaded weights"
        self.state.submit(ActivityChanged(worker=spec.worker, activity=Activity.ACTIVE))
        self.router.admit(spec.worker, engine, manifest.version)
        return None


def _failures(failed: Mapping[WorkerId, str]) -> str:
    return "; ".join(f"worker {worker}: {failed[worker]}" for worker in sorted(failed))


def specs_of(roles: Sequence[tuple[Role, int]], gpus: Sequence[Gpu]) -> tuple[WorkerSpec, ...]:
    """Give each worker of a shape its slot and its GPUs, in order.

    Raises:
        RunFailed: too few GPUs.
    """
    specs: list[WorkerSpec] = []
    free = list(gpus)
    for slot, (role, tp) in enumerate(roles):
        mine, free = free[:tp], free[tp:]
        if len(mine) < tp:
            raise RunFailed(f"shape: worker {slot} needs {tp} GPUs, but only {len(mine)} of {len(gpus)} are left")
        specs.append(WorkerSpec(worker=WorkerId(slot), gpus=tuple(gpu.id for gpu in mine), role=role))
    return tuple(specs)
