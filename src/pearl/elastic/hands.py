"""What an action of a plan does: to processes, to the router, to the trainer's GPUs, and to the fleet state.

Laws:

- the state says that a worker is in transition before anything happens to it, and that it serves once it does;
- what leaves, leaves: a worker that does not go when asked is ended, and one that is gone already needs nothing;
- a GPU of the trainer is lent before a worker on it wakes or starts, and reclaimed after it sleeps or has ended;
- a process begins on GPUs only when those that are ending there have ended;
- a worker that does not answer is lost, and never asked again;
- every wait is bounded; the state is never told what it would refuse.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pearl.core.actions import Action, Admit, Drain, GiveBack, LoadWeights, SetRole, Sleep, Start, Stop, Wake
from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    GpuOwner,
    GpusLeft,
    Role,
    RoleChanged,
    StateEvent,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from pearl.elastic.loans import Loans
from pearl.errors import PearlError, RunFailed, WorkerLost
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.pipeline.workers import Workers
from pearl.ports import GpuSource, WorkerSpec
from pearl.records.ids import GpuId, WorkerId

_log = logging.getLogger(__name__)

START_MARGIN_S = 30.0
"""What a start may take beyond its own time-out before it counts as failed."""


class ActionFailed(PearlError):
    """An action did not succeed; whatever it began is still to be taken back."""


class NothingDone(ActionFailed):
    """An action could not even begin: there is nothing to take back."""


@dataclass(slots=True, kw_only=True)
class Hands:
    """Carries out single actions."""

    workers: Workers
    loans: Loans
    source: GpuSource | None
    nursery: Nursery
    timeout_s: float
    """For a change of a process that is no start: sleeping, waking, a role, an end."""
    stop_grace_s: float = 0.0
    lost: dict[WorkerId, None] = field(default_factory=dict)
    """Slots whose worker was lost, and is not back: starting one is a restart."""
    _counted: dict[WorkerId, int] = field(default_factory=dict)
    """Restarts of slots that do not serve yet."""
    _ending: dict[WorkerId, asyncio.Task[None]] = field(default_factory=dict)
    _lives: dict[WorkerId, int] = field(default_factory=dict)
    """Slot -> workers that were started in it: what is done to one of them says nothing of the next."""

    @property
    def state(self) -> FleetState:
        """The newest version."""
        return self.workers.state.snapshot

    async def perform(self, action: Action) -> None:
        """Do it.

        Raises:
            ActionFailed: it did not succeed.
            RunFailed: all restarts are used up.
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
                self._require(worker)
                await self._set_role(worker, role)
            case Start():
                await self._start(action)
            case Wake(worker=worker, role=role):
                await self._wake(worker, role)
            case LoadWeights(worker=worker):
                self._require(worker)
                self._fail_if(await self.workers.load(worker))
            case Admit(workers=workers):
                await self._admit(workers)

    async def reclaim(self) -> str | None:
        """Give the trainer back all that it has lent and nobody uses; or why it did not take it."""
        return await self.loans.reclaim_all(self._used)

    def _used(self) -> dict[GpuId, None]:
        workers = self.state.workers.values()
        used = dict.fromkeys(gpu for w in workers if w.activity is not Activity.INACTIVE for gpu in w.gpus)
        return used | dict.fromkeys(gpu for worker in self._ending for gpu in self._gpus(worker))

    # -- leaving ------------------------------------------------------------------------------------------------------

    def end(self, worker: WorkerId) -> asyncio.Task[None]:
        """End what there is of a worker's process, in the background."""
        running = self._ending.get(worker)
        if running is None:
            running = self.nursery.spawn(self._end(worker), name=f"elastic: end of worker {worker}")
            self._ending[worker] = running
        return running

    async def _end(self, worker: WorkerId) -> None:
        try:
            async with guard(self.timeout_s + self.stop_grace_s, f"worker {worker}: stop"):
                await self.workers.fleet.stop([worker], self.stop_grace_s)
        except PearlError as error:
            # Nobody serves with it any more, and what it has on its GPUs is not ours to wait for.
            _log.warning("worker %d does not end: %s", worker, error)
        finally:
            del self._ending[worker]

    def is_ending(self, gpus: Collection[GpuId]) -> bool:
        """Whether a process on one of these GPUs has been told to end and has not."""
        return any(gpu in gpus for worker in self._ending for gpu in self._gpus(worker))

    async def ended(self, gpus: Collection[GpuId] | None = None) -> None:
        """Wait until nothing ends on these GPUs, or on any; each end is bounded."""
        for worker, task in list(self._ending.items()):
            if gpus is None or any(gpu in gpus for gpu in self._gpus(worker)):
                await asyncio.shield(task)

    async def _drain(self, worker: WorkerId) -> None:
        found = self.state.workers.get(worker)
        if found is None:
            self.workers.router.leave(worker)
            return
        if found.activity is Activity.ACTIVE:
            self._submit(ActivityChanged(worker=worker, activity=Activity.TRANSITIONING))
        await self.workers.router.drain(worker)

    async def _stop(self, worker: WorkerId) -> None:
        life = self._life(worker)
        self.workers.router.leave(worker)
        await asyncio.shield(self.end(worker))
        if worker in self.state.workers and self._life(worker) == life:
            self._submit(WorkerRemoved(worker=worker))

    async def _sleep(self, worker: WorkerId) -> None:
        self.workers.router.leave(worker)
        found, life = self.state.workers.get(worker), self._life(worker)
        if found is None or found.activity is Activity.INACTIVE:
            return
        try:
            async with guard(self.timeout_s, f"worker {worker}: sleep"):
                await self.workers.fleet.sleep([worker])
        except PearlError as error:
            if self._life(worker) != life:
                return
            # Its GPUs are wanted: the process goes instead.
            _log.warning("worker %d does not sleep, and is ended: %s", worker, error)
            self.lost[worker] = None
            await self._stop(worker)
            return
        if worker in self.state.workers and self._life(worker) == life:
            self._submit(ActivityChanged(worker=worker, activity=Activity.INACTIVE))
            self.lost.pop(worker, None)

    async def _give_back(self, gpus: tuple[GpuId, ...], to: GpuOwner) -> None:
        if to is GpuOwner.TRAINING:
            self._fail_if(await self.loans.reclaim(gpus))
            return
        here = tuple(gpu for gpu in gpus if gpu in self.state.gpus)
        if here:
            self._submit(GpusLeft(gpus=here))
        try:
            if here and self.source is not None:
                async with guard(self.timeout_s, f"GPU source: giving back {len(here)} GPUs"):
                    await self.source.give_back(here)
        except PearlError as error:
            # They are not used any more, and it will take them anyway.
            _log.warning("%s", error)

    # -- coming -------------------------------------------------------------------------------------------------------

    async def _start(self, action: Start) -> None:
        worker, gpus = action.worker, action.gpus
        await self.ended(gpus)
        here = self.state.gpus
        if worker in self.state.workers or any(gpu not in here for gpu in gpus):
            raise NothingDone(f"worker {worker}: its GPUs are gone, or its slot is taken")
        self._count_restart(worker)
        self._submit(WorkerAdded(worker=worker, gpus=gpus, role=action.role))
        life = self._lives[worker] = self._life(worker) + 1
        if here[gpus[0]].owner is GpuOwner.TRAINING:
            self._fail_if(await self.loans.lend(gpus))
        spec, timeout_s = WorkerSpec(worker=worker, gpus=gpus, role=action.role), self.workers.start_timeout_s
        try:
            async with guard(timeout_s + START_MARGIN_S, f"worker {worker}: start"):
                report = await self.workers.fleet.start([spec], timeout_s)
        except PearlError as error:
            raise ActionFailed(str(error)) from error
        if report.failed:
            raise ActionFailed("; ".join(f"worker {each}: {why}" for each, why in report.failed.items()))
        self._still(worker, life)

    def forgive(self, gpus: Collection[GpuId]) -> None:
        """These GPUs were withdrawn: workers that died with them, maybe before that was told, are no restarts."""
        gone = frozenset(gpus)
        for worker in [worker for worker in self.lost if not gone.isdisjoint(self._gpus(worker))]:
            del self.lost[worker]
            self.workers.restarts -= self._counted.pop(worker, 0)

    def _count_restart(self, worker: WorkerId) -> None:
        workers = self.workers
        if worker not in self.lost:
            return
        workers.restarts += 1
        self._counted[worker] = self._counted.get(worker, 0) + 1
        if workers.restarts > workers.max_restarts:
            raise RunFailed(
                f"rollout worker {worker}: lost, and all cluster.max_worker_restarts = {workers.max_restarts} are used up"
            )

    async def _wake(self, worker: WorkerId, role: Role) -> None:
        found = self._require(worker)
        if found.activity is not Activity.INACTIVE:
            raise NothingDone(f"worker {worker}: it is {found.activity.value}, want it asleep")
        self._submit(ActivityChanged(worker=worker, activity=Activity.TRANSITIONING))
        if self.state.is_overlap(worker):
            self._fail_if(await self.loans.lend(found.gpus))
        await self._ask(worker, "wake", self.workers.fleet.wake([worker]))
        await self._set_role(worker, role)

    async def _set_role(self, worker: WorkerId, role: Role) -> None:
        life = self._life(worker)
        await self._ask(worker, f"role {role.value}", self.workers.fleet.set_role(worker, role))
        if self._still(worker, life).role is not role:
            self._submit(RoleChanged(worker=worker, role=role))

    async def _ask(self, worker: WorkerId, what: str, answer: Coroutine[Any, Any, None]) -> None:
        """Have a process do something; one that does not answer is lost."""
        life = self._life(worker)
        try:
            async with guard(self.timeout_s, f"worker {worker}: {what}"):
                await answer
        except (GuardExpired, WorkerLost) as error:
            if self._life(worker) == life:
                self.workers.lost(worker, str(error))
            raise ActionFailed(str(error)) from error
        except PearlError as error:
            raise ActionFailed(str(error)) from error

    async def _admit(self, workers: tuple[WorkerId, ...]) -> None:
        """Those that the router knows serve again; the others come new, all at once."""
        router = self.workers.router
        roles = {worker: self._require(worker).role for worker in workers}
        lives = {worker: self._life(worker) for worker in workers}
        new = {worker: role for worker, role in roles.items() if router.role(worker) is None}
        if new:
            self._fail_if(await self.workers.admit(new))
        gone = [w for w in workers if w not in self.state.workers or self._life(w) != lives[w]]
        if gone:
            for worker in (*new, *gone):
                router.leave(worker)
            raise ActionFailed(f"worker {gone[0]}: lost before it served")
        for worker in workers:
            self._submit(ActivityChanged(worker=worker, activity=Activity.ACTIVE))
            router.set_role(worker, roles[worker])
            self.lost.pop(worker, None)
            self._counted.pop(worker, None)

    # -- the state ----------------------------------------------------------------------------------------------------

    def _gpus(self, worker: WorkerId) -> tuple[GpuId, ...]:
        return self.state.slots.get(worker, ())

    def _require(self, worker: WorkerId) -> Worker:
        found = self.state.workers.get(worker)
        if found is None:
            raise NothingDone(f"worker {worker}: it is gone")
        return found

    def _life(self, worker: WorkerId) -> int:
        return self._lives.get(worker, 0)

    def _still(self, worker: WorkerId, life: int) -> Worker:
        found = self.state.workers.get(worker)
        if found is None or self._life(worker) != life:
            raise ActionFailed(f"worker {worker}: lost meanwhile")
        return found

    def _submit(self, event: StateEvent) -> None:
        if refusal := self.workers.state.submit(event):
            raise ActionFailed(refusal.detail)

    def _fail_if(self, why_not: str | None) -> None:
        if why_not is not None:
            raise ActionFailed(why_not)
