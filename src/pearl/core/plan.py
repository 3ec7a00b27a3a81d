"""From the fleet as it is to a target shape, at the least total cost of getting there.

The laws:

- *target*: afterwards exactly the target's workers serve, by role and tensor parallelism, and `borrowed` of them sit on
  the trainer's GPUs. Which ones is free, and chosen for the least cost (`arrange`); of equal costs for the fewest
  changes, then the lowest slots.
- *bound* (the paper, §4.4): with W and W' the workers that serve before and after, a plan changes D_worker = |W' \\ W| +
  |W \\ W'| workers and D_role = sum over roles of [n_src - min(n_src, n_dst)] roles, n_src over W and W', n_dst over all
  of W'. Fewer is impossible for that W'; with several tensor parallelisms each counts for itself.
- *hands off*: a worker that is draining or initialising, or that trains, is named by no action, and does not count.
- a dedicated worker that is not needed ends; an overlap worker is put to sleep, never ended, and never started here.
- a target without workers is a full stop: all that serve go.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pearl.core.actions import ActionGroup, perform
from pearl.core.arrange import MOST_NODES, Arrangement, Unseated, arrange
from pearl.core.makespan import SERVING_ROLES
from pearl.core.platform import TransitionCosts
from pearl.core.schedule import Arrival, Changes, schedule
from pearl.core.seats import Seat, SeatKind, Seats, is_overlap, seats_of
from pearl.core.shape import Shape
from pearl.core.state import Activity, FleetState, GpuOwner, Role, StateRefusal, Worker
from pearl.errors import ShapeError
from pearl.records.ids import GpuId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A target, and the GPUs that it may use."""

    shape: Shape
    """Over all serving workers, borrowed ones included; without pools a full stop."""
    borrowed: int = 0
    """How many of them are overlap workers, 0 .. workers of the shape."""
    usable: frozenset[GpuId]
    """GPUs for dedicated workers: reserved and external ones that are not about to leave."""
    lendable: frozenset[GpuId] = frozenset()
    """GPUs of the trainer that overlap workers may use now."""
    leaving: frozenset[GpuId] | None = None
    """External GPUs to give back once nothing sits on them; None: all that are not usable."""

    def __post_init__(self) -> None:
        for pool in self.shape.pools:
            if pool.role not in SERVING_ROLES or pool.workers < 1 or pool.tp < 1:
                raise ShapeError(
                    f"plan: shape: got {pool.workers} {pool.role.value} workers of tp {pool.tp}, want at least one that "
                    "serves, of tp >= 1, in each pool"
                )
        if not 0 <= self.borrowed <= self.shape.workers:
            raise ShapeError(f"plan: borrowed: got {self.borrowed}, want 0..{self.shape.workers}, the shape's workers")

    @property
    def demand(self) -> Mapping[tuple[Role, int], int]:
        """(role, tensor parallelism) -> workers."""
        demand: Counter[tuple[Role, int]] = Counter()
        for pool in self.shape.pools:
            demand[pool.role, pool.tp] += pool.workers
        return MappingProxyType(demand)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What changes, and in which steps; workers in order of slots."""

    kept: tuple[WorkerId, ...]
    """Go on as they are."""
    reassigned: Mapping[WorkerId, Role]
    """Go on in another role."""
    woken: Mapping[WorkerId, Role]
    """Slept."""
    added: tuple[Arrival, ...]
    """New ones, in slots that were there before or the next free numbers."""
    removed: tuple[WorkerId, ...]
    """Dedicated workers that end, those that sleep on GPUs that are needed or lost included."""
    returned: tuple[WorkerId, ...]
    """Overlap workers put to sleep."""
    groups: tuple[ActionGroup, ...]
    """In order; empty where nothing changes."""
    cost_s: float
    """Sum over changes; the least that any plan to this target costs, to the millisecond per change."""
    d_worker: int
    """Workers that serve before or after, not both."""
    d_role: int
    """Workers that serve before and after, in another role."""


class PlanRefusalReason(enum.Enum):
    """Why there is no plan."""

    WRONG_ZONE = "wrong_zone"
    """`usable` or `lendable` names a GPU that is not part of the job, or of the other zone."""
    TOO_FEW_GPUS = "too_few_gpus"
    """The workers that may stay and the free GPUs are fewer than the target wants."""
    TOO_FEW_OVERLAP = "too_few_overlap"
    """More are to be borrowed than there are overlap workers that may serve now."""
    NO_BLOCK = "no_block"
    """No worker has, and no node has free, so many GPUs as one worker of the target wants."""
    NO_ROOM = "no_room"
    """There are GPUs enough, but no way to seat all workers on them."""
    UNDECIDED = "undecided"
    """Which seats are the cheapest was not found within the bounds of the solver; there may be a way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefusal:
    """A target that cannot be reached."""

    reason: PlanRefusalReason
    detail: str


def plan(state: FleetState, request: PlanRequest, costs: TransitionCosts) -> Plan | PlanRefusal:
    """The cheapest way to a target, or why there is none."""
    stray = _stray(state, request)
    if stray is not None:
        return stray
    seats = seats_of(
        state,
        request.usable,
        request.lendable,
        {tp for _, tp in request.demand},
        frozenset() if request.leaving is None else request.leaving,
    )
    short = _short(request, seats)
    if short is not None:
        return short
    arrangement = arrange(seats, request.demand, request.borrowed, costs)
    if isinstance(arrangement, Unseated):
        return _unseated(request, arrangement)
    return _plan(state, request, costs, seats, arrangement)


def apply(state: FleetState, change: Plan) -> FleetState | StateRefusal:
    """The state when all steps of a plan have succeeded; what the state refused, where it is no longer the plan's."""
    return perform(state, (step.action for group in change.groups for step in group.steps))


# -- refusals -------------------------------------------------------------------------------------------------------


def _stray(state: FleetState, request: PlanRequest) -> PlanRefusal | None:
    for name, gpus, training in (("usable", request.usable, False), ("lendable", request.lendable, True)):
        for gpu in sorted(gpus):
            if gpu not in state.gpus:
                return PlanRefusal(
                    reason=PlanRefusalReason.WRONG_ZONE, detail=f"{name}: GPU {gpu} is not part of the job"
                )
            owner = state.gpus[gpu].owner
            if (owner is GpuOwner.TRAINING) is not training:
                return PlanRefusal(
                    reason=PlanRefusalReason.WRONG_ZONE,
                    detail=f"{name}: GPU {gpu} is {owner.value}, want {'training' if training else 'reserved or external'}",
                )
    return None


def _short(request: PlanRequest, seats: Seats) -> PlanRefusal | None:
    """What counting alone shows to be missing."""
    wanted: Counter[int] = Counter()
    for (_, tp), count in request.demand.items():
        wanted[tp] += count
    there = Counter(seat.tp for seat in seats.options)
    overlap = Counter(seat.tp for seat in seats.options if seat.overlap)
    can_borrow = sum(min(count, overlap[tp]) for tp, count in wanted.items())
    gpus = len({gpu for seat in seats.options for gpu in seat.gpus})
    for tp in sorted(wanted):
        if not there[tp]:
            return PlanRefusal(
                reason=PlanRefusalReason.NO_BLOCK, detail=f"tp {tp}: no worker has and no node has free {tp} GPUs"
            )
    if can_borrow < request.borrowed:
        return PlanRefusal(
            reason=PlanRefusalReason.TOO_FEW_OVERLAP,
            detail=f"{request.shape}: got {request.borrowed} to borrow, want at most {can_borrow}",
        )
    if gpus < request.shape.gpus:
        return PlanRefusal(
            reason=PlanRefusalReason.TOO_FEW_GPUS,
            detail=f"{request.shape}: wants {request.shape.gpus} GPUs, there are {gpus}",
        )
    return None


def _unseated(request: PlanRequest, why: Unseated) -> PlanRefusal:
    reason, detail = {
        Unseated.NO_ROOM: (PlanRefusalReason.NO_ROOM, "no way to seat all workers on the GPUs"),
        Unseated.UNDECIDED: (
            PlanRefusalReason.UNDECIDED,
            f"the cheapest seats were not found within {MOST_NODES:,} nodes",
        ),
    }[why]
    return PlanRefusal(reason=reason, detail=f"{request.shape} with {request.borrowed} borrowed: {detail}")


# -- from seats to changes ------------------------------------------------------------------------------------------


def _plan(
    state: FleetState, request: PlanRequest, costs: TransitionCosts, seats: Seats, arrangement: Arrangement
) -> Plan:
    named = _named(state, arrangement.seats)
    roles = _roles(request.demand, named)
    stays = {slot: seat for slot, seat in named.items() if seat.kind is SeatKind.KEEP}
    changes = _changes(state, request, seats, arrangement, named, roles)
    arrivals = changes.arrivals
    before = Counter((worker.role, len(worker.gpus)) for worker in (state.workers[slot] for slot in stays))
    removed = sorted([*changes.vacated, *changes.removed], key=lambda worker: worker.id)
    ending = [worker for worker in (*removed, *changes.returned) if worker.activity is Activity.ACTIVE]
    woken = {each.worker: each.role for each in arrivals if each.wakes}
    added = tuple(each for each in arrivals if not each.wakes)
    return Plan(
        kept=tuple(slot for slot in stays if slot not in changes.reassigned),
        reassigned=changes.reassigned,
        woken=MappingProxyType(woken),
        added=added,
        removed=tuple(worker.id for worker in removed),
        returned=tuple(worker.id for worker in changes.returned),
        groups=schedule(state, changes, Counter(roles.values())),
        cost_s=costs.role_change_s * len(changes.reassigned)
        + costs.activate_s * len(woken)
        + costs.start_s * len(added)
        + costs.stop_s * len(removed)
        + costs.return_s * len(changes.returned),
        d_worker=len(arrivals) + len(ending),
        d_role=sum(count - min(count, request.demand.get(pool, 0)) for pool, count in before.items()),
    )


def _named(state: FleetState, seats: Iterable[Seat]) -> dict[WorkerId, Seat]:
    """Seats by slot, ascending; blocks that never had one get the next numbers, in order of their GPUs."""
    named = {seat.worker: seat for seat in seats if seat.worker is not None}
    fresh = sorted((seat for seat in seats if seat.worker is None), key=lambda seat: seat.gpus)
    first = max(state.slots, default=-1) + 1
    named |= {WorkerId(slot): seat for slot, seat in enumerate(fresh, start=first)}
    return {slot: named[slot] for slot in sorted(named)}


def _roles(demand: Mapping[tuple[Role, int], int], named: Mapping[WorkerId, Seat]) -> dict[WorkerId, Role]:
    """Role of each: the lowest slots keep theirs, as many as the target has; the others fill what is left."""
    left = dict(demand)
    roles: dict[WorkerId, Role] = {}
    others: list[WorkerId] = []
    for slot, seat in named.items():
        if seat.role is not None and left.get((seat.role, seat.tp), 0) > 0:
            left[seat.role, seat.tp] -= 1
            roles[slot] = seat.role
        else:
            others.append(slot)
    open_roles = {
        tp: [role for (role, each), count in left.items() if each == tp for _ in range(count)] for _, tp in left
    }
    for slot in reversed(others):
        roles[slot] = open_roles[named[slot].tp].pop()
    return roles


def _changes(
    state: FleetState,
    request: PlanRequest,
    seats: Seats,
    arrangement: Arrangement,
    named: Mapping[WorkerId, Seat],
    roles: Mapping[WorkerId, Role],
) -> Changes:
    going = [worker for worker in seats.serving if worker.id not in named]
    returned = [worker for worker in (*going, *seats.forced) if is_overlap(state, worker)]
    ended = [worker for worker in seats.resting if worker.id in arrangement.ended]
    vacated = [worker for worker in seats.forced if not is_overlap(state, worker)]
    lent = {gpu for seat in named.values() for gpu in seat.gpus} | _gpus(
        worker
        for worker in state.workers.values()
        if worker.activity is Activity.TRANSITIONING and worker.role is not Role.TRAINING
    )
    gone = {worker.id for worker in vacated}
    stay = _gpus(worker for worker in state.workers.values() if worker.id not in gone)
    return Changes(
        returned=_by_slot(returned),
        to_training=_owned(state, _gpus(returned) - lent, GpuOwner.TRAINING),
        vacated=_by_slot(vacated),
        to_source=_owned(state, _left(state, request) - stay, GpuOwner.EXTERNAL),
        removed=_by_slot([*(worker for worker in going if not is_overlap(state, worker)), *ended]),
        reassigned=MappingProxyType(
            {slot: roles[slot] for slot, seat in named.items() if seat.role not in (None, roles[slot])}
        ),
        arrivals=tuple(
            Arrival(worker=slot, gpus=seat.gpus, role=roles[slot], wakes=seat.kind is SeatKind.WAKE)
            for slot, seat in named.items()
            if seat.kind is not SeatKind.KEEP
        ),
    )


def _left(state: FleetState, request: PlanRequest) -> frozenset[GpuId]:
    unusable = frozenset(state.gpus) - request.usable
    return unusable if request.leaving is None else unusable & request.leaving


def _by_slot(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    return tuple(sorted(workers, key=lambda worker: worker.id))


def _gpus(workers: Iterable[Worker]) -> set[GpuId]:
    return {gpu for worker in workers for gpu in worker.gpus}


def _owned(state: FleetState, gpus: Iterable[GpuId], owner: GpuOwner) -> tuple[GpuId, ...]:
    return tuple(sorted(gpu for gpu in gpus if state.gpus[gpu].owner is owner))
