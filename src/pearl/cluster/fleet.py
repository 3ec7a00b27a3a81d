"""The `Fleet` port on Ray: one actor process per rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from pearl.cluster.calls import answer, end_actor, start_actor
from pearl.cluster.engine_actor import EngineActor, RayEngine
from pearl.config.engine import EngineConfig
from pearl.core.state import Role
from pearl.errors import EngineError, PearlError, WorkerLost
from pearl.ports import Engine, FleetEvent, StartReport, WorkerGone, WorkerSpec, WorkerUnwell
from pearl.records.ids import WorkerId


@dataclass(slots=True)
class _Process:
    actor: Any
    engine: RayEngine
    pid: int
    watches: tuple[asyncio.Task[None], ...]


class RayFleet:
    """Starts, watches and ends workers; use inside a running event loop."""

    def __init__(self, model: Path, config: EngineConfig, health_timeout_s: float) -> None:
        self._model, self._config, self._health_timeout_s = model, config, health_timeout_s
        self._processes: dict[WorkerId, _Process] = {}
        self._epochs: dict[WorkerId, int] = {}
        self._events: asyncio.Queue[FleetEvent] = asyncio.Queue()

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        """Start a group of workers, all or nothing."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        actors = {spec.worker: self._spawn(spec) for spec in specs}
        results = await asyncio.gather(
            *(start_actor(actor, f"worker {worker}", timeout_s) for worker, actor in actors.items()),
            return_exceptions=True,
        )
        failed = {
            worker: str(result)
            for worker, result in zip(actors, results, strict=True)
            if isinstance(result, BaseException)
        }
        if failed:
            for actor in actors.values():
                end_actor(actor)
            return StartReport(started=(), failed=failed, seconds=loop.time() - began_s)
        for (worker, actor), pid in zip(actors.items(), results, strict=True):
            if isinstance(pid, int):
                self._processes[worker] = self._watched(worker, actor, pid)
        return StartReport(started=tuple(actors), failed={}, seconds=loop.time() - began_s)

    def _spawn(self, spec: WorkerSpec) -> Any:
        if spec.role is Role.TRAINING:
            raise EngineError(f"worker {spec.worker}: got role {spec.role.value}, want a role of rollout")
        self._epochs[spec.worker] = self._epochs.get(spec.worker, -1) + 1
        remote = ray.remote(num_cpus=0, max_restarts=0)(EngineActor)
        return remote.remote(str(self._model), self._config, spec.worker, self._epochs[spec.worker])

    def _watched(self, worker: WorkerId, actor: Any, pid: int) -> _Process:
        engine = RayEngine(actor, worker)
        watches = (
            asyncio.create_task(self._watch_death(worker, actor), name=f"death of worker {worker}"),
            asyncio.create_task(self._watch_health(worker, engine), name=f"health of worker {worker}"),
        )
        return _Process(actor, engine, pid, watches)

    async def _watch_death(self, worker: WorkerId, actor: Any) -> None:
        try:
            await answer(actor.wait_for_death.remote(), f"worker {worker}")
        except PearlError as error:
            await self._events.put(WorkerGone(worker=worker, detail=str(error)))

    async def _watch_health(self, worker: WorkerId, engine: RayEngine) -> None:
        while True:
            await asyncio.sleep(self._health_timeout_s / 4)
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    await engine.stats()
            except TimeoutError:
                detail = f"worker {worker}: no answer within {self._health_timeout_s:g} s"
                await self._events.put(WorkerUnwell(worker=worker, detail=detail))
                return
            except PearlError:
                return

    async def stop(self, workers: Sequence[WorkerId], grace_s: float) -> None:
        """End processes at once: a worker has nothing of its own to save, so no grace is needed."""
        del grace_s
        for worker in workers:
            process = self._processes.pop(worker, None)
            if process is None:
                continue
            for watch in process.watches:
                watch.cancel()
            await asyncio.gather(*process.watches, return_exceptions=True)
            end_actor(process.actor)

    async def sleep(self, workers: Sequence[WorkerId]) -> None:
        """Release weights and KV and keep the processes."""
        engines = [self._engine(worker) for worker in workers]
        for worker in workers:
            self._epochs[worker] += 1  # as the engine does: a process that comes after it must not repeat an epoch
        await asyncio.gather(*(engine.sleep() for engine in engines))

    async def wake(self, workers: Sequence[WorkerId]) -> None:
        """Take memory for KV again."""
        await asyncio.gather(*(self._engine(worker).wake() for worker in workers))

    async def set_role(self, worker: WorkerId, role: Role) -> None:
        """Nothing to do in the process: a role is only which requests a worker gets."""
        self._engine(worker)
        if role is Role.TRAINING:
            raise EngineError(f"worker {worker}: got role {role.value}, want a role of rollout")

    def engine(self, worker: WorkerId) -> Engine:
        """The engine of a started worker."""
        return self._engine(worker)

    def _engine(self, worker: WorkerId) -> RayEngine:
        if worker not in self._processes:
            raise WorkerLost(f"worker {worker}: not started")
        return self._processes[worker].engine

    def pid(self, worker: WorkerId) -> int:
        """Process id of a started worker."""
        return self._processes[worker].pid

    async def events(self) -> AsyncIterator[FleetEvent]:
        """Deaths and hangs, each once."""
        while True:
            yield await self._events.get()
