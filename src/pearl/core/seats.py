"""Where workers of a target can sit: who may stay, who may be woken, where new ones fit.

A *seat* is one way to have one serving worker. Rules:

- a worker that serves may stay where the target may use its GPUs; one that sleeps may be woken there, unless another is
  on its way in or out of one of them;
- a new worker of tensor parallelism t takes an aligned block: GPUs of one node in order of id, beginning at a multiple
  of t; or the GPUs of a slot that was there before, which it reuses;
- a slot whose worker may stay or be woken is not stopped and started again: changing its role or waking it is what
  turns it;
- workers that are draining or initialising, and trainers, have no seat and are never touched.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pearl.core.state import Activity, FleetState, GpuOwner, Role, Worker
from pearl.records.ids import GpuId, NodeId, WorkerId


class SeatKind(enum.Enum):
    """How the worker comes to serve."""

    KEEP = "keep"
    """It does."""
    WAKE = "wake"
    START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One way to have one serving worker."""

    kind: SeatKind
    gpus: tuple[GpuId, ...]
    worker: WorkerId | None
    """Its slot; None for a block that never had one."""
    role: Role | None
    """Of a worker that serves; others take any role for nothing."""
    overlap: bool
    """On GPUs of the trainer."""

    @property
    def tp(self) -> int:
        """GPUs of the worker."""
        return len(self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """What a plan may choose from, and what it has no choice about; each in order of slots, blocks in order of nodes."""

    serving: tuple[Worker, ...]
    """Serve, and may stay."""
    asleep: tuple[Worker, ...]
    """Sleep, and may be woken."""
    resting: tuple[Worker, ...]
    """Dedicated ones that sleep where new ones may start; those must then end."""
    forced: tuple[Worker, ...]
    """Sit on GPUs that the target may not use: serve, or are dedicated and sleep."""
    options: tuple[Seat, ...]
    """Seats of the tensor parallelisms that were asked for."""


def is_overlap(state: FleetState, worker: Worker) -> bool:
    """Whether a worker sits on GPUs of the trainer."""
    return any(state.gpus[gpu].owner is GpuOwner.TRAINING for gpu in worker.gpus)


def untouchable(worker: Worker) -> bool:
    """Whether no plan may name a worker: it is on its way in or out, or it trains."""
    return worker.activity is Activity.TRANSITIONING or worker.role is Role.TRAINING


def seats_of(
    state: FleetState,
    usable: frozenset[GpuId],
    lendable: frozenset[GpuId],
    tps: Collection[int],
    gone: frozenset[GpuId] = frozenset(),
) -> Seats:
    """All seats of workers with one of these tensor parallelisms, and the workers that must go.

    `gone`: GPUs that are given back, without which blocks are counted.
    """
    allowed = usable | lendable
    taken = {gpu for worker in state.workers.values() if _holds(worker) for gpu in worker.gpus}
    ours = [state.workers[slot] for slot in sorted(state.workers) if not untouchable(state.workers[slot])]
    inside = [worker for worker in ours if allowed.issuperset(worker.gpus)]
    serving = tuple(worker for worker in inside if worker.activity is Activity.ACTIVE)
    sleepers = [worker for worker in inside if worker.activity is Activity.INACTIVE]
    asleep = tuple(worker for worker in sleepers if taken.isdisjoint(worker.gpus))
    forced = tuple(
        worker
        for worker in ours
        if not allowed.issuperset(worker.gpus) and (worker.activity is Activity.ACTIVE or not is_overlap(state, worker))
    )
    workers = [*_worker_seats(state, serving, SeatKind.KEEP), *_worker_seats(state, asleep, SeatKind.WAKE)]
    sat_on = {frozenset(worker.gpus) for worker in inside}
    return Seats(
        serving=serving,
        asleep=asleep,
        resting=tuple(worker for worker in sleepers if not is_overlap(state, worker)),
        forced=forced,
        options=tuple(
            seat for seat in [*workers, *_blocks(state, usable - taken, sat_on, tps, gone)] if seat.tp in tps
        ),
    )


def _holds(worker: Worker) -> bool:
    """Whether nobody else may come to a worker's GPUs, whatever a plan does."""
    return worker.activity is Activity.TRANSITIONING or (
        worker.role is Role.TRAINING and worker.activity is Activity.ACTIVE
    )


def _worker_seats(state: FleetState, workers: Collection[Worker], kind: SeatKind) -> Iterator[Seat]:
    for worker in workers:
        role = worker.role if kind is SeatKind.KEEP else None
        yield Seat(kind=kind, gpus=worker.gpus, worker=worker.id, role=role, overlap=is_overlap(state, worker))


def _blocks(
    state: FleetState,
    free: frozenset[GpuId],
    sat_on: Collection[frozenset[GpuId]],
    tps: Collection[int],
    gone: frozenset[GpuId],
) -> Iterator[Seat]:
    slots: dict[frozenset[GpuId], WorkerId] = {}
    for slot in sorted(state.slots.keys() - state.workers.keys()):
        slots.setdefault(frozenset(state.slots[slot]), slot)
    blocks = {
        frozenset(gpus): gpus
        for node in by_node(state, gone).values()
        for tp in sorted(tps)
        for gpus in aligned(node, tp)
    }
    for block in slots:
        blocks.setdefault(block, ())
    for block, gpus in blocks.items():
        if block <= free and block not in sat_on:
            had = slots.get(block)
            gpus = gpus if had is None else state.slots[had]
            yield Seat(kind=SeatKind.START, gpus=gpus, worker=had, role=None, overlap=False)


def aligned(node: tuple[GpuId, ...], tp: int) -> Iterator[tuple[GpuId, ...]]:
    """The blocks that a node's GPUs are cut into."""
    return (node[first : first + tp] for first in range(0, len(node) - tp + 1, tp))


def by_node(state: FleetState, gone: frozenset[GpuId]) -> Mapping[NodeId, tuple[GpuId, ...]]:
    """Nodes in order -> their GPUs in order of id, without those that are given back."""
    nodes: dict[NodeId, list[GpuId]] = {}
    for gpu in sorted(state.gpus.keys() - gone):
        nodes.setdefault(state.gpus[gpu].node, []).append(gpu)
    return {node: tuple(nodes[node]) for node in sorted(nodes)}
