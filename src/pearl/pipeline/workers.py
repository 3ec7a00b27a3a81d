"""Rollout workers of a run: started, given the newest weights, admitted, and restarted when they are lost.

Laws: weights before admission; one load at a time over the fleet, so that a worker which starts during a publication
ends up with the newest version; every change goes through the fleet state first; restarts are bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pearl.core.state import Activity, ActivityChanged, Gpu, GpusJoined, Role, WorkerAdded, WorkerRemoved
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
    restarts: int = 0
    router: Router = field(init=False)
    _specs: dict[WorkerId, WorkerSpec] = field(default_factory=dict)
    _restarting: set[WorkerId] = field(default_factory=set)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _newest: Manifest | None = None
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.router = Router(self.nursery, self.max_turn_attempts, self.lost, load_timeout_s=self.load_timeout_s)

    async def start(self, gpus: Sequence[Gpu], specs: Sequence[WorkerSpec], manifest: Manifest) -> None:
        """Start the fleet and admit it.

        Raises:
            RunFailed: a worker did not start; nothing is left running.
        """
        self._newest = manifest
        self.state.submit(GpusJoined(gpus=tuple(gpus)))
        self.nursery.spawn(self._watch(), name="workers: fleet events")
        report = await self.fleet.start(specs, self.start_timeout_s)
        if report.failed:
            raise RunFailed(f"rollout workers: {_failures(report.failed)}; none was started")
        for spec in specs:
            self._specs[spec.worker] = spec
            await self._admit(spec)

    async def publish(self, manifest: Manifest) -> None:
        """Load a new version into every serving worker; afterwards nobody serves older weights."""
        async with self._loading:
            self._newest = manifest
            await self.router.load(manifest, self.load_mode)

    async def stop(self) -> None:
        """End all workers; none is restarted from now on."""
        self._stopping = True
        await self.fleet.stop(tuple(self._specs), STOP_GRACE_S)

    def lost(self, worker: WorkerId, detail: str) -> None:
        """A worker died, hangs or refuses to load: take it out and start it again. Repeating it does nothing."""
        if self._stopping:
            return
        self.router.retire(worker, detail)
        if worker not in self._specs or worker in self._restarting:
            return
        self._restarting.add(worker)
        self.state.submit(WorkerRemoved(worker=worker))
        self.nursery.spawn(self._restart(self._specs[worker], detail), name=f"restart worker {worker}")

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
            await self.fleet.stop([spec.worker], 0.0)
            report = await self.fleet.start([spec], self.start_timeout_s)
            if not report.failed and await self._readmit(spec):
                return
            detail = _failures(report.failed) or "its weights could not be loaded"

    async def _readmit(self, spec: WorkerSpec) -> bool:
        try:
            await self._admit(spec)
        except (WorkerLost, WeightsError, GuardExpired):
            self.state.submit(WorkerRemoved(worker=spec.worker))
            return False
        return True

    async def _admit(self, spec: WorkerSpec) -> None:
        self.state.submit(WorkerAdded(worker=spec.worker, gpus=spec.gpus, role=spec.role))
        engine = self.fleet.engine(spec.worker)
        async with self._loading:
            manifest = self._newest
            if manifest is None:
                raise WeightsError(f"worker {spec.worker}: no weights were published before its start")
            async with guard(self.load_timeout_s, f"worker {spec.worker}: loading weights {manifest.version}"):
                await engine.load(manifest, self.load_mode)
            self._restarting.discard(spec.worker)
            self.state.submit(ActivityChanged(worker=spec.worker, activity=Activity.ACTIVE))
            self.router.admit(spec.worker, engine, manifest.version)


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
