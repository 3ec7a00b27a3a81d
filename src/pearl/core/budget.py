"""The rollout budget: which GPUs the fleet may use now, as counts of workers that fit on them.

Dedicated GPUs (reserved and external) can be cut into workers of any allowed tensor parallelism; overlap workers, which share
GPUs with training, exist already and are borrowed whole. What is in transition is nobody's to plan with: it counts neither as a
worker nor as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pearl.core.seats import aligned, by_node
from pearl.core.state import Activity, FleetState, GpuOwner, Role, Worker
from pearl.records.ids import GpuId


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """GPUs to plan with."""

    usable: frozenset[GpuId]
    """Dedicated GPUs."""
    workers: Mapping[int, int]
    """Tensor parallelism -> dedicated workers of it that fit side by side, each on one node."""
    lendable: frozenset[GpuId]
    """GPUs of the overlap workers that may serve."""
    overlap: int
    """Overlap workers that may serve, >= 0."""
    overlap_tp: int
    """Their tensor parallelism: one for all, fixed when they were started; 1 where there are none."""


class Budgets:
    """The budgets of a state, with more or fewer of its GPUs."""

    def __init__(
        self, state: FleetState, tps: Iterable[int], *, lending: bool, gone: frozenset[GpuId] = frozenset()
    ) -> None:
        """`lending`: training does not need its GPUs now; `gone`: GPUs that are given back: blocks are as they will be then."""
        workers = [state.workers[slot] for slot in sorted(state.workers)]
        moving = _gpus_of(worker for worker in workers if worker.activity is Activity.TRANSITIONING)
        dedicated = {gpu.id for gpu in state.gpus.values() if gpu.owner is not GpuOwner.TRAINING}
        training = _gpus_of(w for w in workers if w.role is Role.TRAINING and w.activity is Activity.ACTIVE)
        rollout = [worker for worker in workers if worker.role is not Role.TRAINING]
        self._tps = tuple(tps)
        self._usable = frozenset(dedicated - moving)
        spare = (state.gpus.keys() - dedicated - moving - training) if lending else frozenset[GpuId]()
        self._retained = [worker for worker in rollout if spare.issuperset(worker.gpus)]
        self._seated = [w for w in rollout if w.activity is Activity.ACTIVE and dedicated.issuperset(w.gpus)]
        self._nodes = tuple(by_node(state, gone).values())
        self._known: dict[frozenset[GpuId], Budget] = {}

    def without(self, avoid: frozenset[GpuId] = frozenset()) -> Budget:
        """The budget without GPUs that leave, or that a policy does not use; a decision asks for the same ones again."""
        known = self._known.get(avoid)
        if known is None:
            known = self._known[avoid] = self._without(avoid)
        return known

    def _without(self, avoid: frozenset[GpuId]) -> Budget:
        usable = self._usable - avoid
        retained = [worker for worker in self._retained if avoid.isdisjoint(worker.gpus)]
        counts = Counter(len(worker.gpus) for worker in retained)
        overlap_tp = min(counts, key=lambda tp: (-counts[tp], tp), default=1)
        overlap = [worker for worker in retained if len(worker.gpus) == overlap_tp]
        seated = [worker for worker in self._seated if usable.issuperset(worker.gpus)]
        return Budget(
            usable=usable,
            workers={tp: _fit(self._nodes, usable, seated, tp) for tp in self._tps},
            lendable=_gpus_of(overlap),
            overlap=len(overlap),
            overlap_tp=overlap_tp,
        )


def _gpus_of(workers: Iterable[Worker]) -> frozenset[GpuId]:
    return frozenset(gpu for worker in workers for gpu in worker.gpus)


def _fit(nodes: Iterable[tuple[GpuId, ...]], usable: frozenset[GpuId], seated: Iterable[Worker], tp: int) -> int:
    """Workers of so many GPUs that fit: on each node all in aligned blocks anew, or around those that sit there, if that is more.

    New workers take blocks of a node's GPUs in order, beginning at multiples of their tensor parallelism; since others came and
    went, workers that are here may sit across such blocks.
    """
    here = [worker for worker in seated if len(worker.gpus) == tp]
    rest = usable - _gpus_of(here)
    sits_on = Counter(worker.gpus[0] for worker in here)
    return sum(
        max(_blocks(node, usable, tp), _blocks(node, rest, tp) + sum(sits_on[gpu] for gpu in node)) for node in nodes
    )


def _blocks(node: tuple[GpuId, ...], free: frozenset[GpuId], tp: int) -> int:
    return sum(map(free.issuperset, aligned(node, tp)))
