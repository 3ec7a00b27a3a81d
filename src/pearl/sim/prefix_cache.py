"""KV memory of a simulated engine, in tokens: what requests hold, and prefixes of trajectories that wait for their environment.

Laws:

- *room*: after `make_room`, what is held, pinned and cached is within the capacity, unless what is held and pinned alone
  is beyond it; prefixes leave in the order in which they were used last;
- *pinned*: a prefix with a live export stays; the end of its last export counts as a use of it;
- *shared*: a prefix that a request takes over, and exports of it, are not counted beside what the request holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pearl.records.ids import HandleId, TrajectoryId, WeightVersion

_FIRST = WeightVersion(0)
NO_PREFIX = (0, _FIRST)


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: int = 0
    """Of the prefix; 0: there are only exports."""
    version: WeightVersion = _FIRST
    pins: dict[HandleId, int] = field(default_factory=dict)
    """Live exports -> length of the context whose KV they keep."""
    taken: bool = False
    """A request holds it."""

    @property
    def size(self) -> int:
        if self.taken:
            return 0
        return max(self.tokens, *self.pins.values()) if self.pins else self.tokens


class PrefixCache:
    """Of one engine."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0
        """By requests; whoever runs them counts it up and down."""
        self.cached_tokens = 0
        """Of prefixes that may be evicted."""
        self.pinned_tokens = 0
        self._entries: dict[TrajectoryId, _Entry] = {}
        self._order: dict[TrajectoryId, None] = {}
        """What may be evicted, used longest ago first."""
        self._ends: deque[tuple[float, TrajectoryId, HandleId]] = deque()
        """Of exports, soonest first: all live equally long."""

    @property
    def used_tokens(self) -> int:
        """Everything."""
        return self.held_tokens + self.cached_tokens + self.pinned_tokens

    @property
    def free_tokens(self) -> int:
        """What requests could still take, were every prefix evicted that may be."""
        return self.capacity_tokens - self.held_tokens - self.pinned_tokens

    @property
    def soonest_end_s(self) -> float | None:
        """When the next export ends by itself."""
        while self._ends and not self.is_pinned(*self._ends[0][1:]):
            self._ends.popleft()
        return self._ends[0][0] if self._ends else None

    def room_for(self, trajectory: TrajectoryId) -> int:
        """Tokens that a request of a trajectory could hold."""
        entry = self._entries.get(trajectory)
        own = entry.size if entry is not None and entry.pins else 0
        return self.free_tokens + own

    def find(self, trajectory: TrajectoryId) -> tuple[int, WeightVersion]:
        """Length of a prefix, and the oldest weights that computed some of it."""
        entry = self._entries.get(trajectory)
        return NO_PREFIX if entry is None or entry.taken else (entry.tokens, entry.version)

    def take(self, trajectory: TrajectoryId) -> None:
        """A request takes the prefix over, and counts it as held from now on."""
        entry = self._entries.get(trajectory)
        if entry is None:
            return
        self._uncount(trajectory, entry)
        if entry.pins:
            entry.taken, entry.tokens = True, 0
        else:
            del self._entries[trajectory]

    def keep(self, trajectory: TrajectoryId, tokens: int, version: WeightVersion) -> None:
        """A request leaves a prefix behind; 0 tokens: none."""
        entry = self._entries.get(trajectory)
        if entry is None:
            if not tokens:
                return
            entry = self._entries[trajectory] = _Entry()
        else:
            self._uncount(trajectory, entry)
        entry.tokens, entry.version, entry.taken = tokens, version, False
        self._count(trajectory, entry)

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop a prefix that no request holds; unknown ones are ignored, exports stay."""
        entry = self._entries.get(trajectory)
        if entry is not None and not entry.taken:
            self._uncount(trajectory, entry)
            entry.tokens = 0
            self._count(trajectory, entry)

    def forget_all(self) -> None:
        """Drop every prefix, and with new weights what requests share with exports; those stay."""
        for trajectory, entry in list(self._entries.items()):
            self._uncount(trajectory, entry)
            entry.tokens, entry.taken = 0, False
            self._count(trajectory, entry)

    def clear(self) -> None:
        """Drop everything, exports too."""
        self._entries.clear()
        self._order.clear()
        self._ends.clear()
        self.cached_tokens = self.pinned_tokens = 0

    def make_room(self) -> None:
        """Evict until everything fits, or nothing is left to evict."""
        while self._order and self.held_tokens + self.cached_tokens + self.pinned_tokens > self.capacity_tokens:
            trajectory = next(iter(self._order))
            self._uncount(trajectory, self._entries.pop(trajectory))

    # -- exports ----------------------------------------------------------------------------------------------------

    def pin(self, trajectory: TrajectoryId, handle: HandleId, tokens: int, end_s: float) -> None:
        """Keep the KV of a context for an export that ends, at the latest, at a time that is no earlier than the one before."""
        entry = self._entries.get(trajectory)
        if entry is None:
            entry = self._entries[trajectory] = _Entry()
        else:
            self._uncount(trajectory, entry)
        entry.pins[handle] = tokens
        self._count(trajectory, entry)
        self._ends.append((end_s, trajectory, handle))

    def unpin(self, trajectory: TrajectoryId, handle: HandleId) -> bool:
        """End an export; False: it was over."""
        if not self.is_pinned(trajectory, handle):
            return False
        entry = self._entries[trajectory]
        self._uncount(trajectory, entry)
        del entry.pins[handle]
        self._count(trajectory, entry)
        return True

    def expire(self, now_s: float) -> list[HandleId]:
        """End the exports whose time is over, in that order."""
        over: list[HandleId] = []
        while self._ends and self._ends[0][0] <= now_s:
            _, trajectory, handle = self._ends.popleft()
            if self.unpin(trajectory, handle):
                over.append(handle)
        return over

    def is_pinned(self, trajectory: TrajectoryId, handle: HandleId) -> bool:
        """Whether an export is not over."""
        entry = self._entries.get(trajectory)
        return entry is not None and handle in entry.pins

    def _uncount(self, trajectory: TrajectoryId, entry: _Entry) -> None:
        if entry.pins:
            self.pinned_tokens -= entry.size
        else:
            self.cached_tokens -= entry.size
            self._order.pop(trajectory, None)

    def _count(self, trajectory: TrajectoryId, entry: _Entry) -> None:
        """Put an entry where it belongs, as used last; one of nothing goes."""
        if entry.pins:
            self.pinned_tokens += entry.size
        elif entry.taken or not entry.tokens:
            del self._entries[trajectory]
        else:
            self.cached_tokens += entry.size
            self._order[trajectory] = None
