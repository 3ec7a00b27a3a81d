"""A router over fake engines, and an engine that says what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pearl.core.state import Role
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.router import Router
from pearl.pipeline.turns import TurnJob
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenIds, Tokens
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, Completion, EndReason, KvHandle, Sampling, TurnRequest, Versions
from pearl.testing.engine import FakeEngine, FakeEngineConfig, fake_token
from pearl.testing.mailbox import Mailbox
from pearl.testing.tokens import FAKE_STOP, TurnStarts
from pearl.testing.virtual_time import run_virtual

T = TypeVar("T")

PROMPT = TokenIds([11, 12, 13])
SILENCE_S = 100.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


def job(
    trajectory: str = "t0",
    *,
    seed: int = 7,
    turn: int = 0,
    tokens: int = 20,
    min_version: int = 0,
    context: Tokens = PROMPT,
) -> TurnJob:
    return TurnJob(
        trajectory=TrajectoryId(trajectory),
        turn=turn,
        context=context,
        sampling=Sampling(seed=seed, stop_token_ids=(FAKE_STOP,)),
        max_new_tokens=tokens,
        min_version=WeightVersion(min_version),
    )


def undisturbed(seed: int, count: int, behind: int = len(PROMPT)) -> list[int]:
    """What any engine draws behind a context: a turn of `count` tokens, the last of them the stop token."""
    return [fake_token(seed, behind + n) for n in range(count - 1)] + [FAKE_STOP]


@dataclass
class House:
    """A router over fake engines of 10 tokens a second; a turn has 12 tokens."""

    nursery: Nursery
    max_attempts: int = 8
    append: int = 64
    readback: bool = True
    lost: list[tuple[int, str]] = field(default_factory=list)
    engines: dict[int, FakeEngine] = field(default_factory=dict)
    router: Router = field(init=False)
    _starts: TurnStarts = field(default_factory=TurnStarts)

    def __post_init__(self) -> None:
        self.router = Router(
            self.nursery,
            self.max_attempts,
            lambda worker, detail: self.lost.append((worker, detail)),
            load_timeout_s=50,
            silence_s=SILENCE_S,
            append_prefill_tokens=self.append,
            readback=self.readback,
        )

    def add(
        self,
        worker: int,
        *,
        version: int = 0,
        role: Role = Role.COLOCATED,
        load_s: float = 0.0,
        ttl_s: float = 60.0,
        turn_tokens: int = 12,
        engine: type[FakeEngine] = FakeEngine,
    ) -> FakeEngine:
        settings = FakeEngineConfig(
            token_s=0.1,
            turn_tokens=turn_tokens,
            progress_interval_s=0.3,
            version=version,
            load_s=load_s,
            kv_ttl_s=ttl_s,
        )
        made = engine(settings, worker=worker)
        made.share_turn_starts(self._starts)
        self.engines[worker] = made
        self.router.admit(WorkerId(worker), made, WeightVersion(version), role)
        return made

    def add_shape(self, text: str, **options: Any) -> None:
        """One worker for each letter, e.g. `PDD`."""
        roles = {"P": Role.PREFILL, "D": Role.DECODE, "C": Role.COLOCATED}
        for worker, letter in enumerate(text):
            self.add(worker, role=roles[letter], **options)

    def kv_left(self) -> list[object]:
        """Prefixes and handles on all engines."""
        kept = [engine.kv for engine in self.engines.values()]
        return [*(t for kv in kept for t in kv.trajectories), *(h.id for kv in kept for h in kv.handles(now_s()))]

    def generate(self, one: TurnJob) -> asyncio.Task[Completion]:
        return self.nursery.spawn(self.router.generate(one), name=f"turn of {one.trajectory}")


def in_house(test: Callable[[House], Awaitable[T]], **options: Any) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(House(nursery, **options))

    return run_virtual(work())


class Puppet:
    """An engine that says what the test says."""

    def __init__(self) -> None:
        self.chunks: Mailbox[Chunk] = Mailbox()
        self.interrupted: list[RequestId] = []
        self._requests: Mailbox[TurnRequest] = Mailbox()

    async def next_request(self) -> TurnRequest:
        (request,) = await self._requests.take()
        return request

    def say(
        self,
        request: TurnRequest,
        ids: list[int],
        *,
        offset: int = 0,
        end: EndReason | None = None,
        error: str = "",
        kv: KvHandle | None = None,
    ) -> None:
        self.chunks.put(
            Chunk(
                request=request.id,
                start=len(request.context) + offset,
                token_ids=TokenIds(ids),
                logprobs=Floats([-token / 8 for token in ids]),
                versions=Versions.of([(0, len(ids))]),
                end=end,
                kv=kv,
                error=error or None,
            )
        )

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        for request in requests:
            self._requests.put(request)

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        self.interrupted += ids

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None: ...

    async def info(self) -> object:
        raise NotImplementedError

    async def stats(self) -> object:
        raise NotImplementedError

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        raise NotImplementedError

    async def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        while True:
            yield await self.chunks.take()


class SlowToTake(FakeEngine):
    """Takes requests after a second."""

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await asyncio.sleep(1)
        await super().submit(requests)
