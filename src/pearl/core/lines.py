"""What shapes a budget allows: lines of them.

Law: every shape uses all GPUs of its budget that its tensor parallelisms can use; more workers never make a batch later. Shapes
of one mode and tensor parallelism lie on a *line*, along which only the ratio varies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pearl.core.budget import Budget
from pearl.core.makespan import SERVING_ROLES, Ints, Target
from pearl.core.platform import Platform
from pearl.core.shape import Pool, Shape
from pearl.core.state import Role

POINTS = 16
"""Ratios of a line that are looked at per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a policy may choose from."""

    colocated: bool = True
    disaggregated: bool = True
    hybrid: bool = False
    tps: tuple[int, ...] | None = None
    """Tensor parallelisms; None: all that the platform has."""
    append_tokens: tuple[int, ...] = (0,)
    """Bounds of append-prefill to choose from, for predictors that can tell them apart; 0: without."""
    exhaustive: bool = False
    """Predict every shape, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Shapes alike but for the ratio; place `i` of 0 .. length - 1 along it."""

    prefill_tp: int
    decode_tp: int
    colocated_tp: int
    length: int
    first: tuple[int, int, int]
    """Prefill, decode and colocated workers at place 0."""
    step: tuple[int, int, int]
    """What each place adds."""
    append_tokens: int
    borrowed: int
    second: int = 0
    """Colocated workers of another tensor parallelism, at all places."""
    second_tp: int = 1

    @property
    def columns(self) -> tuple[int, ...]:
        """`first`, `step`, tensor parallelism of each role, `append_tokens`, `second`, `second_tp`."""
        tps = (self.prefill_tp, self.decode_tp, self.colocated_tp)
        return (*self.first, *self.step, *tps, self.append_tokens, self.second, self.second_tp)

    def target(self, place: int) -> Target:
        """The shape at a place."""
        counts = [first + place * step for first, step in zip(self.first, self.step, strict=True)]
        tps = (self.prefill_tp, self.decode_tp, self.colocated_tp, self.second_tp)
        roles = (*SERVING_ROLES, Role.COLOCATED)
        pools = [
            Pool(role=role, workers=workers, tp=tp)
            for role, workers, tp in zip(roles, (*counts, self.second), tps, strict=True)
            if workers
        ]
        pools.sort(key=lambda pool: (SERVING_ROLES.index(pool.role), pool.tp))
        return Target(shape=Shape(tuple(pools)), append_tokens=self.append_tokens)


def lines_of(platform: Platform, budget: Budget, space: Space, borrowed: int) -> list[Line]:
    """All lines of a budget.

    Borrowed workers keep their tensor parallelism: they join a role that has it, or stand beside colocated workers of another.
    """
    tps = [tp for tp in platform.tps if space.tps is None or tp in space.tps]
    if borrowed and (borrowed > budget.overlap or budget.overlap_tp not in tps):
        return []
    lent = {budget.overlap_tp: borrowed} if borrowed else {}
    lines: list[Line] = []
    for tp in tps:
        workers = budget.workers.get(tp, 0) + lent.get(tp, 0)
        if space.colocated and workers:
            line = _line((1, 1, tp), 1, (0, 0, workers), (0, 0, 0), 0, borrowed)
            apart = borrowed > 0 and tp not in lent
            lines.append(replace(line, second=borrowed, second_tp=budget.overlap_tp) if apart else line)
        if space.hybrid and platform.allows(tp, tp) and (not borrowed or tp in lent):
            lines += _hybrid_lines(tp, workers, space, borrowed)
    if space.disaggregated:
        pairs = [(p, d) for p in tps for d in tps if platform.allows(p, d)]
        for prefill_tp, decode_tp in pairs:
            for append_tokens in space.append_tokens:
                lines += _pair_lines(budget, prefill_tp, decode_tp, lent, append_tokens, borrowed)
    return lines


def _pair_lines(
    budget: Budget, prefill_tp: int, decode_tp: int, lent: dict[int, int], append_tokens: int, borrowed: int
) -> list[Line]:
    """Of xPyD with these tensor parallelisms."""
    if prefill_tp == decode_tp:
        workers = budget.workers.get(prefill_tp, 0) + lent.get(prefill_tp, 0)
        if workers < 2 or (borrowed and prefill_tp not in lent):
            return []
        tps = (prefill_tp, decode_tp, 1)
        return [_line(tps, workers - 1, (1, workers - 1, 0), (1, -1, 0), append_tokens, borrowed)]
    large, small = max(prefill_tp, decode_tp), min(prefill_tp, decode_tp)
    if large % small or (borrowed and not {large, small} & lent.keys()):
        return []
    lent_large, lent_small = lent.get(large, 0), lent.get(small, 0)
    # Each large worker takes the place of so many small ones, since nodes are cut at its multiples.
    ratio, most, slots = large // small, budget.workers.get(large, 0), budget.workers.get(small, 0)
    fewest = 0 if lent_large else 1
    while most >= fewest and slots - most * ratio + lent_small < 1:
        most -= 1
    if most < fewest:
        return []
    counts = (fewest + lent_large, slots - fewest * ratio + lent_small)
    grows = (1, -ratio)
    if prefill_tp != large:
        counts, grows = counts[::-1], grows[::-1]
    tps = (prefill_tp, decode_tp, 1)
    return [_line(tps, most - fewest + 1, (*counts, 0), (*grows, 0), append_tokens, borrowed)]


def _hybrid_lines(tp: int, workers: int, space: Space, borrowed: int) -> Iterable[Line]:
    """Of xPyD beside colocated workers, one line for each of some numbers of colocated workers."""
    numbers = np.arange(1, workers - 1) if space.exhaustive else spread(1, workers - 2)
    for colocated in numbers.tolist():
        rest = workers - colocated
        for append_tokens in space.append_tokens:
            first = (1, rest - 1, colocated)
            yield _line((tp, tp, tp), rest - 1, first, (1, -1, 0), append_tokens, borrowed)


def _line(
    tps: tuple[int, int, int],
    length: int,
    first: tuple[int, int, int],
    step: tuple[int, int, int],
    append_tokens: int,
    borrowed: int,
) -> Line:
    return Line(
        prefill_tp=tps[0],
        decode_tp=tps[1],
        colocated_tp=tps[2],
        length=length,
        first=first,
        step=step,
        append_tokens=append_tokens,
        borrowed=borrowed,
    )


def spread(low: int, high: int, points: int = POINTS) -> Ints:
    """At most so many whole numbers, at least 2, from low to high, both included; none where low > high.

    Rising; denser at both ends, where ratios change fastest.
    """
    if high - low < points:
        return np.arange(low, high + 1)
    even = np.linspace(-1.0, 1.0, points)
    bent = (np.sign(even) * (1 - (1 - np.abs(even)) ** 2) + 1) / 2
    return np.unique(np.rint(low + bent * (high - low)).astype(np.int64))
