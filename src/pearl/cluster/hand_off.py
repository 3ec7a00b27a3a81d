"""What a platform profile measures between processes: engine start, and the hand-off of KV, through Ray as in a run.

A hand-off is measured as what it adds: a turn of two tokens whose prefill runs on one engine and whose second token on
another, less the same turn on one engine. Both compute the same iterations, so the difference is export, transport, import
and the second request. Two sizes of KV give the fixed part and the part per byte.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pearl.cluster.fleet import RayFleet
from pearl.cluster.local_ray import ray_session
from pearl.config.cluster import ClusterConfig
from pearl.config.engine import EngineConfig
from pearl.core.profile import HandOff
from pearl.core.state import Role
from pearl.errors import EngineError, WorkerLost
from pearl.pipeline.concurrency import guard
from pearl.ports import Engine, WorkerSpec
from pearl.records.ids import GpuId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, Sampling, TurnRequest
from pearl.units import MIB

TURN_TIMEOUT_S = 120.0
FIRST, SECOND = WorkerId(0), WorkerId(1)
DECIMALS = 9
EXPORTS_HELD = 4
"""Exports that the object store must hold at once: the one under way, and some whose end it has not heard of."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTimes:
    """What was measured."""

    engine_start_s: float
    """Mean over the engines."""
    hand_off: HandOff


def measure_processes(
    model: Path, config: EngineConfig, *, vocabulary: int, kv_bytes_per_token: int, repeats: int, tell: Tell
) -> ProcessTimes:
    """Start two engines in a local Ray (or the one that is there) and hand KV from one to the other.

    Raises:
        PearlError: Ray or an engine cannot be started, or a turn failed.
    """
    largest_bytes = kv_bytes_per_token * config.max_context_tokens
    store_mib = ClusterConfig().object_store_mib + EXPORTS_HELD * largest_bytes // MIB
    with ray_session(ClusterConfig(object_store_mib=store_mib)):
        return asyncio.run(_measure(model, config, vocabulary, repeats, tell))


def fit(points: tuple[tuple[int, float], tuple[int, float]]) -> HandOff:
    """The line through two sizes of `(bytes, seconds)`, smaller one first; noise makes neither of its parts negative."""
    (small_bytes, small_s), (large_bytes, large_s) = points
    slope = max(0.0, (large_s - small_s) / (large_bytes - small_bytes))
    return HandOff(fixed_s=round(max(0.0, small_s - slope * small_bytes), DECIMALS), s_per_byte=slope)


async def _measure(model: Path, config: EngineConfig, vocabulary: int, repeats: int, tell: Tell) -> ProcessTimes:
    cluster = ClusterConfig()
    fleet = RayFleet(model, config, cluster.health_timeout_s)
    try:
        started_s: list[float] = []
        for worker in (FIRST, SECOND):
            spec = WorkerSpec(worker=worker, gpus=(GpuId(f"local/{worker}"),), role=Role.COLOCATED)
            report = await fleet.start([spec], cluster.start_timeout_s)
            if report.failed:
                raise WorkerLost(report.failed[worker])
            started_s.append(report.seconds)
        tell(f"two engines started, {' s and '.join(f'{seconds:.2f}' for seconds in started_s)} s")
        pair = _Pair(fleet.engine(FIRST), fleet.engine(SECOND), vocabulary)
        try:
            hand_off = await _hand_off(pair, config.max_context_tokens, repeats)
        finally:
            await pair.close()
        return ProcessTimes(engine_start_s=round(statistics.mean(started_s), DECIMALS), hand_off=hand_off)
    finally:
        await fleet.stop((FIRST, SECOND), 0.0)


async def _hand_off(pair: _Pair, max_context_tokens: int, repeats: int) -> HandOff:
    # The longest context that leaves room for the two tokens, and a small part of it.
    sizes = (max(1, max_context_tokens // 8), max_context_tokens - 2)
    added_s: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    handed_bytes: dict[int, int] = {}
    for number in range(repeats + 1):  # the first one warms up
        for tokens in sizes:
            together_s = await pair.on_one(tokens)
            apart_s, handed_bytes[tokens] = await pair.on_two(tokens)
            if number:
                added_s[tokens].append(apart_s - together_s)
    small, large = ((handed_bytes[tokens], statistics.median(added_s[tokens])) for tokens in sizes)
    return fit((small, large))


class _Pair:
    """Two engines, and turns of two tokens on them."""

    def __init__(self, first: Engine, second: Engine, vocabulary: int) -> None:
        self._engines = {FIRST: first, SECOND: second}
        self._events = {worker: engine.events() for worker, engine in self._engines.items()}
        self._vocabulary = vocabulary
        self._names: Iterator[int] = itertools.count()

    async def close(self) -> None:
        """End both streams."""
        for events in self._events.values():
            await events.aclose()  # type: ignore[attr-defined]

    async def on_one(self, tokens: int) -> float:
        """Seconds of a turn on the first engine."""
        loop = asyncio.get_running_loop()
        request = self._request(tokens, new=2)
        began_s = loop.time()
        await self._run(FIRST, request)
        taken_s = loop.time() - began_s
        await self._engines[FIRST].release(request.trajectory)
        return taken_s

    async def on_two(self, tokens: int) -> tuple[float, int]:
        """Seconds of a turn that changes to the second engine behind its first token, and bytes handed over."""
        loop = asyncio.get_running_loop()
        prefill = self._request(tokens, new=1, mode=Mode.PREFILL)
        began_s = loop.time()
        kv = (await self._run(FIRST, prefill)).kv
        if kv is None:
            raise EngineError(f"worker {FIRST}: request {prefill.id}: no KV was exported, want a handle")
        decode = self._request(tokens + 1, new=1, mode=Mode.DECODE, kv=kv)
        end = await self._run(SECOND, decode)
        taken_s = loop.time() - began_s
        if end.computed_prompt_tokens != 1:
            raise EngineError(
                f"worker {SECOND}: request {decode.id}: computed {end.computed_prompt_tokens} context tokens, want 1 "
                "(the KV that was handed over was not used)"
            )
        await self._engines[FIRST].release(prefill.trajectory, kv)
        await self._engines[FIRST].release(prefill.trajectory)
        await self._engines[SECOND].release(decode.trajectory)
        return taken_s, kv.size_bytes

    def _request(
        self, tokens: int, *, new: int, mode: Mode = Mode.COLOCATED, kv: KvHandle | None = None
    ) -> TurnRequest:
        number = next(self._names)
        return TurnRequest(
            id=RequestId(f"profile-{number}"),
            trajectory=TrajectoryId(f"profile-{number}"),
            turn=0,
            context=TokenIds(np.arange(tokens) % self._vocabulary),
            sampling=Sampling(seed=number),
            max_new_tokens=new,
            min_version=WeightVersion(0),
            mode=mode,
            kv=kv,
        )

    async def _run(self, worker: WorkerId, request: TurnRequest) -> Chunk:
        """Submit a request and wait for its end."""
        async with guard(TURN_TIMEOUT_S, f"worker {worker}: request {request.id}"):
            await self._engines[worker].submit([request])
            async for chunks in self._events[worker]:
                for chunk in chunks:
                    if chunk.end is EndReason.FAILED:
                        raise EngineError(chunk.error or f"worker {worker}: request {request.id} failed")
                    if chunk.request == request.id and chunk.end is not None:
                        return chunk
        raise WorkerLost(f"worker {worker}: its events ended before request {request.id} did")
