"""Synthetic workloads: scripts whose turns are drawn from the distributions of a workload profile.

Every number of a script has exactly the distribution that the profile gives it. What makes attempts at one task alike is a
Gaussian copula: a number is looked up at a normal score, and attempts have part of their scores in common.

    turns:             score = sqrt(a) task + sqrt(1 - a) attempt,               a = `Likeness.turns`
    generated tokens:  score = sqrt(b) task's turn k + sqrt(1 - b) own turn k,   b = `Likeness.generated`
    new tokens:        the same with                                             b = `Likeness.new`

Attempts at a task share its prompt; waits are drawn turn by turn. Context grows by all that is read and generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import add, sub
from typing import Any

import numpy as np
from scipy.special import ndtri

from pearl.core.distribution import Distribution, Floats
from pearl.core.workload import WorkloadProfile
from pearl.errors import ProfileError
from pearl.sim.draws import Draws
from pearl.sim.script import Script, ScriptTurn

MOST_TURNS = 100_000
"""Of a trajectory: a script is kept whole, and none of anybody's is near that."""

_ALMOST_ALL = 1 - 2**-53
"""No share is beyond it: the normal score of 1 is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How much of the variance of normal scores attempts at one task have in common, 0 .. 1; 0: nothing."""

    turns: float = 0.0
    """Of how many turns they have."""
    generated: float = 0.0
    """Of the generated tokens of their k-th turns."""
    new: float = 0.0
    """Of the new tokens of their k-th turns."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ProfileError(f"likeness: {field.name}: got {value}, want 0..1")


class _Table:
    """A distribution of numbers of one kind, to be looked up at normal scores."""

    __slots__ = ("_scores", "_values")

    def __init__(self, weights: dict[int, float] | dict[float, float]) -> None:
        points = sorted(weights.items())
        self._values = np.array([value for value, _ in points])
        # Below which each value but the last ends; the last has the rest.
        shares = np.cumsum([weight for _, weight in points])[:-1]
        self._scores = ndtri(np.minimum(shares, _ALMOST_ALL))

    def at(self, scores: Floats) -> list[Any]:
        """The values at normal scores, whole numbers where the weights' keys are."""
        found: list[Any] = self._values[np.searchsorted(self._scores, scores)].tolist()
        return found


def _points(distribution: Distribution) -> dict[float, float]:
    """Value -> weight."""
    return {v: w for v, w in zip(distribution.values, distribution.weights, strict=True) if w > 0}


def _whole(distribution: Distribution, least: int) -> dict[int, float]:
    """Whole number -> weight: values between are split between their neighbours, so that the mean stays."""
    found: dict[int, float] = {}
    for value, weight in _points(distribution).items():
        below = math.floor(value)
        for number, part in ((below, weight * (1 - (value - below))), (below + 1, weight * (value - below))):
            if part > 0:
                counted = max(least, number)
                found[counted] = found.get(counted, 0.0) + part
    return found


class SyntheticWorkload:
    """A `Workload` drawn from a profile."""

    def __init__(self, profile: WorkloadProfile, *, seed: int, likeness: Likeness | None = None) -> None:
        """The profile's overhead per turn counts as waiting.

        Raises:
            ProfileError: turns that cannot be played: too many, or which forget part of what they generated.
        """
        if profile.turns.largest > MOST_TURNS:
            raise ProfileError(f"workload: turns: got {profile.turns.largest:g}, want <= {MOST_TURNS}")
        if profile.retained < 1:
            raise ProfileError(
                f"workload: retained: got {profile.retained:g}, want 1 (a context keeps all that was generated)"
            )
        self.profile, self.seed, self.likeness = profile, seed, likeness or Likeness()
        self._task, self._own = Draws(), Draws()
        self._turns = _Table(_whole(profile.turns, 1))
        self._prompt = _Table(_whole(profile.prompt_tokens, 1))
        self._new = _Table(_whole(profile.new_tokens, 0))
        self._generated = _Table(_whole(profile.generated_tokens, 1))
        self._env_s = _Table({value + profile.turn_overhead_s: w for value, w in _points(profile.env_s).items()})

    def script(self, group: int, attempt: int) -> Script:
        """See `Workload`."""
        task, own = self._task.begin("task", self.seed, group), self._own.begin("attempt", self.seed, group, attempt)
        length, prompt = task.standard_normal(2)
        likeness = self.likeness
        (count,) = self._turns.at(_mixed(likeness.turns, length, own.standard_normal(1)))
        # Turn by turn, so that attempts of all lengths find the task's k-th turn at the same place of its stream.
        shared, apart = task.standard_normal((count, 2)), own.standard_normal((3, count))
        inputs = self._new.at(_mixed(likeness.new, shared[:, 0], apart[0]))
        inputs[0] = self._prompt.at(prompt)
        outputs = self._generated.at(_mixed(likeness.generated, shared[:, 1], apart[1]))
        turns = tuple(map(ScriptTurn, inputs, outputs, self._env_s.at(apart[2])))
        ends = accumulate(map(add, inputs, outputs))
        return Script(turns=turns, starts=tuple(map(sub, ends, outputs)))


def _mixed(share: float, common: Floats | float, own: Floats) -> Floats:
    """Normal scores of which so much of the variance is common."""
    return math.sqrt(share) * common + math.sqrt(1 - share) * own
