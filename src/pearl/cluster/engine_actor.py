"""A rollout worker's process: the embedded engine behind an async Ray actor, and its client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pearl.cluster.calls import LINGER_S, answer
from pearl.cluster.kv_transport import ObjectStoreTransport, fetched, shifted
from pearl.config.engine import EngineConfig
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.errors import WorkerLost
from pearl.ports import EngineInfo, EngineStats
from pearl.records.ids import RequestId, TrajectoryId, WorkerId
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, TurnRequest

POLL_S = 1.0
"""An idle worker's event stream is asked again this often; events themselves arrive at once."""

RELEASE_S = 0.05
"""What a release may wait for company."""

Release = tuple[TrajectoryId, KvHandle | None]


class EngineActor:
    """Runs in the worker's process."""

    def __init__(self, model: str, config: EngineConfig, worker: int, epoch: int) -> None:
        self._model, self._config, self._worker, self._epoch = Path(model), config, WorkerId(worker), epoch
        self._engine: ThreadedEngine | None = None
        self._chunks: list[Chunk] = []
        self._said = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._fetching: set[RequestId] = set()
        """Requests whose KV is on its way."""
        self._interrupted: set[RequestId] = set()
        """Those of them that are to end as soon as it has come."""

    async def start(self) -> int:
        """Load the model; returns the process id."""
        self._engine = await ThreadedEngine.create(
            self._model, self._config, worker=self._worker, epoch=self._epoch, transport=ObjectStoreTransport()
        )
        self._pump = asyncio.create_task(self._listen(self._engine))
        return os.getpid()

    async def stop(self) -> None:
        """End the engine's thread."""
        if self._engine is not None:
            await self._engine.close()

    async def wait_for_death(self) -> None:
        """Never returns: its caller learns of this process' death at once."""
        await asyncio.Event().wait()

    async def call(self, releases: Sequence[Release], method: str, *arguments: Any) -> Any:
        """Forget some prefixes, then call a method of the engine by its port's name."""
        if self._engine is None or method not in _METHODS:
            raise ValueError(f"engine actor: got method {method!r}, want one of {_METHODS} after start()")
        await self.release(releases)
        if method == "submit":
            return await self._submit(self._engine, *arguments)
        if method == "interrupt":
            self._interrupted.update(self._fetching.intersection(*arguments))
        elif method == "sleep":
            self._interrupted.update(self._fetching)
        return await getattr(self._engine, method)(*arguments)

    async def _submit(self, engine: ThreadedEngine, requests: Sequence[TurnRequest]) -> None:
        engine.check_ids(requests, self._fetching)  # all or none, although they do not go together
        # What has no KV to fetch does not wait for what has, nor does KV that comes for KV that does not.
        handed = [shifted(request, time.monotonic()) for request in requests if request.kv is not None]
        self._fetching.update(request.id for request in handed)
        await engine.submit([request for request in requests if request.kv is None])
        await asyncio.gather(*(self._submit_fetched(engine, request) for request in handed))

    async def _submit_fetched(self, engine: ThreadedEngine, request: TurnRequest) -> None:
        try:
            request = await fetched(request)
            if request.id not in self._interrupted:
                await engine.submit([request])
                return
            self._chunks.append(Chunk.only_end(request, EndReason.INTERRUPTED))
            self._said.set()
        finally:
            self._fetching.discard(request.id)
            self._interrupted.discard(request.id)

    async def release(self, releases: Sequence[Release]) -> None:
        """Forget some prefixes and handles."""
        if self._engine is not None:
            for trajectory, kv in releases:
                await self._engine.release(trajectory, kv)

    async def poll(self, wait_s: float) -> tuple[Chunk, ...]:
        """The chunks since the last poll, waiting up to `wait_s` for the first; raises how the engine's stream ended."""
        if self._pump is None:
            raise ValueError("engine actor: poll() before start()")
        try:
            async with asyncio.timeout(wait_s):
                await self._said.wait()
        except TimeoutError:
            return ()
        await asyncio.sleep(LINGER_S)
        chunks, self._chunks = tuple(shifted(chunk, -time.monotonic()) for chunk in self._chunks), []
        if self._pump.done():
            if not chunks:
                await self._pump
                raise WorkerLost(f"worker {self._worker}: its event stream has ended")
        else:
            self._said.clear()
        return chunks

    async def _listen(self, engine: ThreadedEngine) -> None:
        try:
            async for chunks in engine.events():
                self._chunks += chunks
                self._said.set()
        finally:
            self._said.set()


_METHODS = ("info", "submit", "interrupt", "load", "stats", "sleep", "wake")


class RayEngine:
    """The `Engine` port of a worker in another process.

    Every trajectory ends with a release and nobody waits for it, so releases travel with the next call, or together after
    `RELEASE_S`: a remote call for each would cost more than a turn does.
    """

    def __init__(self, actor: Any, worker: WorkerId) -> None:
        self._actor = actor
        self._who = f"worker {worker}"
        self._releases: list[Release] = []
        self._timer: asyncio.TimerHandle | None = None

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await answer(self._actor.call.remote(self._take_releases(), method, *arguments), self._who)

    def _take_releases(self) -> list[Release]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        releases, self._releases = self._releases, []
        return releases

    def _send_releases(self) -> None:
        # Nobody waits for it; a dead worker is noticed where it serves.
        self._actor.release.remote(self._take_releases())

    async def info(self) -> EngineInfo:
        """What the engine is."""
        info: EngineInfo = await self._call("info")
        return info

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests."""
        await self._call("submit", [shifted(request, -_now_s()) for request in requests])

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        """End running requests, losing no token."""
        await self._call("interrupt", list(ids))

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Forget a cached prefix, soon."""
        # What is taken back is known by its name, its data need not travel.
        self._releases.append((trajectory, kv and replace(kv, payload=None)))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_S, self._send_releases)

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        """Take new weights."""
        report: LoadReport = await self._call("load", manifest, mode)
        return report

    async def sleep(self) -> None:
        """Free weights and KV."""
        await self._call("sleep")

    async def wake(self) -> None:
        """Take memory for KV again."""
        await self._call("wake")

    async def stats(self) -> EngineStats:
        """Counters."""
        stats: EngineStats = await self._call("stats")
        return stats

    async def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        """Chunks, batch by batch."""
        while True:
            chunks: tuple[Chunk, ...] = await answer(self._actor.poll.remote(POLL_S), self._who)
            if chunks:
                yield tuple(shifted(chunk, _now_s()) for chunk in chunks)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
