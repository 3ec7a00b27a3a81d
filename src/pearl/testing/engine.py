"""A fake engine: tokens from a counter, time from the running loop, faults on request.

Laws: tokens depend on (seed, absolute position) alone; a request gets one token each `token_s`; whatever was generated
and not handed to the reader of `events()` when the worker dies is lost and counted, everything else is in the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from pearl.errors import EngineError, WeightsError, WorkerLost
from pearl.ports import EngineInfo, EngineStats, WeightStore
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, TurnRequest, Versions
from pearl.testing.generation import FakeEngineConfig, Generation
from pearl.testing.kv import FakeKv, kv_refusal
from pearl.testing.mailbox import Mailbox
from pearl.testing.tokens import TurnStarts, fake_token

__all__ = ["Delivered", "FakeEngine", "FakeEngineConfig", "TurnStarts", "fake_token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A chunk that the reader of `events()` has got."""

    trajectory: TrajectoryId
    turn: int
    chunk: Chunk
    at_s: float


class FakeEngine:
    """An `Engine` in this process, with counters and a ledger for tests to read."""

    def __init__(
        self,
        config: FakeEngineConfig | None = None,
        *,
        worker: int = 0,
        output_tokens: Callable[[TurnRequest], int] | None = None,
        store: WeightStore | None = None,
        turn_starts: TurnStarts | None = None,
    ) -> None:
        """Make an engine that is up.

        `output_tokens` gives the length of a whole turn, stop token included; `store` is read by `load`, if given;
        engines between which turns move share `turn_starts` (those of a `FakeFleet` do).
        """
        self.config = config = config or FakeEngineConfig()
        self.worker = WorkerId(worker)
        self.loads: list[tuple[WeightVersion, LoadMode]] = []
        self.delivered: list[Delivered] = []
        """Every chunk handed to the reader of `events()`, in order."""
        self.delivered_tokens = 0
        self.lost_tokens = 0
        """Generated, and not delivered when the worker died."""
        self.on_death: list[Callable[[str], None]] = []
        self.kv = FakeKv(
            worker=self.worker,
            model_hash=config.model_hash,
            capacity_tokens=config.kv_capacity_tokens,
            bytes_per_token=config.kv_bytes_per_token,
            ttl_s=config.kv_ttl_s,
        )
        self._generation = Generation(config, self.kv, output_tokens or (lambda _: config.turn_tokens), self._deliver)
        if turn_starts is not None:
            self._generation.turn_starts = turn_starts
        self._store = store
        self._waiting: dict[RequestId, TurnRequest] = {}
        self._outbox: Mailbox[tuple[TurnRequest, Chunk]] = Mailbox()
        self._waits: dict[asyncio.Future[None], None] = {}
        """Calls that a death must wake."""
        self._hung = False
        self._unhung: asyncio.Future[None] | None = None
        """Calls wait for it while the engine is hung and mute."""
        self._gone: str | None = None
        self._asleep = False
        self._unready: str | None = None
        self._failures_due = 0

    # -- the port ---------------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """What the engine is."""
        await self._answer()
        return EngineInfo(
            model_hash=self.config.model_hash,
            epoch=self.kv.epoch,
            max_context_tokens=self.config.max_context_tokens,
            kv_capacity_tokens=self.config.kv_capacity_tokens,
        )

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests."""
        await self._answer()
        for request in requests:
            if request.id in self._generation or request.id in self._waiting:
                raise EngineError(f"worker {self.worker}: request {request.id} is here already, want an id per attempt")
        now_s = self._generation.settle()
        for request in requests:
            if self._generation.paused:
                self._waiting[request.id] = request
            else:
                self._begin(request, now_s)
        self._generation.schedule(now_s)

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        """End running requests after the tokens that they have."""
        await self._answer()
        if not self._hung:
            self._interrupt(ids)

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Forget a handle if one is given, else a prefix."""
        await self._answer()
        if kv is None:
            self.kv.forget(trajectory)
        else:
            self.kv.release(kv)

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        """Take new weights; requests pause meanwhile and go on under the new version."""
        await self._answer()
        if manifest.model_hash != self.config.model_hash:
            raise WeightsError(
                f"worker {self.worker}: load of version {manifest.version}: got model {manifest.model_hash}, "
                f"want {self.config.model_hash}; publish the model that the engine was started with"
            )
        if self._asleep:
            raise WeightsError(f"worker {self.worker}: load of version {manifest.version}: it sleeps; wake it first")
        self._generation.pause()
        try:
            await self._sleep(self.config.load_s)
            if self._store is not None:
                await self._store.fetch(manifest, [shard.name for shard in manifest.shards])
            await self._answer()
            self._generation.version, self._generation.load_mode = manifest.version, mode
            recomputed = self._generation.recompute() if mode is LoadMode.RECOMPUTE else 0
            self._unready = None
            self.loads.append((manifest.version, mode))
        finally:
            self._resume()
        return LoadReport(
            version=manifest.version,
            load_s=self.config.load_s,
            loaded_bytes=manifest.size_bytes,
            recomputed_tokens=recomputed,
        )

    async def stats(self) -> EngineStats:
        """Counters since start, and the load now."""
        await self._answer()
        self._generation.settle()
        return EngineStats(
            version=self.version,
            running=len(self._generation),
            waiting=len(self._waiting),
            kv_used_tokens=self.kv.used_tokens + self._generation.kv_tokens,
            generated_tokens=self.generated_tokens,
            computed_prompt_tokens=self._generation.computed_tokens,
            iterations=self._generation.iterations,
            busy_s=self._generation.busy_s,
        )

    def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        """The one stream of chunks."""
        return self._stream()

    # -- for tests to read ------------------------------------------------------------------------------------------

    @property
    def version(self) -> WeightVersion:
        """Of the weights that are loaded."""
        return self._generation.version

    @property
    def generated_tokens(self) -> int:
        """Tokens drawn, lost ones included."""
        return self._generation.generated_tokens

    @property
    def busy(self) -> bool:
        """Whether it has requests."""
        return bool(len(self._generation) or self._waiting)

    @property
    def gone(self) -> bool:
        """Whether it was killed or shut down."""
        return self._gone is not None

    # -- faults and the process's life ------------------------------------------------------------------------------

    def kill(self, detail: str = "killed") -> None:
        """Die without notice: calls and the stream raise WorkerLost; what the stream did not hand over is lost."""
        if self._gone is not None:
            return
        self._generation.settle()
        self.lost_tokens = self.generated_tokens - self.delivered_tokens
        self._leave(detail, drop=True)
        for callback in self.on_death:
            callback(detail)

    def hang(self, *, mute: bool = True) -> None:
        """Produce nothing from now on; when `mute` no call returns either."""
        if self._hung or self._gone is not None:
            return
        self._hung = True
        if mute:
            self._unhung = asyncio.get_running_loop().create_future()
        self._generation.pause()

    def unhang(self) -> None:
        """Go on where `hang` stopped."""
        if not self._hung or self._gone is not None:
            return
        self._hung = False
        if self._unhung is not None:
            self._unhung.set_result(None)
            self._unhung = None
        self._resume()

    def fail_next(self, count: int) -> None:
        """Fail the next `count` requests that begin."""
        self._failures_due = count

    def shut_down(self) -> None:
        """Leave with notice: requests end as interrupted, the stream ends behind what it still holds."""
        if self._gone is None:
            self._interrupt([*self._generation.ids, *self._waiting])
            self._leave("stopped", drop=False)

    def sleep(self) -> None:
        """Give up device memory: requests end as interrupted, KV is gone, nothing is served."""
        self._interrupt([*self._generation.ids, *self._waiting])
        self.kv.invalidate()
        self._asleep, self._unready = True, "asleep; wake it and load weights"

    def wake(self) -> None:
        """Come back, without weights."""
        if self._asleep:
            self._asleep, self._unready = False, "awake without weights; load weights"

    def share_turn_starts(self, turn_starts: TurnStarts) -> None:
        """Join engines between which turns move."""
        self._generation.turn_starts = turn_starts

    # -- the inside -------------------------------------------------------------------------------------------------

    def _begin(self, request: TurnRequest, now_s: float) -> None:
        refused = self._refusal(request, now_s)
        if refused is None and len(request.context) == self.config.max_context_tokens:
            self._deliver(request, _empty_chunk(request, EndReason.LENGTH, None))
        elif refused is None:
            self._generation.begin(request, now_s)
        else:
            error = f"worker {self.worker}: request {request.id}: {refused}"
            self._deliver(request, _empty_chunk(request, EndReason.FAILED, error))

    def _refusal(self, request: TurnRequest, now_s: float) -> str | None:
        if self._failures_due:
            self._failures_due -= 1
            return "made to fail"
        if self._unready is not None:
            return f"the engine is {self._unready}"
        if self.version < request.min_version:
            return f"got min_version {request.min_version}, want <= {self.version}; load weights first"
        if request.max_new_tokens < 1:
            return f"got max_new_tokens {request.max_new_tokens}, want >= 1"
        tokens, limit = len(request.context), self.config.max_context_tokens
        if not 1 <= tokens <= limit:
            return f"got a context of {tokens} tokens, want 1 .. {limit}"
        if request.export_from < 0:
            return f"got export_from {request.export_from}, want >= 0"
        return kv_refusal(request, self.config.model_hash, now_s)

    def _interrupt(self, ids: Sequence[RequestId]) -> None:
        now_s = self._generation.settle()
        for request_id in ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                self._deliver(waiting, _empty_chunk(waiting, EndReason.INTERRUPTED, None))
        self._generation.interrupt(ids, now_s)
        self._generation.schedule(now_s)

    def _resume(self) -> None:
        if self._gone is not None or not self._generation.resume():
            return
        waiting, self._waiting = self._waiting, {}
        now_s = asyncio.get_running_loop().time()
        for request in waiting.values():
            self._begin(request, now_s)
        self._generation.schedule(now_s)

    def _deliver(self, request: TurnRequest, chunk: Chunk) -> None:
        self._outbox.put((request, chunk))

    async def _stream(self) -> AsyncIterator[tuple[Chunk, ...]]:
        while True:
            batch = await self._outbox.take()
            now_s = asyncio.get_running_loop().time()
            for request, chunk in batch:
                self.delivered_tokens += len(chunk.token_ids)
                self.delivered.append(
                    Delivered(trajectory=request.trajectory, turn=request.turn, chunk=chunk, at_s=now_s)
                )
            yield tuple(chunk for _, chunk in batch)

    async def _answer(self) -> None:
        while self._unhung is not None and self._gone is None:
            await self._wait(self._unhung)
        if self._gone is not None:
            raise WorkerLost(f"worker {self.worker}: {self._gone}")

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        slept = loop.create_future()
        timer = loop.call_later(seconds, lambda: None if slept.done() else slept.set_result(None))
        try:
            await self._wait(slept)
        finally:
            timer.cancel()

    async def _wait(self, event: asyncio.Future[None]) -> None:
        """Wait for an event or the worker's death."""
        loop = asyncio.get_running_loop()
        wait = loop.create_future()

        def wake(_: asyncio.Future[None]) -> None:
            if not wait.done():
                wait.set_result(None)

        event.add_done_callback(wake)
        self._waits[wait] = None
        try:
            await wait
        finally:
            event.remove_done_callback(wake)
            self._waits.pop(wait)

    def _leave(self, detail: str, *, drop: bool) -> None:
        self._gone = detail
        self.kv.lost = True
        self._waiting.clear()
        self._generation.drop()
        self._outbox.close(WorkerLost(f"worker {self.worker}: {detail}"), drop=drop)
        for wait in list(self._waits):
            if not wait.done():
                wait.set_result(None)


def _empty_chunk(request: TurnRequest, end: EndReason, error: str | None) -> Chunk:
    return Chunk(
        request=request.id,
        start=len(request.context),
        token_ids=request.context[:0],
        logprobs=Floats(),
        versions=Versions(),
        end=end,
        error=error,
    )
