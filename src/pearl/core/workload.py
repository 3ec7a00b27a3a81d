"""The workload profile: what trajectories do, as seen from their turns.

Law: a profile is refitted once per training step from the turns that ended in it, by an exponential moving average of whole
distributions. One step moves it by `share` at most, and a value beyond `OUTLIER` times the largest one seen so far counts as
that, whatever the share: so one hung tool call or one broken clock is one value among those of its step, and no larger than
`OUTLIER` times a known one. What is not a number 0 .. `LARGEST` is left out and counted. How large the share of a step may be is
said by whoever counts them (`pearl.elastic.tracker`): of a guess, all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.special import ndtri

from pearl.core.distribution import LARGEST, Distribution, Floats, distribution_of
from pearl.errors import ProfileError

Number = TypeVar("Number", float, Floats)

OUTLIER = 4.0
"""Times the largest value of the profile: what a single step can teach about the tail. A choice, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Distributions over trajectories and turns."""

    turns: Distribution
    """Per trajectory, >= 1."""
    prompt_tokens: Distribution
    """New to the engine at a trajectory's first turn."""
    new_tokens: Distribution
    """New to the engine at each later turn: the environment's reply."""
    generated_tokens: Distribution
    """Per turn."""
    env_s: Distribution
    """From the end of a turn until the environment's reply, per turn."""
    retained: float = 1.0
    """Share of generated tokens that stay in the context of the next turn, 0 .. 1."""
    turn_overhead_s: float = 0.0
    """Per turn beside engine and environment: encoding, calls."""
    theta: float = 0.0
    """Bubble ratio (1 - f) / f, f the mean share of trajectories that decode. Source: the paper, §4.2."""
    likeness: float = 0.0
    """Share of the variance of normal scores of turns per trajectory that attempts at one task have in common, 0 .. 1."""

    def __post_init__(self) -> None:
        if self.turns.values[0] < 1:
            raise ProfileError(f"workload: turns: got {self.turns.values[0]}, want >= 1")
        if self.generated_tokens.mean <= 0:
            raise ProfileError("workload: generated_tokens: got a mean of 0, want > 0")
        for name in ("retained", "likeness"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ProfileError(f"workload: {name}: got {share}, want 0..1")
        for name in ("turn_overhead_s", "theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"workload: {name}: got {value}, want a finite number >= 0")

    @property
    def growth_tokens(self) -> float:
        """Tokens by which a context grows per turn, mean."""
        return self.new_tokens.mean + self.retained * self.generated_tokens.mean

    def context_tokens(self, turns_done: Number) -> Number:
        """Mean context at the prompt of the turn after so many, that turn's new tokens included; array in, array out."""
        return self.prompt_tokens.mean + turns_done * self.growth_tokens


def within_limits(profile: WorkloadProfile, *, max_turns: int, max_context_tokens: int) -> WorkloadProfile:
    """The workload in a run that truncates trajectories: none has a turn more than allowed, or than fits the context.

    How many turns fit is that of mean lengths; the first one always does.
    """
    room_tokens = max_context_tokens - profile.prompt_tokens.mean - profile.generated_tokens.mean
    growth_tokens = profile.growth_tokens
    fitting = 1 + room_tokens // growth_tokens if growth_tokens > 0 else math.inf
    most = max(1.0, min(max_turns, fitting))
    turns = distribution_of([min(value, most) for value in profile.turns.values], profile.turns.weights)
    return replace(profile, turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSample:
    """What one training step showed; each list as long as there were turns or trajectories that showed it."""

    turns: Sequence[float] = ()
    prompt_tokens: Sequence[float] = ()
    new_tokens: Sequence[float] = ()
    generated_tokens: Sequence[float] = ()
    env_s: Sequence[float] = ()
    retained: float | None = None
    turn_overhead_s: float | None = None
    decoding_share: float | None = None
    """f: time trajectories spent decoding over the time that they were in flight, 0 .. 1."""
    likeness: float | None = None
    """As `likeness_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """A refitted workload profile, and how many numbers were no use."""

    profile: WorkloadProfile
    ignored: int


_DISTRIBUTIONS = ("turns", "prompt_tokens", "new_tokens", "generated_tokens", "env_s")
MIN_DECODING_SHARE = 1e-3
"""Below it a share is taken for noise: theta would be beyond 1,000."""


def bubble_ratio(decoding_share: float) -> float:
    """Theta from f. Source: the paper, §4.2: theta = (1 - f) / f."""
    share = min(1.0, max(MIN_DECODING_SHARE, decoding_share))
    return (1 - share) / share


def likeness_of(groups: Sequence[Sequence[float]]) -> float | None:
    """How alike values are within groups: the intraclass correlation of their normal scores, 0 .. 1; None: too few to tell.

    Scores are those of mid-ranks, so that neither the tail nor ties decide. Source: one-way analysis of variance, random effects.
    """
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    count, total = len(sizes), sizes.sum()
    if count < 2 or total <= count:
        return None
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    unique, place, often = np.unique(values, return_inverse=True, return_counts=True)
    if len(unique) < 2:
        return None
    scores = ndtri((np.cumsum(often) - often / 2) / total)[place]
    sums = np.add.reduceat(scores, np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64))
    between = float((sums**2 / sizes).sum() - scores.sum() ** 2 / total) / (count - 1)
    within = float((scores**2).sum() - (sums**2 / sizes).sum()) / (total - count)
    size = float(total - (sizes**2).sum() / total) / (count - 1)
    return min(1.0, max(0.0, float((between - within) / (between + (size - 1) * within))))


def refit_workload(profile: WorkloadProfile, sample: WorkloadSample, share: float) -> Refit:
    """The profile after a step; `share` (0 .. 1] is the weight of the new sample in the moving average."""
    ignored = 0
    changes: dict[str, object] = {}
    for name in _DISTRIBUTIONS:
        low = 1.0 if name in ("turns", "generated_tokens") else 0.0
        seen: Sequence[float] = getattr(sample, name)
        sound = [value for value in seen if low <= value <= LARGEST]
        ignored += len(seen) - len(sound)
        if sound:
            old: Distribution = getattr(profile, name)
            changes[name] = old.mixed_with(_tamed(sound, old), share)
    # Theta follows as its share f: an average of thetas would leap at a step that hardly decoded.
    decoding = 1 / (1 + profile.theta)
    overhead = profile.turn_overhead_s
    scalars = {
        "retained": (profile.retained, sample.retained, 1.0, 1.0),
        "turn_overhead_s": (overhead, sample.turn_overhead_s, LARGEST, _limit(overhead)),
        "theta": (decoding, sample.decoding_share, 1.0, 1.0),
        "likeness": (profile.likeness, sample.likeness, 1.0, 1.0),
    }
    for name, (had, new, high, limit) in scalars.items():
        if new is None:
            continue
        if not 0 <= new <= high:
            ignored += 1
            continue
        moved = had + share * (min(new, limit) - had)
        changes[name] = bubble_ratio(moved) if name == "theta" else moved
    return Refit(profile=replace(profile, **changes), ignored=ignored)  # type: ignore[arg-type]


def _tamed(values: Sequence[float], old: Distribution) -> Distribution:
    """With values far beyond everything known cut down."""
    limit = _limit(old.largest)
    return distribution_of([min(value, limit) for value in values])


def _limit(known: float) -> float:
    """What a value may count as; where all known is 0 nothing can be called far."""
    return min(LARGEST, OUTLIER * known) if known > 0 else LARGEST
