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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import betainc, ndtr, ndtri

from pearl.core.distribution import Distribution, Floats, squeezed
from pearl.core.pace import Pace
from pearl.core.progress import Progress
from pearl.core.workload import WorkloadProfile

SLICES = 12
"""Where the population is looked at: once in the first turn, which is unlike the rest (a prompt, no prefix), then at the nodes
of a Gauss-Legendre rule."""
_NODES, _WEIGHTS = (side / 2 for side in np.polynomial.legendre.leggauss(SLICES - 1))
COHORTS = 12
"""Different numbers of turns done that are told apart."""
_TAIL = 6.0
"""Deviations of a trajectory's length in turns, and the longest turn, beyond which everybody has ended."""
_LATTICE = 256
"""Points for the lengths of trajectories."""
_SHORTEST = 1e-6
"""Of a lattice, in turns: where turns are all alike."""
_PARTS = 8
"""That turns are cut into per round of finding those during which the batch may close."""
_ROUNDS = 9
"""At most: one instant is then known to one part in 2**27."""
_UNLIKELY = 1e-6
"""Chance of closing before or after them."""
_CELLS = 48
"""That those are cut into."""
_LEAST = 1e-300
"""No chance is below it: its logarithm is finite."""
_MOST_ALIKE = 0.98
"""Members of a group have so much in common at most: the rest is what makes scores differ at all."""
_SCORES, _SCORE_WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_SCORE_WEIGHTS = _SCORE_WEIGHTS / _SCORE_WEIGHTS.sum()


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
    others = {turns: count - progress.due.get(turns, 0) for turns, count in progress.running.items()}
    free_groups = progress.live_groups - progress.due_groups
    parts = [
        _Part(workload, running, groups, needed)
        for running, groups, needed in (
            (progress.due, progress.due_groups, progress.due_groups),
            (others, free_groups, progress.needed_groups - progress.due_groups),
        )
        if groups > 0
    ]
    done, left = (np.concatenate([getattr(part, name) for part in parts]) for name in ("done", "left"))
    weight = np.concatenate([part.weight * part.size for part in parts])
    weight /= weight.sum()
    laws = [_Ending(part.left, pace) for part in parts]

    alike = workload.likeness * _explained(workload, pace)

    def closed(turns: Floats) -> Floats:
        chances = [part.closed(law.ended(turns), alike) for part, law in zip(parts, laws, strict=True) if part.needed]
        return np.asarray(np.prod(chances, axis=0))

    expected, spread = _close(closed, max(law.everybody for law in laws))
    law = laws[0] if len(laws) == 1 else _Ending(left, pace)
    first = min(1.0, expected)
    rest = expected - first
    at = np.concatenate(([first / 2], first + rest * (_NODES + 0.5)))
    alive = weight - weight * law.ended(at)
    share = alive.sum(axis=1)  # > 0: at the close not all have ended
    # A sliver of the last trajectory is in flight until the close, and its turns take as long as one alone.
    population = np.maximum(share * max(progress.in_flight, 1), 1.0)
    # Who is within a turn has done half of it, on average; who begins now is at the start of one: half a turn less.
    begun = np.maximum(at - 0.5, np.where(at > first, 1.0, 0.0))[:, None]
    # A long turn takes the time of many: nobody has done more of them than there are.
    turns_done = np.minimum(np.where(done == 0, begun, done + at[:, None]), done + left)
    fresh = alive[0][done == 0].sum() / share[0]
    return Drain(
        turns=expected,
        spread_turns=spread,
        slice_turns=np.concatenate(([first], rest * _WEIGHTS)),
        population=population,
        turns_done=(alive * turns_done).sum(axis=1) / share,
        first_share=np.where(np.arange(SLICES) == 0, fresh, 0.0),
    )


def joined(drain: Drain, workload: WorkloadProfile, pace: Pace, coming: int) -> Drain:
    """The same way to the close, with so many trajectories beside that begin on it."""
    at = np.cumsum(drain.slice_turns) - drain.slice_turns / 2
    lengths, weight = np.array(workload.turns.values), np.array(workload.turns.weights)
    alive = weight - weight * _Ending(lengths, pace).ended(at)
    share = np.maximum(alive.sum(axis=1), 1e-12)
    newcomers = coming * share
    turns_done = (alive * np.minimum(at[:, None], lengths)).sum(axis=1) / share
    everyone = drain.population + newcomers
    return replace(
        drain,
        population=everyone,
        turns_done=(drain.population * drain.turns_done + newcomers * turns_done) / everyone,
        first_share=drain.first_share * drain.population / everyone,
    )


def _explained(workload: WorkloadProfile, pace: Pace) -> float:
    """Share of the variance of what trajectories take that lies in their numbers of turns, 0 .. 1."""
    each = pace.generates.variance + pace.waits.variance
    both = workload.turns.variance + workload.turns.mean * each
    return workload.turns.variance / both if both > 0 else 0.0


class _Part:
    """Groups of which so many must complete: those that are due, or the others."""

    def __init__(self, workload: WorkloadProfile, running: Mapping[int, int], groups: int, needed: int) -> None:
        self.groups, self.needed = groups, needed
        counted = sorted((turns, count) for turns, count in running.items() if count > 0) or [(0, 1)]
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
        kept = odds > 0
        self.size = float(sizes.sum())
        """Trajectories."""
        self.done = np.broadcast_to(cohorts[:, None], odds.shape)[kept]
        """Turns done, flat over cohorts and lengths, as are those left and the weight (1 in all) of each."""
        self.left = np.maximum(left[kept], 0.5)
        self.weight = (odds * (sizes / self.size)[:, None])[kept]
        self._share = sizes / self.size
        self._odds = odds[kept]
        self._first = np.concatenate(([0], np.cumsum(kept.sum(axis=1))[:-1]))

    def closed(self, ended: Floats, likeness: float) -> Floats:
        """The chance that enough groups have completed, from the chance that each length has ended, shape `[..., L]`."""
        finished = np.minimum(np.add.reduceat(ended * self._odds, self._first, axis=-1), 1.0)
        members = max(1.0, self.size / self.groups)
        if self.needed == self.groups:
            # All must end, whoever is in which group: cohorts count by the logarithms of their chances.
            mean = np.exp(np.log(np.maximum(finished, _LEAST)) @ self._share)
            return np.asarray(_all_of(mean, members, likeness) ** self.groups)
        group = _all_of(np.asarray(finished @ self._share), members, likeness)
        return np.asarray(betainc(self.needed, self.groups - self.needed + 1, np.minimum(group, 1.0)))


def _all_of(share: Floats, members: float, likeness: float) -> Floats:
    """The chance that all members of a group have ended when each has with a chance `share`.

    What they have in common is a normal score: given it they are independent. Source: the one-factor Gaussian copula.
    """
    if likeness == 0:
        return np.asarray(share**members)
    common = min(likeness, _MOST_ALIKE)
    given = (ndtri(share)[..., None] - math.sqrt(common) * _SCORES) / math.sqrt(1 - common)
    return np.asarray(ndtr(given) ** members @ _SCORE_WEIGHTS)


class _Ending:
    """When trajectories with so many turns left end, on the clock of turns.

    That is a sum of as many durations of turns, whose distribution is worked out on a lattice: the transform of a sum is the
    power of the transform. So one very long wait among many short ones keeps its place in the tail. What every turn takes at
    least is left out of the lattice, and exact.
    """

    def __init__(self, left: Floats, pace: Pace) -> None:
        """`left`: shape `[L]`, > 0; what is beyond a whole number takes that part of a mean turn."""
        parts = (pace.generates, pace.waits)
        least = sum(part.values[0] for part in parts)
        whole = np.floor(left)
        self._sure = left - whole + whole * least
        counts, self._place = np.unique(whole, return_inverse=True)
        most, mean = float(counts[-1]), sum(part.mean for part in parts) - least
        deviation = math.sqrt(sum(part.variance for part in parts))
        span = sum(part.largest for part in parts) - least
        length = most * mean + _TAIL * deviation * math.sqrt(most) + span
        self._step = max(length, _SHORTEST) / _LATTICE
        transform = np.prod([np.fft.rfft(self._split(part)) for part in parts], axis=0)
        logarithm = np.log(np.where(transform == 0, _LEAST, transform))
        powers = np.exp(counts[:, None] * logarithm)
        masses = np.fft.irfft(powers, _LATTICE, axis=1)
        # Half of what is on a point of the lattice lies below it.
        chances = np.clip(np.cumsum(masses, axis=1) - masses / 2, 0.0, 1.0)
        self._chances = np.concatenate((np.zeros((len(counts), 1)), chances, np.ones((len(counts), 1))), axis=1)
        self.everybody = float(self._sure.max()) + length

    def ended(self, turns: Floats) -> Floats:
        """The chance that each has ended after so many turns, shape `[..., L]`."""
        at = np.clip((turns[..., None] - self._sure) / self._step + 1, 0.0, _LATTICE + 1.0)
        low = np.minimum(at.astype(np.int64), _LATTICE)
        below = self._chances[self._place, low]
        return np.asarray(below + (self._chances[self._place, low + 1] - below) * (at - low), dtype=np.float64)

    def _split(self, part: Distribution) -> Floats:
        """Masses on the lattice, above the least value: those between two points are split, so that the mean stays."""
        at = (np.array(part.values) - part.values[0]) / self._step
        low = at.astype(np.int64)
        weights = np.array(part.weights)
        points = _LATTICE + 2  # where nothing adds up the last value may lie at the very end of the lattice
        mass = np.bincount(low, weights=weights * (1 - (at - low)), minlength=points)
        mass += np.bincount(low + 1, weights=weights * (at - low), minlength=points)
        return np.asarray(mass[:_LATTICE], dtype=np.float64)


def _close(closed: Callable[[Floats], Floats], most: float) -> tuple[float, float]:
    """Turns until as many groups as needed have completed, mean and standard deviation.

    `closed`: the chance that they have after so many turns; `most` turns after which all have. Of G groups, each of which has
    completed with a chance F, at least k have with the chance I_F(k, G - k + 1), the regularised incomplete beta function.
    Source: order statistics. Of a number >= 0 that is larger than t with a chance 1 - H(t) the mean is the integral of that, and
    the mean square that of 2 t (1 - H(t)).
    """
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
