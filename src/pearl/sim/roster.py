"""The requests of a simulated engine: who waits, who runs, and what each holds of the memory. Knows no time but moments.

Held memory: a request that computes its context or waits for its import holds the whole of it, one that decodes all but
its last token, whose KV nobody has computed yet.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pearl.records.ids import RequestId, WeightVersion
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, KvHandle, Mode
from pearl.sim.kv import KvExports
from pearl.sim.prefix_cache import PrefixCache
from pearl.sim.sequence import Phase, Sequence, Stint


@dataclass(slots=True)
class Counts:
    """Of iterations that are over."""

    iterations: int = 0
    busy_s: float = 0.0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    preemptions: int = 0
    """Requests that gave their memory up."""


class Ended(NamedTuple):
    """A request that ended."""

    sequence: Sequence
    reason: EndReason
    kv: KvHandle | None
    """Its export, where it was asked for."""
    error: str | None = None


class Roster:
    """Of one engine."""

    def __init__(self, max_sequences: int, cache: PrefixCache, exports: KvExports) -> None:
        self._max_sequences, self.cache, self._exports = max_sequences, cache, exports
        self.version = WeightVersion(0)
        self.load_mode = LoadMode.RECOMPUTE
        """Of the last load: whether KV of other weights is taken over."""
        self.counts = Counts()
        self.ended: list[Ended] = []
        """For the caller to take."""
        self.importing: list[Sequence] = []
        """Requests whose import begins, for the caller to take."""
        self.requests: dict[RequestId, Sequence] = {}
        """All that have not ended, in order of arrival."""
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """Those that were admitted, in that order."""
        self.prefills: dict[int, Sequence] = {}
        """Those of them that have more than one token to compute, in the order in which they began to."""
        self.decoding = 0
        """How many decode."""
        self.lengths = 0
        """Sum over those that decode."""
        self.steps = 0
        """Iterations that decoded."""
        self._finishes: list[tuple[int, int, Sequence]] = []
        """Heap of `(steps, number)` at the end of those that decode; stale ones too."""
        self._admitted = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.requests[sequence.request.id] = sequence
        self.waiting.append(sequence)

    # -- iterations -------------------------------------------------------------------------------------------------

    def step(self, steps: int) -> None:
        """Every decoding request has drawn so many tokens."""
        tokens = self.decoding * steps
        self.steps += steps
        self.lengths += tokens
        self.cache.held_tokens += tokens
        self.counts.generated_tokens += tokens

    def compute(self, sequence: Sequence, tokens: int, at_s: float) -> None:
        """So many tokens of a prompt went through a forward pass; behind the last of them a token is drawn."""
        sequence.cached += tokens
        sequence.computed += tokens
        self.counts.computed_prompt_tokens += tokens
        left = sequence.length - sequence.cached
        if left > 1:
            return
        del self.prefills[sequence.number]
        if left:
            # The last one is computed as a token that was drawn is.
            self.cache.held_tokens -= 1
            self._decode_last(sequence, at_s)
        else:
            sequence.length += 1
            self.counts.generated_tokens += 1
            self._decode(sequence, at_s)

    def _decode_last(self, sequence: Sequence, at_s: float) -> None:
        """Go on with one token of context to compute."""
        sequence.single = sequence.length
        self.counts.computed_prompt_tokens += 1
        self._decode(sequence, at_s)

    def finish(self, at_s: float) -> None:
        """End the requests that have all their tokens."""
        finishes = self._finishes
        while finishes and finishes[0][0] <= self.steps:
            entry = heapq.heappop(finishes)
            if _is_valid(entry):
                self.end(entry[2], entry[2].end, at_s)

    def steps_left(self) -> int:
        """Iterations until the next decoding request ends; there is one."""
        while not _is_valid(self._finishes[0]):
            heapq.heappop(self._finishes)
        return self._finishes[0][0] - self.steps

    # -- beginnings -------------------------------------------------------------------------------------------------

    def admit(self, at_s: float) -> None:
        """Let waiting requests begin, first come, first served."""
        waiting = self.waiting
        while waiting and len(self.running) < self._max_sequences:
            sequence = waiting[0]
            if self.cache.room_for(sequence.request.trajectory) < sequence.length + self.decoding:
                return
            waiting.popleft()
            self._seat(sequence, at_s)
            self.cache.make_room()

    def _seat(self, sequence: Sequence, at_s: float) -> None:
        trajectory = sequence.request.trajectory
        self._admitted += 1
        sequence.number = self._admitted
        self.running[sequence.number] = sequence
        cached, version = self.cache.find(trajectory)
        self.cache.take(trajectory)
        handle = sequence.imports
        if handle is not None and self._is_useful(handle, cached):
            sequence.phase, sequence.cached, sequence.kv_version = Phase.IMPORTING, cached, version
            self.cache.held_tokens += sequence.length
            self.importing.append(sequence)
        else:
            sequence.imports = None
            self._place(sequence, cached, version, at_s)

    def _is_useful(self, handle: KvHandle, cached: int) -> bool:
        """KV of weights left behind is no use, nor is KV that begins behind what is held."""
        is_taken = handle.version == self.version or self.load_mode is LoadMode.KEEP_KV
        return is_taken and handle.start <= cached < handle.tokens

    def take_import(self, sequence: Sequence, at_s: float) -> None:
        """The KV that a request waited for is there."""
        handle, sequence.imports = sequence.imports, None
        assert handle is not None, "it waited for it"
        version = min(sequence.kv_version, handle.version) if sequence.cached else handle.version
        self.cache.held_tokens -= sequence.length
        self._place(sequence, handle.tokens, version, at_s)

    def _place(self, sequence: Sequence, cached: int, version: WeightVersion, at_s: float) -> None:
        """Let a request compute what it lacks of its context: at least its last token, for the next one to be drawn."""
        sequence.cached = cached = min(cached, sequence.length - 1)
        sequence.kv_version = version if cached else self.version
        if sequence.length - cached == 1:
            self.cache.held_tokens += cached
            self._decode_last(sequence, at_s)
        else:
            sequence.phase = Phase.PREFILLING
            self.cache.held_tokens += sequence.length
            self.prefills[sequence.number] = sequence

    def _decode(self, sequence: Sequence, at_s: float) -> None:
        sequence.phase, sequence.since_s = Phase.DECODING, at_s
        sequence.offset = sequence.length - self.steps
        sequence.finish = sequence.goal - sequence.offset
        self.decoding += 1
        self.lengths += sequence.length
        heapq.heappush(self._finishes, (sequence.finish, sequence.number, sequence))

    # -- ends -------------------------------------------------------------------------------------------------------

    def end(self, sequence: Sequence, reason: EndReason, at_s: float, error: str | None = None) -> None:
        """End a request and keep its prefix, exported where that was asked for; one that had ended is ignored."""
        if sequence.phase is Phase.ENDED:
            return
        was_running = sequence.phase is not Phase.WAITING
        self._leave(sequence, at_s)
        sequence.phase = Phase.ENDED
        del self.requests[sequence.request.id]
        handle = None
        if was_running:
            request, cached = sequence.request, sequence.cached
            self.cache.keep(request.trajectory, cached, sequence.kv_version)
            if (request.export_kv or request.mode is Mode.PREFILL) and cached > request.export_from and error is None:
                handle = self._exports.export(request, sequence.script, cached, sequence.kv_version, at_s)
        self.ended.append(Ended(sequence, reason, handle, error))

    def make_way(self, tokens: int, at_s: float) -> None:
        """Take the memory of the requests that were admitted last until so many tokens per decoding one fit."""
        while self.running and self.decoding * tokens > self.cache.free_tokens:
            youngest = next((one for one in reversed(self.running.values()) if one.phase is not Phase.IMPORTING), None)
            if youngest is None:
                break
            self._preempt(youngest, at_s)

    def _preempt(self, sequence: Sequence, at_s: float) -> None:
        self._leave(sequence, at_s)
        self.cache.keep(sequence.request.trajectory, 0, sequence.kv_version)
        sequence.phase, sequence.cached = Phase.WAITING, 0
        self.waiting.appendleft(sequence)
        self.counts.preemptions += 1

    def _leave(self, sequence: Sequence, at_s: float) -> None:
        """Take a request off its place, with its length and the KV that it has."""
        match sequence.phase:
            case Phase.WAITING:
                self.waiting.remove(sequence)
                return
            case Phase.DECODING:
                self._stop_decoding(sequence, at_s)
                self.cache.held_tokens -= sequence.cached
            case _:
                self.prefills.pop(sequence.number, None)
                self.cache.held_tokens -= sequence.length
        del self.running[sequence.number]

    def _stop_decoding(self, sequence: Sequence, at_s: float) -> None:
        sequence.length = sequence.offset + self.steps
        sequence.cached = sequence.length - 1
        sequence.computed, sequence.single = sequence.computed_by(sequence.length), -1
        sequence.stints.append(Stint(sequence.since_s, sequence.offset, at_s, sequence.length))
        self.decoding -= 1
        self.lengths -= sequence.length

    # -- weights ----------------------------------------------------------------------------------------------------

    def reload(self, version: WeightVersion, mode: LoadMode, at_s: float) -> int:
        """Go on under new weights, between two iterations; how many tokens of running requests are computed again."""
        self.version, self.load_mode = version, mode
        for sequence in self.requests.values():
            sequence.mark_version(version, self.length(sequence))
        if mode is LoadMode.KEEP_KV:
            return 0
        self.cache.forget_all()
        recomputed = 0
        for sequence in self.running.values():
            if sequence.phase is Phase.DECODING:
                self._stop_decoding(sequence, at_s)
                # What it computes again it holds whole.
                self.cache.held_tokens += 1
            recomputed += sequence.cached
            sequence.phase, sequence.cached, sequence.kv_version, sequence.imports = Phase.PREFILLING, 0, version, None
        self.prefills = dict(self.running)
        return recomputed

    def length(self, sequence: Sequence) -> int:
        """Length of a request at the boundary."""
        return sequence.offset + self.steps if sequence.phase is Phase.DECODING else sequence.length


def _is_valid(entry: tuple[int, int, Sequence]) -> bool:
    """Whether a request still decodes, and ends then."""
    finish, number, sequence = entry
    return sequence.phase is Phase.DECODING and sequence.finish == finish and sequence.number == number
