"""The rollout budget: which GPUs the fleet may use now, as counts of workers that fit on them.

Dedicated GPUs (reserved and external) can be cut into workers of any allowed tensor parallelism; overlap workers, which share
GPUs with training, exist already and are borrowed whole. What is in transition is nobody's to plan with: it counts neither as a
worker nor as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pearl.core.state import Activity, FleetState, GpuOwner, Role
from pearl.records.ids import GpuId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """GPUs to plan with."""

    usable: frozenset[GpuId]
    """Dedicated GPUs."""
    nodes: Mapping[NodeId, int]
    """Node -> how many of the usable GPUs it has."""
    lendable: frozenset[GpuId]
    """GPUs of the overlap workers that may serve."""
    overlap: int
    """Overlap workers that may serve, >= 0."""
    overlap_tp: int
    """Their tensor parallelism: one for all, fixed when they were started; 1 where there are none."""

    @property
    def gpus(self) -> int:
        """Dedicated and lendable ones."""
        return len(self.usable) + len(self.lendable)

    def fits(self, tp: int) -> int:
        """Dedicated workers of so many GPUs that fit side by side, each on one node."""
        return sum(gpus // tp for gpus in self.nodes.values())


def budget_of(state: FleetState, *, lending: bool, avoid: frozenset[GpuId] = frozenset()) -> Budget:
    """The budget in this state.

    `lending`: training does not need its GPUs now; `avoid`: GPUs that leave, or that a policy does not use.
    """
    moving = {
        gpu for worker in state.workers.values() if worker.activity is Activity.TRANSITIONING for gpu in worker.gpus
    }
    free = [gpu for gpu in state.gpus.values() if gpu.id not in avoid and gpu.id not in moving]
    usable = {gpu.id: gpu.node for gpu in free if gpu.owner is not GpuOwner.TRAINING}
    training = {gpu.id for gpu in free if gpu.owner is GpuOwner.TRAINING}
    trained_on = {
        gpu
        for worker in state.workers.values()
        if worker.role is Role.TRAINING and worker.activity is not Activity.INACTIVE
        for gpu in worker.gpus
    }
    retained = [
        worker
        for worker in state.workers.values()
        if lending and worker.role is not Role.TRAINING and training.issuperset(worker.gpus)
        if trained_on.isdisjoint(worker.gpus)
    ]
    tps = Counter(len(worker.gpus) for worker in retained)
    overlap_tp = min(tps, key=lambda tp: (-tps[tp], tp), default=1)
    overlap = [worker for worker in retained if len(worker.gpus) == overlap_tp]
    return Budget(
        usable=frozenset(usable),
        nodes=Counter(usable.values()),
        lendable=frozenset(gpu for worker in overlap for gpu in worker.gpus),
        overlap=len(overlap),
        overlap_tp=overlap_tp,
    )
