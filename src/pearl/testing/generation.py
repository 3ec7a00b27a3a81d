"""The requests of a fake engine on the running loop's clock: arithmetic instead of iterations, one timer for all.

A request that began at `start_s` has `(now - start_s) / token_s` tokens; it ends at its last one. While paused, time
stands still for all of them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pearl.records.ids import RequestId, WeightVersion
from pearl.records.tokens import Floats, TokenCount, TokenIds, Tokens
from pearl.records.training import LoadMode
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, TurnRequest, VersionRun, Versions
from pearl.testing.kv import FakeKv
from pearl.testing.tokens import FAKE_STOP, FAKE_VOCAB, TurnStarts, fake_draws
from pearl.testing.weights import FAKE_MODEL_HASH

_EPSILON = 1e-6
"""Of a token (or an interval): how early a timer may fire, from rounding of float times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineConfig:
    """How a fake engine behaves."""

    vocab: int = FAKE_VOCAB
    """>= 2; token 0 is never drawn except as a stop token."""
    token_s: float = 0.0
    """Seconds per token of a request; 0: a request is complete as soon as it is submitted."""
    turn_tokens: int = 8
    """Tokens of a turn, its stop token included, where no `output_tokens` is given."""
    progress_interval_s: float = 0.1
    load_s: float = 0.0
    """Seconds that new weights take; nothing is generated meanwhile."""
    model_hash: str = FAKE_MODEL_HASH
    version: int = 0
    max_context_tokens: int = 1 << 20
    kv_capacity_tokens: int = 1 << 30
    kv_bytes_per_token: int = 1024
    kv_ttl_s: float = 60.0
    on_load: str = LoadMode.RECOMPUTE.value
    """Whether KV of other weights than those of the beginning is taken over: not with `recompute`."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A request under way; `start_s` shifts when the engine pauses."""

    request: TurnRequest
    token_ids: Tokens
    """All that the request will generate, shape `[n]`."""
    logprobs: Floats
    end: EndReason
    start_s: float
    computed: int
    cached: int
    """Context tokens whose KV was there or came along."""
    kv_version: WeightVersion
    """Oldest weights that computed some of the KV."""
    produced: int = 0
    delivered: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    """`(version, tokens)` since the last chunk."""

    @property
    def total(self) -> int:
        return len(self.logprobs)


class Generation:
    """Running requests; hands each chunk to `deliver`."""

    def __init__(
        self,
        config: FakeEngineConfig,
        kv: FakeKv,
        output_tokens: Callable[[TurnRequest], int],
        deliver: Callable[[TurnRequest, Chunk], None],
    ) -> None:
        self._config = config
        self._kv = kv
        self._output_tokens = output_tokens
        self._deliver = deliver
        self._running: dict[RequestId, _Running] = {}
        self._ends: list[tuple[float, int, _Running]] = []
        self._pushed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._progress_s = max(config.progress_interval_s, config.token_s)
        self._tick_at_s = 0.0
        self._pauses = 0
        self._paused_at_s = 0.0
        self._seen_s = 0.0
        self._instant_iterations = 0
        self.version = WeightVersion(config.version)
        self.load_mode = LoadMode(config.on_load)
        """Of the last load: whether KV of older weights is taken over."""
        self.turn_starts = TurnStarts()
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.busy_s = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._running

    @property
    def ids(self) -> list[RequestId]:
        """Requests under way, in order of their beginning."""
        return list(self._running)

    @property
    def paused(self) -> bool:
        """Whether time stands still."""
        return self._pauses > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the requests hold beyond what was cached before."""
        return sum(
            len(run.request.context) + run.produced - self._kv.cached_tokens(run.request.trajectory)
            for run in self._running.values()
        )

    @property
    def iterations(self) -> int:
        """Forward passes since start: one per token time with at least one request."""
        if self._config.token_s <= 0:
            return self._instant_iterations
        return int(self.busy_s / self._config.token_s + _EPSILON)

    # -- requests ---------------------------------------------------------------------------------------------------

    def begin(self, request: TurnRequest, now_s: float) -> None:
        """Start a request that can be served; not while paused."""
        token_ids, logprobs, end = self._draw(request)
        cached, kv_version = self._import(request)
        computed = len(request.context) - cached
        self.computed_tokens += computed
        run = _Running(
            request=request,
            token_ids=token_ids,
            logprobs=logprobs,
            end=end,
            start_s=now_s,
            computed=computed,
            cached=cached,
            kv_version=kv_version,
        )
        if self._config.token_s <= 0:
            self._complete(run, now_s)
            return
        if not self._running:
            self._tick_at_s = now_s + self._progress_s
        self._running[request.id] = run
        self._push_end(run)

    def _import(self, request: TurnRequest) -> tuple[int, WeightVersion]:
        """Context tokens whose KV is there or comes along, and the oldest weights of it."""
        cached, version = self._kv.cached(request.trajectory)
        handle = request.kv
        # KV of weights left behind is no use, nor is KV that begins behind what is held.
        taken = handle is not None and (handle.version == self.version or self.load_mode is LoadMode.KEEP_KV)
        if handle is not None and taken and handle.start <= cached < handle.tokens:
            version = min(version, handle.version) if cached else handle.version
            cached = handle.tokens
        cached = min(cached, len(request.context) - 1)
        return cached, version if cached else self.version

    def interrupt(self, ids: Sequence[RequestId], now_s: float) -> None:
        """End requests after the tokens that they have; unknown ids are ignored."""
        for request_id in ids:
            run = self._running.get(request_id)
            if run is not None:
                self._emit(run, EndReason.INTERRUPTED, now_s)

    def recompute(self) -> int:
        """Drop all KV and compute that of running requests again; how many tokens that is."""
        self._kv.forget_all()
        recomputed = 0
        for run in self._running.values():
            tokens = len(run.request.context) + run.produced if run.produced else 0
            run.computed += tokens
            run.cached, run.kv_version = 0, self.version
            recomputed += tokens
        self.computed_tokens += recomputed
        return recomputed

    def drop(self) -> None:
        """Forget every request without a chunk."""
        self._running.clear()
        self.schedule(0.0)

    def _draw(self, request: TurnRequest) -> tuple[Tokens, Floats, EndReason]:
        start, sampling = len(request.context), request.sampling
        left = max(1, self._output_tokens(request) - self.turn_starts.generated(request))
        count = min(request.max_new_tokens, self._config.max_context_tokens - start)
        if request.mode is Mode.PREFILL:
            count = 1
        stops = bool(sampling.stop_token_ids) and left <= count
        if stops:
            count = left
        # Greedy means that the seed does not matter.
        seed = sampling.seed if sampling.temperature > 0 else 0
        ids, logprobs = fake_draws(seed, start, count, self._config.vocab)
        if isinstance(request.context, TokenCount):
            return TokenCount(count), Floats(logprobs), EndReason.STOP if stops else EndReason.LENGTH
        if stops:
            ids = ids.copy()
            ids[-1] = sampling.stop_token_ids[0]
        others = [stop for stop in sampling.stop_token_ids if stop != FAKE_STOP]
        if others:
            drawn = np.flatnonzero(np.isin(ids, others))
            if len(drawn):
                count, stops = int(drawn[0]) + 1, True
        return TokenIds(ids[:count]), Floats(logprobs[:count]), EndReason.STOP if stops else EndReason.LENGTH

    def _advance(self, run: _Running, produced: int) -> None:
        new = produced - run.produced
        if new > 0:
            run.runs.append((self.version, new))
            run.produced = produced
            self.generated_tokens += new

    def _complete(self, run: _Running, now_s: float) -> None:
        """Generate a whole request at once: what `_emit` says, on the fast path."""
        tokens = run.produced = run.total
        self._instant_iterations += tokens
        self.generated_tokens += tokens
        chunk = Chunk(
            request=run.request.id,
            start=len(run.request.context),
            token_ids=run.token_ids,
            logprobs=run.logprobs,
            versions=Versions((VersionRun(version=self.version, tokens=tokens),)),
            end=run.end,
            kv=self._keep_kv(run, now_s),
            computed_prompt_tokens=run.computed,
        )
        self._deliver(run.request, chunk)

    def _keep_kv(self, run: _Running, now_s: float) -> KvHandle | None:
        request = run.request
        # The last token drawn has not been through a forward pass, so its KV does not exist yet.
        tokens = len(request.context) + run.produced - 1 if run.produced else run.cached
        if tokens:
            self._kv.keep(request.trajectory, tokens, run.kv_version)
        if not (request.export_kv or request.mode is Mode.PREFILL) or tokens <= request.export_from:
            return None
        context = (request.context + run.token_ids[: run.produced])[:tokens]
        return self._kv.export(context, run.kv_version, now_s, request.export_from)

    def _emit(self, run: _Running, end: EndReason | None, now_s: float) -> None:
        request, kv = run.request, None
        if end is not None:
            self._running.pop(request.id, None)
            kv = self._keep_kv(run, now_s)
        chunk = Chunk(
            request=request.id,
            start=len(request.context) + run.delivered,
            token_ids=run.token_ids[run.delivered : run.produced],
            logprobs=run.logprobs[run.delivered : run.produced],
            versions=Versions.of(run.runs),
            end=end,
            kv=kv,
            computed_prompt_tokens=run.computed if run.produced else 0,
        )
        run.delivered, run.runs = run.produced, []
        self._deliver(request, chunk)

    # -- time -------------------------------------------------------------------------------------------------------

    def settle(self) -> float:
        """Bring every request up to now, end those that are complete; the time now."""
        now_s = asyncio.get_running_loop().time()
        since_s, self._seen_s = self._seen_s, now_s
        if self._pauses or not self._running:
            return now_s
        self.busy_s += now_s - since_s
        slack_s = _EPSILON * self._config.token_s
        while self._ends and self._ends[0][0] <= now_s + slack_s:
            run = heapq.heappop(self._ends)[2]
            if self._running.get(run.request.id) is run:
                self._advance(run, run.total)
                self._emit(run, run.end, now_s)
        for run in self._running.values():
            tokens = int((now_s - run.start_s) / self._config.token_s + _EPSILON)
            self._advance(run, min(tokens, run.total - 1))
        return now_s

    def schedule(self, now_s: float) -> None:
        """Set the timer to the next end or progress report."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._pauses:
            due_s = min(self._ends[0][0], self._tick_at_s)
            self._timer = asyncio.get_running_loop().call_at(max(due_s, now_s), self._on_timer)

    def pause(self) -> None:
        """Let time stand still; each call wants a `resume`."""
        now_s = self.settle()
        self._pauses += 1
        if self._pauses == 1:
            self._paused_at_s = now_s
        self.schedule(now_s)

    def resume(self) -> bool:
        """Undo a `pause`; True when time goes on."""
        self._pauses -= 1
        if self._pauses:
            return False
        now_s = self._seen_s = asyncio.get_running_loop().time()
        self._ends.clear()
        for run in self._running.values():
            run.start_s += now_s - self._paused_at_s
            self._push_end(run)
        self._tick_at_s = max(self._tick_at_s, now_s)
        self.schedule(now_s)
        return True

    def _push_end(self, run: _Running) -> None:
        self._pushed += 1
        heapq.heappush(self._ends, (run.start_s + run.total * self._config.token_s, self._pushed, run))

    def _on_timer(self) -> None:
        now_s = self.settle()
        if now_s >= self._tick_at_s - _EPSILON * self._progress_s:
            self._tick_at_s = now_s + self._progress_s
            for run in self._running.values():
                if run.produced > run.delivered:
                    self._emit(run, None, now_s)
        self.schedule(now_s)
