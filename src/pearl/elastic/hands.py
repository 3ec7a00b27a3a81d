"""What an action of a plan does: to processes, to the router, to the trainer's GPUs, and to the fleet state.

Laws:

- the state says that a worker is in transition before anything happens to it, and that it serves once it does;
- what leaves, leaves: a worker that does not go when asked is ended, and one that is gone already needs nothing;
- a GPU of the trainer is lent before a worker on it wakes, and reclaimed after it sleeps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pearl.core.actions import Action, Admit, Drain, GiveBack, LoadWeights, SetRole, Sleep, Start, Stop, Wake
from pearl.core.state import (
    Activity,
    ActivityChanged,
    GpuOwner,
    GpusLeft,
    Role,
    RoleChanged,
    StateEvent,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from pearl.errors import PearlError
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.workers import Workers
from pearl.ports import GpuSource, Trainer, WorkerSpec
from pearl.records.ids import GpuId, WorkerId

_log = logging.getLogger(__name__)


class ActionFailed(PearlError):
    """An action did not succeed; whatever it began is still to be taken back."""


@dataclass(slots=True, kw_only=True)
class Hands:
    """Carries out single actions."""

    workers: Workers
    trainer: Trainer
    source: GpuSource | None
    timeout_s: float
    """For a change of a process that is no start: sleeping, waking, a role."""
    stop_grace_s: float = 0.0
    lent: dict[GpuId, None] = field(default_factory=dict)
    """GPUs of the trainer that rollout has, in order of lending."""

    async def perform(self, action: Action) -> None:
        """Do it.

        Raises:
            ActionFailed: it did not succeed.
        """
        match action:
            case Drain(worker=worker):
                await self._drain(worker)
            case Stop(worker=worker):
                await self._stop(worker)
            case Sleep(worker=worker):
                await self._sleep(worker)
            case GiveBack(gpus=gpus, to=owner):
                await self._give_back(gpus, owner)
            case SetRole(worker=worker, role=role):
                await self._set_role(worker, role)
            case Start():
                await self._start(action)
            case Wake(worker=worker, role=role):
                await self._wake(worker, role)
            case LoadWeights(worker=worker):
                self._fail_if(await self.workers.load(worker))
            case Admit(workers=workers):
                await self._admit(workers)

    async def reclaim(self) -> None:
        """Give the trainer back all that it has lent and nobody uses."""
        state = self.workers.state.snapshot
        used = {gpu for w in state.workers.values() if w.activity is not Activity.INACTIVE for gpu in w.gpus}
        idle = tuple(gpu for gpu in self.lent if gpu not in used)
        if idle:
            await self._give_back(idle, GpuOwner.TRAINING)

    def gone(self, worker: WorkerId) -> None:
        """A worker died, or its GPUs left: what is known of it is forgotten."""
        self.workers.router.leave(worker)
        if worker in self.workers.state.snapshot.workers:
            self._submit(WorkerRemoved(worker=worker))

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def _drain(self, worker: WorkerId) -> None:
        found = self.workers.state.snapshot.workers.get(worker)
        if found is None:
            return
        if found.activity is Activity.ACTIVE:
            self._submit(ActivityChanged(worker=worker, activity=Activity.TRANSITIONING))
        await self.workers.router.drain(worker)

    async def _stop(self, worker: WorkerId) -> None:
        self.workers.router.leave(worker)
        try:
            async with guard(self.timeout_s + self.stop_grace_s, f"worker {worker}: stop"):
                await self.workers.fleet.stop([worker], self.stop_grace_s)
        except (PearlError, GuardExpired) as error:
            # Nobody serves with it any more, and what it has on its GPUs is not ours to wait for.
            _log.warning("worker %d does not end: %s", worker, error)
        finally:
            self.gone(worker)

    async def _sleep(self, worker: WorkerId) -> None:
        if worker not in self.workers.state.snapshot.workers:
            return
        self.workers.router.leave(worker)
        try:
            async with guard(self.timeout_s, f"worker {worker}: sleep"):
                await self.workers.fleet.sleep([worker])
        except (PearlError, GuardExpired):
            # Its GPUs are wanted: the process goes instead, and is started again when it is.
            await self._stop(worker)
            return
        self._submit(ActivityChanged(worker=worker, activity=Activity.INACTIVE))

    async def _give_back(self, gpus: tuple[GpuId, ...], to: GpuOwner) -> None:
        if to is GpuOwner.TRAINING:
            wanted = tuple(gpu for gpu in gpus if gpu in self.lent)
            if wanted:
                await self.trainer.reclaim_gpus(wanted)
            for gpu in wanted:
                del self.lent[gpu]
            return
        here = tuple(gpu for gpu in gpus if gpu in self.workers.state.snapshot.gpus)
        if here:
            self._submit(GpusLeft(gpus=here))
        if self.source is not None:
            await self.source.give_back(gpus)

    # -- coming -------------------------------------------------------------------------------------------------------

    async def _start(self, action: Start) -> None:
        worker = action.worker
        self._submit(WorkerAdded(worker=worker, gpus=action.gpus, role=action.role))
        spec = WorkerSpec(worker=worker, gpus=action.gpus, role=action.role)
        report = await self.workers.fleet.start([spec], self.workers.start_timeout_s)
        if report.failed:
            self.gone(worker)
            raise ActionFailed("; ".join(f"worker {each}: {why}" for each, why in report.failed.items()))
        self._require(worker)

    async def _wake(self, worker: WorkerId, role: Role) -> None:
        found = self._require(worker)
        self._submit(ActivityChanged(worker=worker, activity=Activity.TRANSITIONING))
        wanted = tuple(gpu for gpu in found.gpus if gpu not in self.lent)
        self.lent |= dict.fromkeys(wanted)
        try:
            if wanted and self.workers.state.snapshot.is_overlap(worker):
                await self.trainer.lend_gpus(wanted)
            async with guard(self.timeout_s, f"worker {worker}: wake"):
                await self.workers.fleet.wake([worker])
        except (PearlError, GuardExpired) as error:
            raise ActionFailed(str(error)) from error
        await self._set_role(worker, role)

    async def _set_role(self, worker: WorkerId, role: Role) -> None:
        self._require(worker)
        try:
            async with guard(self.timeout_s, f"worker {worker}: role {role.value}"):
                await self.workers.fleet.set_role(worker, role)
        except (PearlError, GuardExpired) as error:
            raise ActionFailed(str(error)) from error
        self._require(worker)
        self._submit(RoleChanged(worker=worker, role=role))

    async def _admit(self, workers: tuple[WorkerId, ...]) -> None:
        """Those that the router knows serve again; the others come new, all at once."""
        router = self.workers.router
        roles = {worker: self._require(worker).role for worker in workers}
        new = {worker: role for worker, role in roles.items() if router.role(worker) is None}
        if new:
            self._fail_if(await self.workers.admit(new))
        for worker in workers:
            self._require(worker)
            self._submit(ActivityChanged(worker=worker, activity=Activity.ACTIVE))
            router.set_role(worker, roles[worker])

    # -- the state ----------------------------------------------------------------------------------------------------

    def _require(self, worker: WorkerId) -> Worker:
        found = self.workers.state.snapshot.workers.get(worker)
        if found is None:
            raise ActionFailed(f"worker {worker}: it is gone")
        return found

    def _submit(self, event: StateEvent) -> None:
        if refusal := self.workers.state.submit(event):
            raise ActionFailed(refusal.detail)

    def _fail_if(self, why_not: str | None) -> None:
        if why_not is not None:
            raise ActionFailed(why_not)
