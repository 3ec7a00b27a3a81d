"""The choice of `pearl.pipeline.placement` without a look at every worker: who has the least to do is kept, not searched for.

Law, *same*: `Standings.choose` gives what `placement.choose` gives, provided that `changed` is told whenever a worker comes,
goes, drains, or has other weights or another role, and `eased` whenever a load falls. A load that rises need not be told.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from pearl.core.state import Role
from pearl.pipeline.placement import Candidate, Need, Placement, choose, homes, settle
from pearl.records.ids import WorkerId

C = TypeVar("C", bound=Candidate)

_SPARE = 64
"""Entries of a heap beyond twice its workers before it is made anew."""


class _Least(Generic[C]):
    """Of some workers, the one with the least outstanding work, of equal ones the lowest slot.

    A heap with an entry for each worker that is no higher than its load; there may be more.
    """

    __slots__ = ("_heap", "_workers")

    def __init__(self, workers: Iterable[C]) -> None:
        self._workers = {worker.id: worker for worker in workers}
        self._heap: list[tuple[int, WorkerId]] = []
        self._make()

    def _make(self) -> None:
        self._heap = [(worker.load, slot) for slot, worker in self._workers.items()]
        heapq.heapify(self._heap)

    def eased(self, worker: C) -> None:
        if self._workers.get(worker.id) is worker:
            heapq.heappush(self._heap, (worker.load, worker.id))
            if len(self._heap) > 2 * len(self._workers) + _SPARE:
                self._make()

    def first(self) -> C | None:
        heap, workers = self._heap, self._workers
        while heap:
            load, slot = heap[0]
            worker = workers[slot]
            if worker.load == load:
                return worker
            heapq.heapreplace(heap, (worker.load, slot))
        return None


class Standings(Generic[C]):
    """Of the workers that serve."""

    def __init__(self, workers: Mapping[WorkerId, C]) -> None:
        """`workers` is looked at again after `changed`."""
        self._workers = workers
        self._is_stale = True
        self._oldest = 0
        """Version of weights that no worker is behind."""
        self._generators, self._prefills = _Least[C](()), _Least[C](())

    def changed(self) -> None:
        """Somebody came, went, drains, or has other weights or another role."""
        self._is_stale = True

    def eased(self, worker: C) -> None:
        """A worker has less to do."""
        if not self._is_stale:
            (self._prefills if worker.role is Role.PREFILL else self._generators).eased(worker)

    def choose(self, need: Need) -> Placement[C] | None:
        """Place a turn; None when no worker is fit."""
        if self._is_stale:
            self._rank()
        if need.failed or need.min_version > self._oldest:
            # Seldom: a worker has failed this turn, or is about to be given new weights.
            return choose(self._workers, need)
        generator, prefill = self._generators.first(), self._prefills.first()
        found = prefill if generator is None else generator
        if found is None:
            return None
        return settle(need, found, prefill, *homes(self._workers, need))

    def _rank(self) -> None:
        taking = [worker for worker in self._workers.values() if not worker.draining]
        self._oldest = min((worker.version for worker in taking), default=0)
        self._generators = _Least(worker for worker in taking if worker.role is not Role.PREFILL)
        self._prefills = _Least(worker for worker in taking if worker.role is Role.PREFILL)
        self._is_stale = False
