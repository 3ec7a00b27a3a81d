"""Rollout workers of a run: started, given the newest weights, admitted, given other roles, and restarted when lost.

Laws: weights before admission; one version is loaded at a time over the fleet, so that a worker which starts during a
publication ends up with the newest; every change goes through the fleet state first; a worker changes its role drained and
keeps its process and its prefixes; a worker that is lost on the way comes back in the role that it was to take; restarts,
and the waits of a change, are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pearl.core.state import (
    Activity,
    ActivityChanged,
    Gpu,
    GpusJoined,
    Role,
    RoleChanged,
    StateEvent,
    WorkerAdded,
    WorkerRemoved,
)
from pearl.errors import EngineError, RunFailed, WeightsError, WorkerLost
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.pipeline.router import Router
from pearl.pipeline.state import StateHolder
from pearl.ports import Fleet, WorkerSpec
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.training import LoadMode, Manifest

_log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""What a worker gets to end by itself; its tokens are with the router already."""

ROLE_TIMEOUT_S = 30.0
"""For a drained worker to take another role: nothing moves, a GPU engine may capture graphs."""


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
    append_prefill_tokens: int = 64
    """As `engine.append_prefill_tokens`."""
    readback: bool = True
    """As `engine.readback`."""
    on_lost: Callable[[WorkerId, str], None] | None = None
    """Who deals with a lost worker; None: it is started again."""
    restarts: int = 0
    router: Router = field(init=False)
    _specs: dict[WorkerId, WorkerSpec] = field(default_factory=dict)
    _restarting: dict[WorkerId, asyncio.Task[None]] = field(default_factory=dict)
    _role_locks: dict[WorkerId, asyncio.Lock] = field(default_factory=dict)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _newest: Manifest | None = None
    _loaded: dict[WorkerId, WeightVersion] = field(default_factory=dict)
    """What workers loaded that were admitted, or are about to be."""
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.router = Router(
            self.nursery,
            self.max_turn_attempts,
            self.lost,
            load_timeout_s=self.load_timeout_s,
            silence_s=self.silence_s,
            append_prefill_tokens=self.append_prefill_tokens,
            readback=self.readback,
        )

    @property
    def is_stopping(self) -> bool:
        """Whether the run is ending its workers."""
        return self._stopping

    async def start(self, gpus: Sequence[Gpu], specs: Sequence[WorkerSpec], manifest: Manifest) -> None:
        """Start the fleet and admit it; a worker that is lost before it serves is restarted like any other.

        Raises:
            RunFailed: no such fleet can be, or a process did not start; none is left running.
        """
        self.begin(manifest)
        self._require(GpusJoined(gpus=tuple(gpus)))
        for spec in specs:
            self._add(spec)
        report = await self.fleet.start(specs, self.start_timeout_s)
        if report.failed:
            raise RunFailed(f"rollout workers: {_failures(report.failed)}; none was started")
        self._specs = {spec.worker: spec for spec in specs}
        async with self._loading:
            reasons = await asyncio.gather(*(self._admit(spec, restart=None) for spec in specs))
        for spec, why_not in zip(specs, reasons, strict=True):
            if why_not is not None:
                self.lost(spec.worker, why_not)

    def begin(self, manifest: Manifest) -> None:
        """Hear of losses from now on; `manifest` is what workers load that are admitted before the next publication."""
        self._newest = manifest
        self.nursery.spawn(self._watch(), name="workers: fleet events")

    async def load(self, worker: WorkerId) -> str | None:
        """Give a worker that does not serve the newest weights; or why not. It may take newer ones when it is admitted."""
        assert self._newest is not None, "weights are published before a fleet starts"
        return await self._load(worker, self._newest)

    async def admit(self, roles: Mapping[WorkerId, Role]) -> str | None:
        """Let workers serve, all at once, with the newest weights; or why not: then none does."""
        async with self._loading:
            manifest = self._newest
            assert manifest is not None, "weights are published before a fleet starts"
            behind = [worker for worker in roles if self._loaded.get(worker) != manifest.version]
            reasons = await asyncio.gather(*(self._load(worker, manifest) for worker in behind))
            if why_not := "; ".join(reason for reason in reasons if reason):
                return why_not
            try:
                engines = {worker: self.fleet.engine(worker) for worker in roles}
            except WorkerLost as error:
                return str(error)
            for worker, role in roles.items():
                self.router.admit(worker, engines[worker], manifest.version, role)
        return None

    async def _load(self, worker: WorkerId, manifest: Manifest) -> str | None:
        try:
            async with guard(self.load_timeout_s, f"worker {worker}: loading weights {manifest.version}"):
                await self.fleet.engine(worker).load(manifest, self.load_mode)
        except (WorkerLost, WeightsError, EngineError, GuardExpired) as error:
            return str(error)
        self._loaded[worker] = manifest.version
        return None

    async def publish(self, manifest: Manifest) -> None:
        """Load a new version into every serving worker; afterwards nobody serves older weights."""
        async with self._loading:
            self._newest = manifest
            await self.router.load(manifest, self.load_mode)
            self._loaded = dict.fromkeys(self.router.workers, manifest.version)

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
        await self.fleet.stop(tuple({**self._specs, **workers}), STOP_GRACE_S)

    def lost(self, worker: WorkerId, detail: str) -> None:
        """A worker died, hangs or refuses to load: take it out and start it again. Repeating it does nothing."""
        if self._stopping:
            return
        served = self.router.engine(worker) is not None
        self.router.retire(worker, detail)
        self._loaded.pop(worker, None)
        if self.on_lost is not None:
            self.on_lost(worker, detail)
            return
        if worker not in self._specs or worker in self._restarting:
            return
        if not served:
            # Else the router has told it.
            _log.warning("worker %d lost before it served: %s", worker, detail)
        self.state.submit(WorkerRemoved(worker=worker))
        self._restarting[worker] = self.nursery.spawn(self._restart(worker, detail), name=f"restart worker {worker}")

    async def set_role(self, worker: WorkerId, role: Role) -> str | None:
        """Give a worker another role without a restart: drain it, change it, let it serve again; or why not.

        None: it serves in the role, or is being started and will. A change that has begun goes on when the caller is
        cancelled. Repeating it does nothing.
        """
        if role is Role.TRAINING:
            return f"worker {worker}: got role {role.value}, want a role of rollout"
        if worker not in self._specs:
            return f"got worker {worker}, want one of {sorted(self._specs)}"
        change = self.nursery.spawn(self._set_role(worker, role), name=f"worker {worker}: role {role.value}")
        return await asyncio.shield(change)

    async def _set_role(self, worker: WorkerId, role: Role) -> str | None:
        async with self._role_locks.setdefault(worker, asyncio.Lock()):
            if self._stopping:
                return f"worker {worker}: the fleet is being stopped"
            before = self._specs[worker]
            if before.role is role:
                return None
            # From here on a restart, under way or to come, ends in the new role.
            self._specs[worker] = replace(before, role=role)
            engine = self.router.engine(worker)
            if engine is None:
                return None
            self.state.submit(ActivityChanged(worker=worker, activity=Activity.TRANSITIONING))
            drained = await self.router.drain(worker)
            if not drained or self.router.engine(worker) is not engine:
                return None
            refusal = await self._change_role(worker, role)
            if self.router.engine(worker) is not engine:
                return None
            if refusal is None:
                self.state.submit(RoleChanged(worker=worker, role=role))
            else:
                self._specs[worker] = before
            self.state.submit(ActivityChanged(worker=worker, activity=Activity.ACTIVE))
            self.router.set_role(worker, self._specs[worker].role)
            return refusal

    async def _change_role(self, worker: WorkerId, role: Role) -> str | None:
        """Tell the process, which has nothing to do; a refusal leaves it as it was, anything else is a loss."""
        try:
            async with guard(ROLE_TIMEOUT_S, f"worker {worker}: role {role.value}"):
                await self.fleet.set_role(worker, role)
        except EngineError as error:
            return str(error)
        except (WorkerLost, GuardExpired) as error:
            self.lost(worker, str(error))
        return None

    async def _watch(self) -> None:
        async for event in self.fleet.events():
            self.lost(event.worker, event.detail)

    async def _restart(self, worker: WorkerId, detail: str) -> None:
        while True:
            spec = self._specs[worker]
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
            role = await self._take_role(spec)
        except (WorkerLost, WeightsError, EngineError, GuardExpired) as error:
            return str(error)
        if self._restarting.get(spec.worker) is not restart:
            return "taken for lost while it loaded weights"
        if role is not spec.role:
            self.state.submit(RoleChanged(worker=spec.worker, role=role))
        self.state.submit(ActivityChanged(worker=spec.worker, activity=Activity.ACTIVE))
        self.router.admit(spec.worker, engine, manifest.version, role)
        return None

    async def _take_role(self, spec: WorkerSpec) -> Role:
        """The role that a worker, not serving yet, is to have by now."""
        role = spec.role
        while (wanted := self._specs[spec.worker].role) is not role:
            async with guard(ROLE_TIMEOUT_S, f"worker {spec.worker}: role {wanted.value}"):
                await self.fleet.set_role(spec.worker, wanted)
            role = wanted
        return role


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
