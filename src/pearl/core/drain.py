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
from scipy.special import ndtr

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
"""Standard deviations of the longest trajectory's length in turns beyond which everybody has ended."""
_PARTS = 8
"""That the turns until then are cut into per round of looking for the close."""
_ROUNDS = 9
"""At most: the close is then known to one part in 2**27 of those turns."""
_SMOOTH = 32
"""Parts of the narrowest spread of a length within which the share that has ended is a straight line."""


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


def drain_of(workload: WorkloadProfile, progress: Progress, turn_cv: float) -> Drain | None:
    """The drain of what is in flight; None when the batch is closed already.

    `turn_cv`: standard deviation over mean of one turn's duration; long and short turns make a trajectory longer or shorter
    than its number of turns says.
    """
    if progress.needed_groups == 0:
        return None
    done, left, weight = _remaining(workload, progress)
    spread = np.maximum(turn_cv * np.sqrt(left), 1e-9)

    def ended(turns: Floats) -> Floats:
        return np.asarray(weight * ndtr((turns[:, None] - left) / spread), dtype=np.float64)

    everybody = float((left + _TAIL * spread).max())

    def finished(turns: Floats) -> Floats:
        return np.asarray(ndtr((turns[..., None] - left) / spread) @ weight, dtype=np.float64)

    expected, low, high = _close(progress, finished, everybody, float(spread.min()))
    first = min(1.0, expected)
    rest = expected - first
    at = np.concatenate(([first / 2], first + rest * (_NODES + 0.5)))
    alive = weight - ended(at)
    share = alive.sum(axis=1)  # > 0: at the close not all have ended
    # A sliver of the last trajectory is in flight until the close, and its turns take as long as one alone.
    population = np.maximum(share * max(progress.in_flight, 1), 1.0)
    # Who is within a turn has done half of it, on average; who begins now is at the start of one: half a turn less.
    begun = np.maximum(at - 0.5, np.where(at > first, 1.0, 0.0))[:, None]
    turns_done = np.where(done == 0, begun, done + at[:, None])
    fresh = alive[0][done == 0].sum() / share[0]
    return Drain(
        turns=expected,
        spread_turns=(high - low) / 2,
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


def _close(
    progress: Progress, finished: Callable[[Floats], Floats], most: float, spread: float
) -> tuple[float, float, float]:
    """Turns until as many groups as needed have completed: expected, and one standard deviation to each side.

    `finished`: share of trajectories that have ended after so many turns, `most` turns after which all have, `spread` turns
    over which no length's share rises at once. The k-th of G groups has completed when k - 1/2 are expected to have: between
    its median and its mean where lengths have a tail. How many have by then is binomial. Source of the two sides: Wilson's
    score interval of a share.
    """
    groups = progress.live_groups
    members = max(1.0, progress.in_flight / groups)
    share = (progress.needed_groups - 0.5) / groups
    middle, half = share + 0.5 / groups, math.sqrt(share * (1 - share) / groups + 0.25 / groups**2)
    levels = np.array([share, (middle - half) / (1 + 1 / groups), (middle + half) / (1 + 1 / groups)])
    levels **= 1 / members
    low, width = np.zeros(3), most
    reached, next_reached = np.zeros(3), np.ones(3)
    steps, each = np.arange(_PARTS + 1), np.arange(3)
    for _ in range(_ROUNDS):
        width /= _PARTS
        known = finished(low + width * steps[1:-1, None])
        known = np.concatenate((reached[None], known, next_reached[None]))
        at = (known[1:-1] < levels).sum(axis=0)
        reached, next_reached = known[at, each], known[at + 1, each]
        low = low + width * at
        if width < spread / _SMOOTH:
            break
    along = (levels - reached) / np.maximum(next_reached - reached, 1e-300)
    expected, early, late = (low + width * np.clip(along, 0.0, 1.0)).tolist()
    return expected, early, late
