"""The choice of a shape for a budget: enumerate what fits, predict all of it, take the fastest.

Law: what is left to choose on a budget is mode, tensor parallelism per role, ratio, and append-prefill (`core.lines`). The time
along a line falls and then rises, so lines are searched coarse to fine: some places of each, the fewer the more lines there are,
and then, on the best lines, up to `POINTS` per round between the neighbours of the best place so far; where hybrids are best,
then beside more numbers of colocated workers in the same way.

Ties go to the shape that changes least from the one that serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pearl.core.budget import Budget
from pearl.core.lines import POINTS, Line, Space, lines_of, spread
from pearl.core.makespan import SERVING_ROLES, Candidates, Forecast, Infeasible, Ints, Target
from pearl.core.platform import Platform
from pearl.core.shape import Shape
from pearl.core.state import Role

FEW = 200
"""Shapes that the first round looks at, about."""
FEWEST = 6
"""Of each line, at least."""
LINES = 8
"""Best lines of the first round that are refined."""
NOWHERE: Ints = np.zeros(0, dtype=np.int64)
TIE = 1e-3
"""Relative difference up to which two shapes are equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A shape that was considered."""

    target: Target
    borrowed: int
    """Overlap workers among its workers."""
    close_s: float
    """Predicted seconds until the batch closes; inf where infeasible."""
    error_s: float
    infeasible: Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The outcome of a search."""

    best: Option | None
    """None: nothing that fits can serve."""
    considered: tuple[Option, ...]
    """The best of each line, fastest first."""
    evaluated: int
    """Shapes that were predicted."""


def choose(
    forecast: Forecast,
    platform: Platform,
    budget: Budget,
    space: Space,
    *,
    borrowed: int = 0,
    incumbent: Target | None = None,
) -> Choice:
    """The best shape with so many borrowed workers; `incumbent` is what serves now."""
    return search(forecast, lines_of(platform, budget, space, borrowed), space, incumbent)


def search(forecast: Forecast, lines: Sequence[Line], space: Space, incumbent: Target | None) -> Choice:
    """The best shape on some lines."""
    if not lines:
        return Choice(best=None, considered=(), evaluated=0)
    found = _Found()
    if space.exhaustive:
        found.add(forecast, lines, [np.arange(line.length) for line in lines])
    else:
        found.add(forecast, lines, _first_places(lines))
        found.refine(forecast, lines)
        while between := _between(lines, lines[found.line[found.ranked[0]]]):
            lines = [*lines, *between]
            places = _first_places(between)
            found.add(forecast, lines, [NOWHERE] * (len(lines) - len(between)) + places)
            found.refine(forecast, lines)
    options = found.best_of_lines(lines)
    return Choice(
        best=_least_change(found.near(lines), incumbent), considered=tuple(options), evaluated=found.evaluated
    )


def first_round(searches: Sequence[Sequence[Line]]) -> Candidates:
    """What searches on these lines ask for at first; at least one line in all."""
    lines = [line for each in searches for line in each]
    places = [place for each in searches for place in _first_places(each)]
    return _candidates(lines, places, np.repeat(np.arange(len(lines)), [len(each) for each in places]))


def _first_places(lines: Sequence[Line]) -> list[Ints]:
    """Places of each line that are looked at in the first round: the fewer of each, the more lines there are."""
    points = min(POINTS, max(FEWEST, FEW // len(lines))) if lines else POINTS
    return [spread(0, line.length - 1, points) for line in lines]


def _between(lines: Sequence[Line], best: Line) -> list[Line]:
    """Hybrids like the best line's, with numbers of colocated workers between its own and the next ones that were looked at."""
    *pair, colocated = best.first
    if not (colocated and best.decode_workers):
        return []
    known = sorted(line.first[2] for line in lines if line.like(best))
    at = known.index(colocated)
    low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
    workers = sum(pair)
    return [
        replace(best, first=(1, workers + colocated - number - 1, number), length=workers + colocated - number - 1)
        for number in spread(low, high).tolist()
        if number not in known
    ]


class _Found:
    """What was predicted so far, flat over lines."""

    def __init__(self) -> None:
        self.line = np.zeros(0, dtype=np.int64)
        self.place = np.zeros(0, dtype=np.int64)
        self.close_s = np.zeros(0)
        self.error_s = np.zeros(0)
        self.infeasible = np.zeros(0, dtype=np.int64)
        self.ranked: Sequence[int] = ()
        """Index of the best place of each line, fastest line first; ties to the first line."""

    @property
    def evaluated(self) -> int:
        return len(self.line)

    def add(self, forecast: Forecast, lines: Sequence[Line], places: Sequence[Ints]) -> None:
        """Predict places of lines, side by side."""
        of = np.repeat(np.arange(len(lines)), [len(each) for each in places])
        predicted = forecast(_candidates(lines, places, of))
        self.line = np.concatenate((self.line, of))
        self.place = np.concatenate((self.place, *places))
        self.close_s = np.concatenate((self.close_s, predicted.close_s))
        self.error_s = np.concatenate((self.error_s, predicted.error_s))
        self.infeasible = np.concatenate((self.infeasible, predicted.infeasible))
        order = np.lexsort((self.place, self.line, self.close_s))
        best: dict[int, int] = {}
        for index, line in zip(order.tolist(), self.line[order].tolist(), strict=True):
            best.setdefault(line, index)
        self.ranked = list(best.values())

    def refine(self, forecast: Forecast, lines: Sequence[Line]) -> None:
        """Close in on the best place of the best lines, round by round, until its neighbours are known."""
        while closer := self._closer(lines):
            self.add(forecast, lines, [closer.get(at, NOWHERE) for at in range(len(lines))])

    def _closer(self, lines: Sequence[Line]) -> dict[int, Ints]:
        """Lines to look at again -> the places."""
        seen = np.bincount(self.line, minlength=len(lines)).tolist()
        best = [(int(self.line[index]), int(self.place[index])) for index in self.ranked]
        longer = [(line, place) for line, place in best if lines[line].length > seen[line]]
        around = {line: self._around(line, place) for line, place in longer[:LINES]}
        return {line: places for line, places in around.items() if len(places)}

    def best_of_lines(self, lines: Sequence[Line]) -> list[Option]:
        """The fastest of each line, fastest first."""
        return [self._option(lines, index) for index in self.ranked]

    def near(self, lines: Sequence[Line]) -> list[Option]:
        """All as good as the best, or nothing when nothing is feasible."""
        best = self.close_s.min()
        if not np.isfinite(best):
            return []
        return [self._option(lines, int(at)) for at in np.flatnonzero(self.close_s <= best * (1 + TIE))]

    def _around(self, line: int, place: int) -> Ints:
        """Unknown places between the known neighbours of a place."""
        known = np.sort(self.place[self.line == line])
        at = int(np.searchsorted(known, place))
        low = known[max(at - 1, 0)]
        high = known[min(at + 1, len(known) - 1)]
        return np.setdiff1d(spread(int(low), int(high)), known)

    def _option(self, lines: Sequence[Line], index: int) -> Option:
        line = lines[self.line[index]]
        return Option(
            target=line.target(int(self.place[index])),
            borrowed=line.borrowed,
            close_s=float(self.close_s[index]),
            error_s=float(self.error_s[index]),
            infeasible=Infeasible(int(self.infeasible[index])),
        )


def _candidates(lines: Sequence[Line], places: Sequence[Ints], of: Ints) -> Candidates:
    columns = np.array([line.columns for line in lines])[of].T
    first, step, tps, (append_tokens, second, second_tp) = np.split(columns, (3, 6, 9))
    workers = first + np.concatenate(places) * step
    return Candidates(
        workers=dict(zip(SERVING_ROLES, workers, strict=True)),
        tp=dict(zip(SERVING_ROLES, tps, strict=True)),
        append_tokens=append_tokens,
        second=second,
        second_tp=second_tp,
    )


def _least_change(options: Sequence[Option], incumbent: Target | None) -> Option | None:
    """Of equally good ones the one that changes least, append-prefill included; then without it, colocated, the fastest."""
    if not options:
        return None

    def changes(option: Option) -> tuple[int, bool, int, bool, float]:
        moved = 0 if incumbent is None else moves(incumbent.shape, option.target.shape).all
        rebound = incumbent is not None and incumbent.append_tokens != option.target.append_tokens
        apart = any(pool.role is Role.PREFILL for pool in option.target.shape.pools)
        return moved, rebound, option.target.append_tokens, apart, option.close_s

    return min(options, key=changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How many workers a change of shape touches, at least."""

    added: int
    removed: int
    reassigned: int
    """Given another role."""
    rebuilt_gpus: int
    """GPUs of removed workers that go to added ones."""
    reassigned_gpus: int

    @property
    def all(self) -> int:
        """Workers touched."""
        return self.added + self.removed + self.reassigned


def moves(old: Shape | None, new: Shape) -> Moves:
    """From one shape to another; from nothing where there is none."""
    had = {} if old is None else {(pool.role, pool.tp): pool.workers for pool in old.pools}
    want = {(pool.role, pool.tp): pool.workers for pool in new.pools}
    short: dict[int, int] = {}
    over: dict[int, int] = {}
    for role, tp in had | want:
        more = want.get((role, tp), 0) - had.get((role, tp), 0)
        short[tp] = short.get(tp, 0) + max(more, 0)
        over[tp] = over.get(tp, 0) + max(-more, 0)
    # Within a tensor parallelism a surplus worker makes up for a missing one by taking its role.
    taken = {tp: min(short[tp], over[tp]) for tp in short}
    added = {tp: short[tp] - taken[tp] for tp in short}
    removed = {tp: over[tp] - taken[tp] for tp in over}
    return Moves(
        added=sum(added.values()),
        removed=sum(removed.values()),
        reassigned=sum(taken.values()),
        rebuilt_gpus=min(_gpus(added), _gpus(removed)),
        reassigned_gpus=_gpus(taken),
    )


def _gpus(by_tp: dict[int, int]) -> int:
    return sum(tp * workers for tp, workers in by_tp.items())
