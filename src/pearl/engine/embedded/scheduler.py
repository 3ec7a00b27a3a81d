"""Which requests run, and what the next iteration computes.

Laws of continuous batching:

- every running sequence with one token to compute (decode) is in every iteration;
- longer remainders (prefill) share `prefill_chunk_tokens` per iteration, in order of arrival, and may be cut anywhere;
- a request whose trajectory owns a slot starts at once; others wait first in, first out, for a free or idle slot;
- at most `max_running` requests run; slots beyond them keep the prefixes of trajectories that act.
"""

from __future__ import annotations

import math

import numpy as np

from pearl.engine.embedded.attention import Batch, Ints
from pearl.engine.embedded.slots import SlotTable
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import TokenIds
from pearl.records.turn import TurnRequest


class Scheduler:
    """Admission and batch building over a slot table."""

    def __init__(self, table: SlotTable, *, prefill_chunk_tokens: int, max_running: int) -> None:
        self._table = table
        self._max_running = max_running
        self._started: list[int] = []
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._waiting: dict[RequestId, TurnRequest] = {}
        self._waiting_trajectories: set[TrajectoryId] = set()

    @property
    def waiting_count(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Requests that have not started yet, in order."""
        return tuple(self._waiting)

    def holds(self, request: RequestId) -> bool:
        """Whether a request is running or waiting."""
        return request in self._waiting or self._table.running_slot(request) is not None

    def serves(self, trajectory: TrajectoryId) -> bool:
        """Whether a trajectory has a request that is running or waiting."""
        if trajectory in self._waiting_trajectories:
            return True
        slot = self._table.slot_of(trajectory)
        return slot is not None and bool(self._table.running[slot])

    def add(self, request: TurnRequest) -> None:
        """Queue a request that was checked with `refusal`."""
        self._waiting[request.id] = request
        self._waiting_trajectories.add(request.trajectory)
        if self._has_room() and self._table.slot_of(request.trajectory) is not None:
            self._start(request)

    def withdraw(self, request: RequestId) -> TurnRequest | None:
        """Take a request out of the queue; None when it is not waiting."""
        withdrawn = self._waiting.pop(request, None)
        if withdrawn is not None:
            self._waiting_trajectories.discard(withdrawn.trajectory)
        return withdrawn

    def admit(self) -> tuple[int, ...]:
        """Start waiting requests while there are slots; returns the slots that changed hands."""
        taken: list[int] = []
        while self._waiting and self._has_room():
            request = next(iter(self._waiting.values()))
            if self._table.slot_of(request.trajectory) is None:
                slot = self._table.take(request.trajectory)
                if slot is None:
                    break
                taken.append(slot)
            self._start(request)
        return tuple(taken)

    def take_started(self) -> tuple[int, ...]:
        """Slots in which a request started since the last call, and still runs."""
        started, self._started = self._started, []
        return tuple(slot for slot in dict.fromkeys(started) if self._table.running[slot])

    def _has_room(self) -> bool:
        return self._table.running_count < self._max_running

    def batch(self) -> Batch | None:
        """Build the next iteration, None when nothing is running."""
        table = self._table
        slots = np.flatnonzero(table.running)
        if not len(slots):
            return None
        counts = (table.length - table.cached)[slots]
        prefill = np.flatnonzero(counts > 1)
        if len(prefill):
            self._cut(slots, counts, prefill)
            slots, counts = slots[counts > 0], counts[counts > 0]
        return Batch.of(slots, table.cached[slots], counts)

    def _cut(self, slots: Ints, counts: Ints, prefill: Ints) -> None:
        """Cut prefill down to the budget, in place; what does not fit at all gets 0."""
        ordered = prefill[np.argsort(self._table.turn_of_arrival[slots[prefill]])]
        before = np.cumsum(counts[ordered]) - counts[ordered]
        counts[ordered] = np.clip(self._prefill_chunk_tokens - before, 0, counts[ordered])

    def _start(self, request: TurnRequest) -> None:
        slot = self._table.slot_of(request.trajectory)
        assert slot is not None, f"trajectory {request.trajectory} has no slot"
        assert isinstance(request.context, TokenIds), f"request {request.id} was not checked"
        self.withdraw(request.id)
        self._table.start(slot, request, request.context.array.astype(np.int64))
        self._started.append(slot)


def refusal(request: TurnRequest, *, vocabulary: int, max_context_tokens: int, version: WeightVersion) -> str | None:
    """Why an engine cannot serve a request: what was got and what is allowed; None when it can."""
    context, sampling = request.context, request.sampling
    if not isinstance(context, TokenIds):
        return f"context: got {type(context).__name__}, want TokenIds"
    if not 1 <= len(context) <= max_context_tokens:
        return (
            f"context: got {len(context)} tokens, want 1 .. {max_context_tokens} (engine.max_context_tokens, and at most "
            "engine.kv_budget_tokens)"
        )
    low, high = int(context.array.min()), int(context.array.max())
    if low < 0 or high >= vocabulary:
        return f"context: got token ids {low} .. {high}, want 0 .. {vocabulary - 1} (the model's vocabulary)"
    if request.export_from < 0:
        return f"export_from: got {request.export_from}, want >= 0"
    if request.max_new_tokens < 1:
        return f"max_new_tokens: got {request.max_new_tokens}, want >= 1"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"sampling.temperature: got {sampling.temperature}, want >= 0 and finite"
    if not 0 <= sampling.seed < 2**63:
        return f"sampling.seed: got {sampling.seed}, want 0 .. 2**63 - 1"
    if any(not 0 <= stop < vocabulary for stop in sampling.stop_token_ids):
        return f"sampling.stop_token_ids: got {sampling.stop_token_ids}, want 0 .. {vocabulary - 1}"
    if request.min_version > version:
        return (
            f"min_version: got {request.min_version}, want <= {version}, the version loaded; load newer weights first"
        )
    return None
