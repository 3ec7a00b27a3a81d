"""How a batch drains: the population in flight as its trajectories go on turn by turn, and how many turns until it closes.

Law: every trajectory in flight makes turns at the same pace, so the only clock is the number of turns that each has made since
now. Along it the population falls as trajectories reach their ends; nothing here depends on the fleet, so one drain serves all
candidates of a decision. With N(x) in flight after x turns and W(N) seconds per turn at that population, the batch closes after

    T = integral of W(N(x)) dx from 0 to x*,

x* the number of turns after which as many groups as are needed have completed. What remains of a trajectory is a distribution
given the turns that it has made; a group completes with its last trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, ndtr

from pearl.core.distribution import Floats, squeezed
from pearl.core.progress import Progress
from pearl.core.workload import WorkloadProfile

SLICES = 12
"""Where the population is looked at: once in the first turn, which is unlike the rest (a prompt, no prefix), then at the nodes
of a Gauss-Legendre rule."""
_NODES, _WEIGHTS = (side / 2 for side in np.polynomial.legendre.leggauss(SLICES - 1))
COHORTS = 12
"""Different numbers of turns done that are told apart."""
_TAIL = 6.0
"""Deviations of a trajectory's length in turns beyond which everybody has ended."""
_PARTS = 8
"""That turns are cut into per round of finding those during which the batch may close."""
_ROUNDS = 9
"""At most: one instant is then known to one part in 2**27."""
_UNLIKELY = 1e-6
"""Chance of closing before or after them."""
_CELLS = 48
"""That those are cut into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How unlike turns are: long and short ones make a trajectory longer or shorter than its number of turns says.

    A turn is a constant part and one that varies, skewed as waits are: the sum of the latter over the turns left is taken as
    gamma-distributed. Nobody ends before the constant parts of all turns left have passed.
    """

    varying: float
    """Share of a turn's mean duration that varies, 0 .. 1."""
    cv: float
    """Standard deviation over mean of that part, >= 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The way to the close, in slices; arrays have shape `[SLICES]`."""

    turns: float
    """x*: turns that a trajectory makes until the batch closes, expected."""
    spread_turns: float
    """Standard deviation of x*."""
    slice_turns: Floats
    """How many of those turns each slice stands for."""
    population: Floats
    """Trajectories in flight."""
    turns_done: Floats
    """Before the turn that they are in, mean of those in flight."""
    first_share: Floats
    """Share of the turns in a slice that are a trajectory's first."""


def drain_of(workload: WorkloadProfile, progress: Progress, pace: Pace) -> Drain | None:
    """The drain of what is in flight; None when the batch is closed already."""
    if progress.needed_groups == 0:
        return None
    done, left, weight = _remaining(workload, progress)
    law = _Ending(left, pace)
    expected, spread = _close(progress, lambda turns: law.ended(turns) @ weight, law.everybody)
    first = min(1.0, expected)
    rest = expected - first
    at = np.concatenate(([first / 2], first + rest * (_NODES + 0.5)))
    alive = weight - weight * law.ended(at)
    share = alive.sum(axis=1)  # > 0: at the close not all have ended
    # A sliver of the last trajectory is in flight until the close, and its turns take as long as one alone.
    population = np.maximum(share * max(progress.in_flight, 1), 1.0)
    # Who is within a turn has done half of it, on average; who begins now is at the start of one: half a turn less.
    begun = np.maximum(at - 0.5, np.where(at > first, 1.0, 0.0))[:, None]
    turns_done = np.where(done == 0, begun, done + at[:, None])
    fresh = alive[0][done == 0].sum() / share[0]
    return Drain(
        turns=expected,
        spread_turns=spread,
        slice_turns=np.concatenate(([first], rest * _WEIGHTS)),
        population=population,
        turns_done=(alive * turns_done).sum(axis=1) / share,
        first_share=np.where(np.arange(SLICES) == 0, fresh, 0.0),
    )


def _remaining(workload: WorkloadProfile, progress: Progress) -> tuple[Floats, Floats, Floats]:
    """Turns done, turns left and weight (1 in all) of what is in flight, flat over cohorts and lengths."""
    counted = sorted((turns, count) for turns, count in progress.running.items() if count > 0) or [(0, 1)]
    cohorts = np.array([turns for turns, _ in counted], dtype=np.float64)
    sizes = np.array([count for _, count in counted], dtype=np.float64)
    cohorts, sizes = squeezed(cohorts, sizes, COHORTS)
    lengths, chances = np.array(workload.turns.values), np.array(workload.turns.weights)
    odds = np.where(np.greater(lengths, cohorts[:, None]), chances, 0.0)
    over = odds.sum(axis=1) == 0
    odds[over, -1] = 1.0  # longer than any seen before: one more turn
    odds /= odds.sum(axis=1, keepdims=True)
    # Who has begun is somewhere within a turn: half of it is done.
    begun = np.where(cohorts > 0, 0.5, 0.0)[:, None]
    left = np.where(over[:, None], 0.5, lengths - cohorts[:, None] - begun)
    weight = odds * (sizes / sizes.sum())[:, None]
    kept = weight > 0
    done = np.broadcast_to(cohorts[:, None], weight.shape)
    return done[kept], np.maximum(left[kept], 0.5), weight[kept]


class _Ending:
    """When trajectories with so many turns left end, on the clock of turns."""

    def __init__(self, left: Floats, pace: Pace) -> None:
        """`left`: shape `[L]`, > 0."""
        varying, cv = max(pace.varying, 1e-9), max(pace.cv, 1e-9)
        self._constant, self._mean = left * (1 - varying), left * varying
        # Of a gamma distribution of shape k the cube root of value over mean is about normal, with mean 1 - 1 / (9 k) and
        # variance 1 / (9 k). Source: Wilson and Hilferty, 1931.
        variance = cv**2 / left / 9
        self._middle, self._deviation = 1 - variance, np.sqrt(variance)
        self.everybody = float((self._constant + self._mean * (self._middle + _TAIL * self._deviation) ** 3).max())

    def ended(self, turns: Floats) -> Floats:
        """The chance that each has ended after so many turns, shape `[..., L]`."""
        past = turns[..., None] - self._constant
        root = np.cbrt(np.maximum(past, 0.0) / self._mean)
        return np.asarray(ndtr((root - self._middle) / self._deviation) * (past > 0), dtype=np.float64)


def _close(progress: Progress, finished: Callable[[Floats], Floats], most: float) -> tuple[float, float]:
    """Turns until as many groups as needed have completed, mean and standard deviation.

    `finished`: share of trajectories that have ended after so many turns; `most` turns after which all have. A group completes
    with its last member; of G groups, each of which has completed with a chance F, at least k have with the chance I_F(k, G - k +
    1), the regularised incomplete beta function. Source: order statistics. Of a number >= 0 that is larger than t with a chance
    1 - H(t) the mean is the integral of that, and the mean square that of 2 t (1 - H(t)).
    """
    groups, needed = progress.live_groups, progress.needed_groups
    members = max(1.0, progress.in_flight / groups)

    def closed(turns: Floats) -> Floats:
        return np.asarray(betainc(needed, groups - needed + 1, np.minimum(finished(turns), 1.0) ** members))

    low, high = 0.0, most
    for _ in range(_ROUNDS):
        width = high - low
        at = np.asarray(low + width / _PARTS * np.arange(_PARTS + 1), dtype=np.float64)
        chance = closed(at[1:-1])
        before, after = int((chance < _UNLIKELY).sum()), int((chance > 1 - _UNLIKELY).sum())
        low, high = float(at[before]), float(at[_PARTS - after])
        if high - low > width / 2:
            break
    width = (high - low) / _CELLS
    since = width * (np.arange(_CELLS) + 0.5)
    later = 1 - closed(np.asarray(low + since, dtype=np.float64))
    mean = width * float(later.sum())
    square = 2 * width * float(since @ later)
    return low + mean, math.sqrt(max(0.0, square - mean**2))
