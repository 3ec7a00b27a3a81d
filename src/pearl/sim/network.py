"""Transfers over shared bandwidth: every end sends and receives at up to its capacity, in each direction apart.

Law: a transfer moves at the smaller of its two shares, `capacity(source) / transfers that leave source` and
`capacity(target) / transfers that reach target`, worked out anew whenever one begins or ends. Links are full duplex, the
fabric between the ends is not a bottleneck, and a share that a transfer cannot use is not given to the others: what is
predicted is at most slower than progressive filling, and one change touches the transfers of two ends only.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

from pearl.errors import WorkerLost

_STALE = 64
"""Entries of the heap beyond twice the transfers under way before those that are out of date are thrown away."""


class _Transfer:
    """One transfer under way."""

    __slots__ = ("done", "due_s", "left_bytes", "number", "rate", "since_s", "source", "target")

    def __init__(self, number: int, source: str, target: str, size_bytes: float, done: asyncio.Future[None]) -> None:
        self.number = number
        self.source = source
        self.target = target
        self.left_bytes = size_bytes
        self.done = done
        self.since_s = 0.0
        self.rate = 0.0
        self.due_s = math.inf

    def advance(self, now_s: float) -> None:
        """Count what was moved at the present rate."""
        if now_s > self.since_s:
            self.left_bytes = max(0.0, self.left_bytes - self.rate * (now_s - self.since_s))
            self.since_s = now_s


class Network:
    """Moves bytes between ends known by name; one timer however many transfers there are."""

    def __init__(self, bandwidth_bytes_per_s: Callable[[str], float]) -> None:
        """`bandwidth_bytes_per_s`: end -> what it sends, and receives, at most; > 0, infinite for no bound.

        It is asked again whenever a transfer of the end begins or ends.
        """
        self._capacity = bandwidth_bytes_per_s
        self._leaving: dict[str, dict[int, _Transfer]] = {}
        self._reaching: dict[str, dict[int, _Transfer]] = {}
        self._due: list[tuple[float, int, _Transfer]] = []
        """A heap; an entry whose time is not its transfer's any more is out of date."""
        self._begun = 0
        self._timer: asyncio.TimerHandle | None = None
        self.active = 0
        """Transfers under way."""
        self.moved_bytes = 0.0
        """Of the transfers that were completed."""

    async def transfer(self, source: str, target: str, size_bytes: float) -> None:
        """Move bytes from one end to another; nothing, and nothing to itself, takes no time.

        Cancelling it gives its share to the others at once.

        Raises:
            WorkerLost: one of its ends was lost meanwhile.
        """
        if not 0 <= size_bytes < math.inf:
            raise ValueError(f"transfer from {source} to {target}: got {size_bytes} bytes, want a finite number >= 0")
        if source == target or size_bytes == 0:
            self.moved_bytes += size_bytes
            return
        loop = asyncio.get_running_loop()
        moving = _Transfer(self._begun, source, target, size_bytes, loop.create_future())
        moving.since_s = loop.time()
        # Asked for before anything is changed: an end without a capacity must not leave half a transfer behind.
        self._bound(source)
        self._bound(target)
        self._begun += 1
        self.active += 1
        self._leaving.setdefault(source, {})[moving.number] = moving
        self._reaching.setdefault(target, {})[moving.number] = moving
        self._settle([moving])
        try:
            await moving.done
        finally:
            if moving.number in self._leaving.get(source, {}):
                self._remove(moving)
                self._settle([moving])
        self.moved_bytes += size_bytes

    def lose(self, end: str) -> None:
        """End all transfers of an end that is gone: they raise `WorkerLost`, in order of beginning."""
        gone = {**self._leaving.get(end, {}), **self._reaching.get(end, {})}
        self._end(
            [gone[number] for number in sorted(gone)],
            WorkerLost(f"network: {end} was lost during a transfer"),
        )

    def _end(self, ended: list[_Transfer], error: Exception | None = None) -> None:
        for moving in ended:
            self._remove(moving)
        self._settle(ended)
        for moving in ended:
            if moving.done.done():
                continue
            if error is None:
                moving.done.set_result(None)
            else:
                moving.done.set_exception(error)

    def _remove(self, moving: _Transfer) -> None:
        self.active -= 1
        moving.due_s = math.nan  # equal to no entry's time
        for ends, end in ((self._leaving, moving.source), (self._reaching, moving.target)):
            del ends[end][moving.number]
            if not ends[end]:
                del ends[end]

    def _settle(self, changed: list[_Transfer]) -> None:
        """Share the bandwidth of the ends of transfers that began or ended anew."""
        now_s = asyncio.get_running_loop().time()
        touched: dict[int, _Transfer] = {}
        for source in dict.fromkeys(moving.source for moving in changed):
            touched.update(self._leaving.get(source, {}))
        for target in dict.fromkeys(moving.target for moving in changed):
            touched.update(self._reaching.get(target, {}))
        for moving in touched.values():
            moving.advance(now_s)
            moving.rate = min(
                self._bound(moving.source) / len(self._leaving[moving.source]),
                self._bound(moving.target) / len(self._reaching[moving.target]),
            )
            due_s = now_s + moving.left_bytes / moving.rate
            if due_s != moving.due_s:
                moving.due_s = due_s
                heapq.heappush(self._due, (due_s, moving.number, moving))
        self._arm()

    def _arm(self) -> None:
        """Let the timer go off when the first transfer is complete."""
        if len(self._due) > 2 * self.active + _STALE:
            self._due = [entry for entry in self._due if entry[0] == entry[2].due_s]
            heapq.heapify(self._due)
        while self._due and self._due[0][0] != self._due[0][2].due_s:
            heapq.heappop(self._due)
        due_s = self._due[0][0] if self._due else None
        if self._timer is not None:
            if self._timer.when() == due_s:
                return
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._complete, due_s)

    def _complete(self, due_s: float) -> None:
        self._timer = None
        ended: list[_Transfer] = []
        while self._due and (self._due[0][0] <= due_s or self._due[0][0] != self._due[0][2].due_s):
            entry_due_s, _, moving = heapq.heappop(self._due)
            if entry_due_s == moving.due_s:
                moving.due_s = math.nan
                ended.append(moving)
        self._end(ended)

    def _bound(self, end: str) -> float:
        bound = self._capacity(end)
        if not bound > 0:
            raise ValueError(f"network: bandwidth of {end}: got {bound} bytes/s, want > 0")
        return bound
