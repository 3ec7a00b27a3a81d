"""Requests to a fake engine, and a reader of what it delivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from pearl.errors import WorkerLost
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, Sampling, TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.virtual_time import run_virtual

SLOW = FakeEngineConfig(token_s=0.25, progress_interval_s=0.5, turn_tokens=8)
STOP, FAILED, INTERRUPTED = EndReason.STOP, EndReason.FAILED, EndReason.INTERRUPTED


def request(
    name: str,
    *,
    context: Tokens | None = None,
    max_new_tokens: int = 100,
    min_version: int = 0,
    mode: Mode = Mode.COLOCATED,
    kv: KvHandle | None = None,
    export_kv: bool = False,
) -> TurnRequest:
    return TurnRequest(
        id=RequestId(name),
        trajectory=TrajectoryId(f"of {name}"),
        turn=0,
        context=TokenIds([5] * 10) if context is None else context,
        sampling=Sampling(seed=1, stop_token_ids=(0,)),
        max_new_tokens=max_new_tokens,
        min_version=WeightVersion(min_version),
        mode=mode,
        kv=kv,
        export_kv=export_kv,
    )


class Reader:
    """Collects what an engine delivers, until it dies."""

    def __init__(self, engine: FakeEngine) -> None:
        self.batches: list[tuple[float, tuple[Chunk, ...]]] = []
        self.error: WorkerLost | None = None
        self.task = asyncio.create_task(self._read(engine))

    async def _read(self, engine: FakeEngine) -> None:
        try:
            async for batch in engine.events():
                self.batches.append((asyncio.get_running_loop().time(), batch))
        except WorkerLost as error:
            self.error = error

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for _, batch in self.batches for chunk in batch]

    def ends(self) -> dict[str, EndReason]:
        return {chunk.request: chunk.end for chunk in self.chunks if chunk.end}

    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


def play(work: Callable[[], Coroutine[object, object, None]]) -> None:
    run_virtual(work())
