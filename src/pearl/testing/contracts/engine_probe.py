"""Drives an engine under test and checks every chunk that it delivers against the laws of the stream."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pearl.ports import Engine
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds, Tokens
from pearl.records.training import Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, Sampling, TurnRequest, Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSubject:
    """An engine under test, fresh, with weights of version 0."""

    engine: Engine
    vocab: int
    """>= 8; contexts are made of the ids 1 .. vocab - 1."""
    manifest: Callable[[int], Awaitable[Manifest]]
    """Published weights of the engine's model under a version >= 1."""
    foreign_manifest: Callable[[int], Awaitable[Manifest]]
    """The same of another model."""
    kill: Callable[[], Awaitable[None]] | None = None
    """Ends the engine's process without notice; None: there is no way to."""
    sleep: Callable[[], Awaitable[object]] | None = None
    """Makes it release its memory; None: there is no way to."""
    wake: Callable[[], Awaitable[object]] | None = None
    """Undoes `sleep`."""
    foreign_handle: Callable[[KvHandle], KvHandle] | None = None
    """What a handle would be if another model's engine had given it out; None: there is no way to."""


@dataclass(slots=True)
class Log:
    """What one request has delivered."""

    request: TurnRequest
    token_ids: Tokens
    logprobs: Floats = field(default_factory=Floats)
    versions: Versions = field(default_factory=Versions)
    chunks: int = 0
    end: EndReason | None = None
    error: str | None = None
    kv: KvHandle | None = None
    computed: int = 0

    def add(self, chunk: Chunk) -> None:
        """Check a chunk against what came before, and append it."""
        where = f"request {self.request.id}: chunk at {chunk.start}"
        assert self.end is None, f"{where}: comes behind the request's end"
        expected = len(self.request.context) + len(self.token_ids)
        assert chunk.start == expected, f"{where}: want it at {expected}"
        count = len(chunk.token_ids)
        assert len(chunk.logprobs) == count, f"{where}: {len(chunk.logprobs)} log-probabilities for {count} tokens"
        assert len(chunk.versions) == count, f"{where}: versions cover {len(chunk.versions)} of {count} tokens"
        logprobs = chunk.logprobs.array
        assert np.isfinite(logprobs).all(), f"{where}: log-probabilities must be finite"
        assert (logprobs <= 1e-5).all(), f"{where}: log-probabilities must be <= 0"
        assert (chunk.error is not None) == (chunk.end is EndReason.FAILED), f"{where}: an error comes with FAILED only"
        assert count or chunk.end is not None, f"{where}: an empty chunk says nothing"
        self.token_ids = self.token_ids + chunk.token_ids
        self.logprobs = self.logprobs + chunk.logprobs
        self.versions = self.versions + chunk.versions
        self.chunks += 1
        self.end, self.error, self.kv, self.computed = chunk.end, chunk.error, chunk.kv, chunk.computed_prompt_tokens


class Probe:
    """One engine and the one reader of its stream."""

    def __init__(self, subject: EngineSubject) -> None:
        self.subject = subject
        self.engine = subject.engine
        self.logs: dict[RequestId, Log] = {}
        self._events: AsyncIterator[tuple[Chunk, ...]] = self.engine.events()

    async def submit(self, *requests: TurnRequest) -> None:
        """Submit requests and expect their chunks."""
        for request in requests:
            self.logs[request.id] = Log(request, request.context[:0])
        await self.engine.submit(requests)

    async def read(self) -> None:
        """Take the next batch."""
        for chunk in await anext(self._events):
            assert chunk.request in self.logs, f"chunk of request {chunk.request}, which nobody asked for"
            self.logs[chunk.request].add(chunk)

    async def ended(self, request: TurnRequest) -> Log:
        """Wait for a request's end."""
        log = self.logs[request.id]
        while log.end is None:
            await self.read()
        return log

    async def some_tokens(self, request: TurnRequest) -> Log:
        """Wait until a request, still running, has delivered a token."""
        log = self.logs[request.id]
        while not len(log.token_ids):
            await self.read()
        assert log.end is None, f"request {request.id} ended too soon to be interfered with; raise long_tokens"
        return log

    async def generate(self, request: TurnRequest) -> Log:
        """Submit a request and wait for its end."""
        await self.submit(request)
        return await self.ended(request)


class Requests:
    """Makes requests with ids and trajectories of their own."""

    def __init__(self, vocab: int, context: Callable[[int, int, int], Tokens]) -> None:
        self._vocab = vocab
        self._context = context
        self._numbers = itertools.count()

    def make(
        self,
        *,
        context: Tokens | None = None,
        context_tokens: int = 12,
        salt: int = 0,
        seed: int = 11,
        max_new_tokens: int = 8,
        stops: tuple[int, ...] = (),
        temperature: float = 1.0,
        min_version: int = 0,
        trajectory: str | None = None,
        turn: int = 0,
        mode: Mode = Mode.COLOCATED,
        kv: KvHandle | None = None,
        export_kv: bool = False,
        export_from: int = 0,
    ) -> TurnRequest:
        """A request; `salt` makes contexts that differ."""
        number = next(self._numbers)
        return TurnRequest(
            id=RequestId(f"r{number}"),
            trajectory=TrajectoryId(trajectory or f"t{number}"),
            turn=turn,
            context=self._context(self._vocab, context_tokens, salt) if context is None else context,
            sampling=Sampling(seed=seed, temperature=temperature, stop_token_ids=stops),
            max_new_tokens=max_new_tokens,
            min_version=WeightVersion(min_version),
            mode=mode,
            kv=kv,
            export_kv=export_kv,
            export_from=export_from,
        )

    def rest(self, request: TurnRequest, first: Log) -> TurnRequest:
        """The request that continues one that has ended."""
        left = request.max_new_tokens - len(first.token_ids)
        number = next(self._numbers)
        context = request.context + first.token_ids
        return replace(request, id=RequestId(f"r{number}"), context=context, max_new_tokens=left)

    def next_turn(self, request: TurnRequest, first: Log, tokens: int, **changes: Any) -> TurnRequest:
        """The next turn of a trajectory: what it has generated, and an observation of so many tokens."""
        context = request.context + first.token_ids + self._context(self._vocab, tokens, 1)
        return self.make(context=context, trajectory=request.trajectory, turn=request.turn + 1, **changes)


def token_context(vocab: int, tokens: int, salt: int) -> TokenIds:
    """A context of token ids 1 .. vocab - 1."""
    return TokenIds([(7 * n + 3 * n * n + salt) % (vocab - 1) + 1 for n in range(tokens)])
