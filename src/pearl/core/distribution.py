"""Distributions as weighted points: what a workload does, beyond its means.

A distribution is frozen and small (at most `MAX_POINTS` points), so that profiles can be hashed, written to a journal and
compared. Squeezing keeps the mean and the ends; points lighter than `FORGOTTEN` are dropped, so that a moving average forgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pearl.errors import ProfileError

MAX_POINTS = 48
"""Enough for a tail's 98th percentile to be a point of its own."""
LARGEST = 1e15
"""No value is beyond it: squares of values stay far from overflow."""
FORGOTTEN = 1e-9
"""Weight below which a point is dropped. An end point is never merged with others, so it would else stay for ever."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values 0 .. `LARGEST`, rising, with the weight of each; weights add up to 1."""

    values: tuple[float, ...]
    weights: tuple[float, ...]
    mean: float = field(init=False, repr=False, compare=False)
    """Of the values; worked out once, since every prediction asks for it."""

    def __post_init__(self) -> None:
        if not self.values or len(self.values) != len(self.weights):
            raise ProfileError(
                f"distribution: got {len(self.values)} values and {len(self.weights)} weights, want as many, at least 1"
            )
        for name, numbers in (("value", self.values), ("weight", self.weights)):
            for number in numbers:
                if not 0 <= number <= LARGEST:
                    raise ProfileError(f"distribution: got {name} {number}, want numbers 0..{LARGEST:g}")
        if any(b <= a for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ProfileError("distribution: got values that do not rise, want each of them once, ascending")
        if not math.isclose(math.fsum(self.weights), 1.0, abs_tol=1e-6):
            raise ProfileError(f"distribution: got weights of {math.fsum(self.weights):.6g} in all, want 1")
        mean = math.fsum(v * w for v, w in zip(self.values, self.weights, strict=True))
        object.__setattr__(self, "mean", mean)

    @property
    def variance(self) -> float:
        """Of the values."""
        mean = self.mean
        return math.fsum((v - mean) ** 2 * w for v, w in zip(self.values, self.weights, strict=True))

    @property
    def largest(self) -> float:
        """The last value."""
        return self.values[-1]

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` (0 .. 1) of the weight does not exceed."""
        reached = 0.0
        for value, weight in zip(self.values, self.weights, strict=True):
            reached += weight
            if reached >= share - 1e-12:
                return value
        return self.largest

    def mixed_with(self, other: Distribution, share: float) -> Distribution:
        """A mixture with `share` (0 .. 1) of the other one."""
        weights = [w * (1 - share) for w in self.weights] + [w * share for w in other.weights]
        return distribution_of([*self.values, *other.values], weights)

    def scaled(self, factor: float) -> Distribution:
        """Every value times a factor > 0; neighbours that are the same number then become one."""
        return distribution_of([v * factor for v in self.values], self.weights)


def constant(value: float) -> Distribution:
    """One value, always."""
    return Distribution((float(value),), (1.0,))


def distribution_of(values: Iterable[float], weights: Iterable[float] | None = None) -> Distribution:
    """The distribution of a sample.

    Raises:
        ProfileError: no values, or a value or weight that is negative or not finite.
    """
    numbers = np.array(list(values), dtype=np.float64)
    mass = np.ones_like(numbers) if weights is None else np.array(list(weights), dtype=np.float64)
    if numbers.size != mass.size:
        raise ProfileError(f"distribution: got {numbers.size} values and {mass.size} weights, want as many")
    if not (np.isfinite(numbers).all() and np.isfinite(mass).all() and (mass >= 0).all()):
        raise ProfileError("distribution: got a value or weight that is negative or not finite, want numbers >= 0")
    if not numbers.size or mass.sum() <= 0:
        raise ProfileError("distribution: got no values, want at least 1")
    unique, place = np.unique(numbers, return_inverse=True)
    summed = np.bincount(place, weights=mass) / mass.sum()
    kept = summed >= FORGOTTEN
    points, shares = squeezed(unique[kept], summed[kept], MAX_POINTS)
    return Distribution(tuple(points.tolist()), tuple((shares / math.fsum(shares.tolist())).tolist()))


def squeezed(values: Floats, weights: Floats, points: int) -> tuple[Floats, Floats]:
    """Rising values as at most so many points (>= 3), each the mean of a part of about equal weight; the ends stay themselves."""
    if len(values) <= points:
        return values, weights
    inner = slice(1, -1)
    middle = (np.cumsum(weights[inner]) - weights[inner] / 2) / weights[inner].sum()
    bins = 1 + (middle * (points - 2)).astype(np.int64)
    bins = np.concatenate(([0], bins, [points - 1]))
    mass = np.bincount(bins, weights=weights, minlength=points)
    sums = np.bincount(bins, weights=weights * values, minlength=points)
    used = mass > 0
    # A mean that rounding carries out of its part could meet that of the next: means must rise as the values do.
    parts = np.flatnonzero(used)
    low, high = values[np.searchsorted(bins, parts)], values[np.searchsorted(bins, parts, side="right") - 1]
    means = np.clip(sums[used] / mass[used], low, high)
    return np.asarray(means, dtype=np.float64), np.asarray(mass[used], dtype=np.float64)
