"""Which seats a target takes, at the least total cost of getting there.

Exact, in two goes:

1. *By class*: seats alike in kind, zone, tensor parallelism and role are counted, GPUs forgotten. That is a flow, so its
   linear program has whole numbers, and it costs no more than any plan. Most targets can be seated so, and then nothing
   cheaper exists.
2. *By seat*, where they cannot: at most one worker per GPU. A linear program, and an integer one (branch and bound)
   where that leaves fractions.

A linear program ends by itself; branch and bound is bounded by nodes, never by time, so that a decision depends on no clock and
no machine. Where the bound is met nothing is taken, because the cheapest seats are not known.

Costs count in whole milliseconds; of equal ones the fewest changes win, and within a class the lowest slots.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from pearl.core.distribution import Floats
from pearl.core.platform import TransitionCosts
from pearl.core.seats import Seat, SeatKind, Seats
from pearl.core.state import Role
from pearl.records.ids import GpuId, WorkerId

Demand = Mapping[tuple[Role, int], int]
"""(role, tensor parallelism) -> workers, > 0."""

_Column = tuple[Seat, ...]
"""Seats that can stand in for each other, the first ones first."""

_WHOLE = 1e-6
"""How far from whole numbers a solution may be: the solver's own tolerance."""
_INFEASIBLE = 2
"""What scipy's `milp` answers where nothing satisfies the rows."""
MOST_NODES = 1_000
"""Of branch and bound. Source: one was the most in thousands of fleets made at random, of 4 to 10,000 GPUs; whole programs took
0.03 s at most there."""


class Unseated(enum.Enum):
    """Why there are no seats."""

    NO_ROOM = "no_room"
    """No seats meet the demand."""
    UNDECIDED = "undecided"
    """The solver came to its bound before it knew the cheapest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Seats that meet a demand."""

    seats: tuple[Seat, ...]
    """As many as workers were asked for."""
    ended: frozenset[WorkerId]
    """Sleeping workers that must end because new ones start on their GPUs."""


def arrange(seats: Seats, demand: Demand, borrowed: int, costs: TransitionCosts) -> Arrangement | Unseated:
    """The cheapest seats for a demand, `borrowed` of them in the overlap zone."""
    if not demand:
        return Arrangement(seats=(), ended=frozenset())
    columns = _columns(seats.options, frozenset())
    counts: list[int] | Unseated | None = _grown(columns, demand, borrowed, costs)
    if counts is None:
        counts = _solve(_by_class(columns, demand, borrowed, costs))
    if isinstance(counts, Unseated):
        return counts
    seated = _seated(seats, columns, counts)
    if seated is not None:
        return Arrangement(seats=seated, ended=frozenset())
    columns = _columns(seats.options, _contested(seats))
    counts = _solve(_by_seat(seats, columns, demand, borrowed, costs))
    if isinstance(counts, Unseated):
        return counts
    ended = counts[len(counts) - len(seats.resting) :]
    return Arrangement(
        seats=tuple(seat for column, count in zip(columns, counts, strict=False) for seat in column[:count]),
        ended=frozenset(worker.id for worker, ends in zip(seats.resting, ended, strict=True) if ends),
    )


def _grown(columns: Sequence[_Column], demand: Demand, borrowed: int, costs: TransitionCosts) -> list[int] | None:
    """Seats taken of each column where all who serve can stay as they are: the missing ones, the cheapest first.

    Nothing is cheaper then, and nothing needs to be solved. None where somebody has to go or change, and where seats that cost
    the same compete.
    """
    price = _Price(costs, 0)
    missing = dict(demand)
    counts = [0] * len(columns)
    for place, column in enumerate(columns):
        if column[0].kind is SeatKind.KEEP:
            role, tp = column[0].role, column[0].tp
            assert role is not None
            counts[place] = len(column)
            missing[role, tp] = missing.get((role, tp), 0) - len(column)
            borrowed -= len(column) if column[0].overlap else 0
    if borrowed < 0 or min(missing.values()) < 0:
        return None
    lacking = Counter[int]()
    for (_, tp), count in missing.items():
        lacking[tp] += count
    open_ = [place for place in range(len(columns)) if not counts[place]]
    sleeping = [place for place in open_ if columns[place][0].overlap]
    others = [place for place in open_ if not columns[place][0].overlap]
    prices = {columns[place][0].kind: price.seat(columns[place][0]) for place in others}
    if (borrowed and len(sleeping) != 1) or len(set(prices.values())) < len(prices):
        return None
    for place in sleeping:
        counts[place] = min(borrowed, len(columns[place]), lacking[columns[place][0].tp])
        lacking[columns[place][0].tp] -= counts[place]
        borrowed -= counts[place]
    for place in sorted(others, key=lambda place: price.seat(columns[place][0])):
        counts[place] = min(lacking[columns[place][0].tp], len(columns[place]))
        lacking[columns[place][0].tp] -= counts[place]
    return counts if not borrowed and not any(lacking.values()) else None


# -- the programs ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Program:
    """Least `weights` x, 0 <= x <= `most`, under rows of low <= a x <= high."""

    weights: list[float]
    most: list[int]
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, variable, coefficient)."""
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def row(self, low: float, high: float, plus: Iterable[int], minus: Iterable[int] = ()) -> None:
        """Bound the sum of some variables less that of others."""
        at = len(self.low)
        self.entries += [(at, variable, 1) for variable in plus]
        self.entries += [(at, variable, -1) for variable in minus]
        self.low.append(low)
        self.high.append(high)


def _by_class(columns: Sequence[_Column], demand: Demand, borrowed: int, costs: TransitionCosts) -> _Program:
    """Variables: seats taken of each column; then workers that keep their role, for each part of the demand."""
    price = _Price(costs, sum(len(column) for column in columns))
    kinds = [column[0] for column in columns]
    program = _Program(
        weights=[price.seat(seat) for seat in kinds] + [price.same_role for _ in demand],
        most=[len(column) for column in columns] + list(demand.values()),
    )
    for tp in sorted({tp for _, tp in demand}):
        wanted = sum(count for (_, each), count in demand.items() if each == tp)
        program.row(wanted, wanted, (i for i, seat in enumerate(kinds) if seat.tp == tp))
    program.row(borrowed, borrowed, (i for i, seat in enumerate(kinds) if seat.overlap))
    for same, (role, tp) in enumerate(demand, start=len(columns)):
        alike = [i for i, seat in enumerate(kinds) if seat.role is role and seat.tp == tp]
        program.row(-np.inf, 0, [same], alike)
    return program


def _by_seat(
    seats: Seats, columns: Sequence[_Column], demand: Demand, borrowed: int, costs: TransitionCosts
) -> _Program:
    """The same, one worker per GPU; then, for each resting worker, whether it ends."""
    program = _by_class(columns, demand, borrowed, costs)
    price = _Price(costs, sum(len(column) for column in columns))
    over: dict[GpuId, list[int]] = {}
    for i, column in enumerate(columns):
        if len(column) == 1:
            for gpu in column[0].gpus:
                over.setdefault(gpu, []).append(i)
    for taking in over.values():
        if len(taking) > 1:
            program.row(-np.inf, 1, taking)
    for worker in seats.resting:
        end = len(program.weights)
        program.weights.append(price.end)
        program.most.append(1)
        for gpu in worker.gpus:
            starts = [i for i in over.get(gpu, ()) if columns[i][0].kind is SeatKind.START]
            program.row(-np.inf, 0, starts, [end])
    return program


class _Price:
    """What seats weigh: milliseconds, and for equal ones a share of one for each change, which never adds up to one.

    Workers that serve are first all thought gone, which is the same for every plan, so who stays is a saving.
    """

    def __init__(self, costs: TransitionCosts, options: int) -> None:
        change = 1 / (3 * options + 1)  # each option changes at most itself, a role and a sleeper
        self._role = _ms(costs.role_change_s)
        self._stop = _ms(costs.stop_s)
        self._return = _ms(costs.return_s)
        self._wake = _ms(costs.activate_s) + change
        self._start = _ms(costs.start_s) + change
        self.same_role = -self._role - change
        self.end = self._stop + change

    def seat(self, seat: Seat) -> float:
        """Of one more worker in a seat, in a role other than its own."""
        match seat.kind:
            case SeatKind.KEEP:
                return self._role - (self._return if seat.overlap else self._stop)
            case SeatKind.WAKE:
                return self._wake
            case _:
                return self._start


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _solve(program: _Program) -> list[int] | Unseated:
    """Whole numbers at the minimum."""
    found = _minimum(program, whole=False)
    if not isinstance(found, Unseated) and np.abs(found - np.rint(found)).max() > _WHOLE:
        found = _minimum(program, whole=True)
    return found if isinstance(found, Unseated) else [int(count) for count in np.rint(found)]


def _minimum(program: _Program, *, whole: bool) -> Floats | Unseated:
    rows, variables, coefficients = zip(*program.entries, strict=True)
    shape = (len(program.low), len(program.weights))
    result = milp(
        program.weights,
        integrality=np.full(shape[1], int(whole)),
        bounds=Bounds(0, program.most),
        constraints=LinearConstraint(
            csr_array((coefficients, (rows, variables)), shape=shape), program.low, program.high
        ),
        options={"mip_rel_gap": 0.0, "node_limit": MOST_NODES},
    )
    # At the bound there may be a solution, which satisfies the rows and need not be the cheapest.
    if not result.success:
        return Unseated.NO_ROOM if result.status == _INFEASIBLE else Unseated.UNDECIDED
    return np.asarray(result.x, dtype=np.float64)


# -- columns, and seating them --------------------------------------------------------------------------------------

_Kin = tuple[SeatKind, bool, int, Role | None]


def _kin(seat: Seat) -> _Kin:
    return seat.kind, seat.overlap, seat.tp, seat.role


def _columns(options: Iterable[Seat], contested: Collection[GpuId]) -> list[_Column]:
    """Seats of a class together, those on contested GPUs each on its own."""
    classes: dict[_Kin, list[Seat]] = {}
    alone: list[_Column] = []
    for seat in options:
        if any(gpu in contested for gpu in seat.gpus):
            alone.append((seat,))
        else:
            classes.setdefault(_kin(seat), []).append(seat)
    return [*map(tuple, classes.values()), *alone]


def _contested(seats: Seats) -> frozenset[GpuId]:
    """GPUs that more than one seat would use, or a new worker and one that rests."""
    uses = Counter(gpu for seat in seats.options for gpu in seat.gpus)
    resting = {gpu for worker in seats.resting for gpu in worker.gpus}
    starts = {gpu for seat in seats.options if seat.kind is SeatKind.START for gpu in seat.gpus}
    return frozenset(gpu for gpu, count in uses.items() if count > 1) | (resting & starts)


def _seated(seats: Seats, columns: Sequence[_Column], counts: Sequence[int]) -> tuple[Seat, ...] | None:
    """So many seats of each class, no two on one GPU; None where taking what looks best, one by one, fails."""
    wanted = [(_kin(column[0]), column, count) for column, count in zip(columns, counts, strict=False)]
    hall = _Hall(seats, {kin: len(column) - count for kin, column, count in wanted})
    taken: list[Seat] = []
    for kin, column, count in sorted(wanted, key=lambda each: -each[0][2]):
        if kin[0] is not SeatKind.KEEP:
            chosen = hall.take(column, count)
            if len(chosen) < count:
                return None
            taken += chosen
    for kin, column, count in wanted:
        if kin[0] is SeatKind.KEEP:
            taken += [seat for seat in column if seat.worker not in hall.gone][:count]
    return tuple(taken)


class _Hall:
    """Who sits where while newcomers are seated, the large ones first, each where it displaces the fewest."""

    def __init__(self, seats: Seats, spare: dict[_Kin, int]) -> None:
        self.gone: set[WorkerId] = set()
        """Workers displaced."""
        self._spare = spare
        """Workers of each class that may be; any number of those that nobody asked for."""
        self._used: set[GpuId] = set()
        self._resting = {gpu for worker in seats.resting for gpu in worker.gpus}
        self._holder = {gpu: worker.id for worker in seats.serving for gpu in worker.gpus}
        self._kin = {seat.worker: _kin(seat) for seat in seats.options if seat.kind is SeatKind.KEEP}

    def take(self, options: Sequence[Seat], count: int) -> list[Seat]:
        """Seat so many, if so many can be."""
        chosen: list[Seat] = []
        for seat in sorted(options, key=lambda seat: len(self._holders(seat))):
            if len(chosen) == count:
                break
            if self._fits(seat):
                chosen.append(seat)
                self._used.update(seat.gpus)
                displaced = self._holders(seat) - self.gone
                self.gone |= displaced
                for kin in map(self._kin.get, displaced):
                    if kin is not None:
                        self._spare[kin] -= 1
        return chosen

    def _fits(self, seat: Seat) -> bool:
        if not self._used.isdisjoint(seat.gpus):
            return False
        if seat.kind is SeatKind.START and not self._resting.isdisjoint(seat.gpus):
            return False  # ending a worker that rests costs something, which counts by class do not know
        wanted = Counter(self._kin[worker] for worker in self._holders(seat) - self.gone if worker in self._kin)
        return all(count <= self._spare[kin] for kin, count in wanted.items())

    def _holders(self, seat: Seat) -> set[WorkerId]:
        return {self._holder[gpu] for gpu in seat.gpus if gpu in self._holder}
