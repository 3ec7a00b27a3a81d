"""What each KV slot holds: the tokens of one trajectory, and the request that extends them.

One column of numbers per slot, so that the bookkeeping of an iteration is a handful of array operations however many
sequences run. Laws:

- a slot belongs to one trajectory until it is released or evicted; a trajectory has at most one slot;
- `cached <= length`: the KV of the first `cached` tokens is in the cache, computed from exactly those token ids;
- while a request runs, `cached < length`: the last token is always still to be computed;
- an idle slot (no request) may be evicted, the longest unused first; a running one never is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pearl.engine.embedded.attention import Ints
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.turn import Mode, TurnRequest, VersionRun, Versions

STOP_IDS = 4
"""Stop tokens per request that the table starts with room for."""
_NO_TOKEN = -1


class SlotTable:
    """`slots` rows of at most `positions` tokens."""

    def __init__(self, slots: int, positions: int) -> None:
        self.token_ids = np.zeros((slots, positions), dtype=np.int64)
        """What is known of the sequence: context and generated tokens."""
        self.logprobs = np.zeros((slots, positions), dtype=np.float32)
        self.versions = np.zeros((slots, positions), dtype=np.int64)
        """Of generated tokens of the running request; stale elsewhere."""
        self.length = np.zeros(slots, dtype=np.int64)
        self.cached = np.zeros(slots, dtype=np.int64)
        self.prompt = np.zeros(slots, dtype=np.int64)
        """Tokens before this position count as context when they are computed."""
        self.computed = np.zeros(slots, dtype=np.int64)
        """Context tokens computed for the running request."""
        self.reported = np.zeros(slots, dtype=np.int64)
        """Tokens before this position have been delivered."""
        self.limit = np.zeros(slots, dtype=np.int64)
        """Length at which the running request ends."""
        self.kv_version = np.zeros(slots, dtype=np.int64)
        """Oldest weights that computed KV in the slot."""
        self.temperature = np.zeros(slots, dtype=np.float64)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.stops = np.full((slots, STOP_IDS), _NO_TOKEN, dtype=np.int64)
        self.running = np.zeros(slots, dtype=np.bool_)
        self.turn_of_arrival = np.zeros(slots, dtype=np.int64)
        """Rises with every request that starts; prefill is served in this order."""
        self._requests: list[TurnRequest | None] = [None] * slots
        self._by_request: dict[RequestId, int] = {}
        self._by_trajectory: dict[TrajectoryId, int] = {}
        self._owners: list[TrajectoryId | None] = [None] * slots
        self._idle: dict[TrajectoryId, int] = {}  # longest unused first
        self._free = list(range(slots))  # a heap: low slots first keeps a batch contiguous
        self._forgotten: set[TrajectoryId] = set()
        self._arrivals = 0

    # -- ownership --------------------------------------------------------------------------------------------------

    def slot_of(self, trajectory: TrajectoryId) -> int | None:
        """The slot that a trajectory owns."""
        return self._by_trajectory.get(trajectory)

    def running_slot(self, request: RequestId) -> int | None:
        """The slot in which a request runs."""
        return self._by_request.get(request)

    def request(self, slot: int) -> TurnRequest:
        """The request that runs in a slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is idle"
        return request

    def take(self, trajectory: TrajectoryId) -> int | None:
        """Give a trajectory a slot, evicting an idle one if need be; None when every slot is running."""
        if not self._free:
            if not self._idle:
                return None
            self._drop(next(iter(self._idle)))
        slot = heapq.heappop(self._free)
        self._owners[slot] = trajectory
        self._by_trajectory[trajectory] = slot
        self._idle[trajectory] = slot
        return slot

    def release(self, trajectory: TrajectoryId) -> None:
        """Free a trajectory's slot, at the end of its request if one is running."""
        if trajectory in self._idle:
            self._drop(trajectory)
        elif trajectory in self._by_trajectory:
            self._forgotten.add(trajectory)

    def release_idle(self) -> None:
        """Free every slot without a request."""
        for trajectory in tuple(self._idle):
            self._drop(trajectory)

    def _drop(self, trajectory: TrajectoryId) -> None:
        slot = self._by_trajectory.pop(trajectory)
        del self._idle[trajectory]
        self._owners[slot] = None
        self.length[slot] = self.cached[slot] = 0
        heapq.heappush(self._free, slot)

    # -- requests ---------------------------------------------------------------------------------------------------

    def start(self, slot: int, request: TurnRequest, context: Ints) -> None:
        """Begin a request in the idle slot of its trajectory, keeping the cached prefix that its context shares."""
        tokens = len(context)
        known = min(tokens, int(self.length[slot]))
        differs = self.token_ids[slot, :known] != context[:known]
        shared = int(differs.argmax()) if differs.any() else known
        self.token_ids[slot, shared:tokens] = context[shared:]
        self.cached[slot] = min(int(self.cached[slot]), shared, tokens - 1)
        self.length[slot] = self.prompt[slot] = self.reported[slot] = tokens
        new = 1 if request.mode is Mode.PREFILL else request.max_new_tokens
        self.limit[slot] = min(tokens + new, self.token_ids.shape[1])
        self.computed[slot] = 0
        self.temperature[slot] = request.sampling.temperature
        self.seed[slot] = request.sampling.seed
        self._set_stops(slot, request.sampling.stop_token_ids)
        self.running[slot] = True
        self._arrivals += 1
        self.turn_of_arrival[slot] = self._arrivals
        self._requests[slot] = request
        self._by_request[request.id] = slot
        del self._idle[request.trajectory]

    def end(self, slot: int, *, keep: bool = True) -> None:
        """End the request in a slot; its trajectory keeps the slot unless `keep` is unset or it was released."""
        request = self.request(slot)
        self.running[slot] = False
        self._requests[slot] = None
        del self._by_request[request.id]
        self._idle[request.trajectory] = slot
        if request.trajectory in self._forgotten or not keep:
            self._forgotten.discard(request.trajectory)
            self._drop(request.trajectory)

    def forget_kv(self) -> int:
        """Drop all cached KV and return its tokens; running requests compute everything that they know again."""
        dropped = int(self.cached.sum())
        self.cached[:] = 0
        np.copyto(self.prompt, self.length, where=self.running)
        self.release_idle()
        return dropped

    def undelivered(self, slot: int) -> tuple[TokenIds, Floats, Versions]:
        """Generated tokens of the running request that no chunk has carried."""
        fresh = slice(int(self.reported[slot]), int(self.length[slot]))
        return (
            TokenIds(self.token_ids[slot, fresh]),
            Floats(self.logprobs[slot, fresh]),
            _runs(self.versions[slot, fresh]),
        )

    @property
    def running_count(self) -> int:
        """Slots with a request."""
        return len(self._by_request)

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is held, idle prefixes included."""
        return int(self.cached.sum())

    def _set_stops(self, slot: int, stops: Iterable[int]) -> None:
        ids = tuple(stops)
        missing = len(ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self.stops[slot] = _NO_TOKEN
        self.stops[slot, : len(ids)] = ids


def _runs(versions: npt.NDArray[np.int64]) -> Versions:
    if not len(versions):
        return Versions()
    if (versions == versions[0]).all():
        return Versions((VersionRun(version=WeightVersion(int(versions[0])), tokens=len(versions)),))
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return Versions.of((int(versions[a]), b - a) for a, b in itertools.pairwise(edges))
