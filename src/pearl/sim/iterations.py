"""What iterations take, one by one and many at once.

An iteration in which nothing but decoding happens lengthens every context by one token, and takes a time that is piecewise
linear in their mean. So runs of such iterations are sums of arithmetic series, and neither `DecodeCurve.span_s` nor
`DecodeCurve.within` looks at iterations one by one. Law, *same*: they give what `IterationTimes.seconds` gives, summed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from pearl.core.profile import IterationTimes

_BEYOND = 4096
"""Tokens beyond the last point of the context axis at which the slope there is read off: it goes on unchanged."""


class DecodeCurve:
    """Time of an iteration over the mean context, for one number of decoding sequences."""

    __slots__ = ("_anchors", "_slopes", "_starts", "_values")

    def __init__(self, points: Sequence[float], values_s: Sequence[float], beyond_s: float) -> None:
        """`points`, rising, with their values; level before the first, with slope `beyond_s` behind the last."""
        slopes = [(values_s[i + 1] - values_s[i]) / (points[i + 1] - points[i]) for i in range(len(points) - 1)]
        self._starts = [-math.inf, *points]
        self._anchors = [points[0], *points]
        self._values = [values_s[0], *values_s]
        self._slopes = [0.0, *slopes, beyond_s]

    def seconds(self, context_tokens: float) -> float:
        """Time of one iteration."""
        i = bisect_right(self._starts, context_tokens) - 1
        return self._values[i] + self._slopes[i] * (context_tokens - self._anchors[i])

    def span_s(self, context_tokens: float, iterations: int) -> float:
        """Time of so many iterations, the first at a mean context, each of the others a token behind the one before."""
        starts, i = self._starts, bisect_right(self._starts, context_tokens) - 1
        total_s = 0.0
        while iterations > 0:
            here = iterations
            if i + 1 < len(starts):
                here = min(iterations, math.ceil(starts[i + 1] - context_tokens))
            slope = self._slopes[i]
            first_s = self._values[i] + slope * (context_tokens - self._anchors[i])
            total_s += here * first_s + slope * (here * (here - 1) / 2)
            context_tokens += here
            iterations -= here
            i += 1
        return total_s

    def within(self, context_tokens: float, iterations: int, seconds: float) -> int:
        """How many of so many iterations are over after `seconds`; one that takes no time is."""
        starts, i = self._starts, bisect_right(self._starts, context_tokens) - 1
        done = 0
        while done < iterations:
            here = iterations - done
            if i + 1 < len(starts):
                here = min(here, math.ceil(starts[i + 1] - context_tokens))
            slope = self._slopes[i]
            first_s = self._values[i] + slope * (context_tokens - self._anchors[i])
            whole_s = here * first_s + slope * (here * (here - 1) / 2)
            if whole_s > seconds:
                return done + _series_within(first_s, slope, here, seconds)
            seconds -= whole_s
            done += here
            context_tokens += here
            i += 1
        return done


def _series_within(first: float, slope: float, count: int, budget: float) -> int:
    """The largest n < count with `n * first + slope * n * (n - 1) / 2 <= budget`; the terms are >= 0."""
    if budget < 0:
        return 0
    # Where the sum is nearly linear the root of the quadratic is the difference of two large numbers; this form is not.
    linear = first - slope / 2
    root = linear * linear + 2 * slope * budget
    below = linear + math.sqrt(max(0.0, root))
    n = min(count - 1, int(2 * budget / below) if below > 0 else 0)
    while n > 0 and n * first + slope * (n * (n - 1) / 2) > budget:
        n -= 1
    while n + 1 < count and (n + 1) * first + slope * ((n + 1) * n / 2) <= budget:
        n += 1
    return n


class IterationCosts:
    """Iteration times of one profile, with the curves that were asked for; engines of one profile share them."""

    def __init__(self, times: IterationTimes) -> None:
        self.times = times
        self._curves: dict[int, DecodeCurve] = {}

    def curve(self, decoding: int) -> DecodeCurve:
        """Of iterations in which so many sequences, >= 1, decode and nothing else happens."""
        curve = self._curves.get(decoding)
        if curve is None:
            curve = self._curves[decoding] = self._make_curve(decoding)
        return curve

    def seconds(self, prefill_tokens: int, decoding: int, context_tokens: float) -> float:
        """Time of one iteration, as `IterationTimes.seconds`."""
        return self.times.seconds(prefill_tokens, decoding, context_tokens)

    def _make_curve(self, decoding: int) -> DecodeCurve:
        axis = [float(point) for point in self.times.context_tokens]
        last = self.times.decoding[-1]
        points = axis if decoding <= last else sorted({*axis, *self._kinks(axis)})

        def at(context: float) -> float:
            return self.times.seconds(0, decoding, context)

        end = points[-1]
        return DecodeCurve(points, [at(point) for point in points], (at(end + _BEYOND) - at(end)) / _BEYOND)

    def _kinks(self, axis: Sequence[float]) -> list[float]:
        """Contexts where the last two numbers of decoding sequences take equally long: beyond them, a falling slope is level."""
        before, last = self.times.decoding[-2:]

        def rise(context: float) -> float:
            high, low = (self.times.seconds(0, many, context) for many in (last, before))
            # An iteration of nothing takes no time, but the grid has a value there.
            return high - (low if before else self._idle_s(context))

        found: list[float] = []
        for here, there in zip(axis, [*axis[1:], axis[-1] + _BEYOND], strict=True):
            one, other = rise(here), rise(there)
            if one * other < 0:
                found.append(here + (there - here) * one / (one - other))
            elif there > axis[-1] and one * (other - one) < 0:
                found.append(here - one * (there - here) / (other - one))
        return found

    def _idle_s(self, context_tokens: float) -> float:
        """The grid's value at nothing, which `IterationTimes.seconds` reads off only between it and the next point."""
        first = self.times.decoding[1]
        whole = self.times.seconds(0, first, context_tokens)
        return 2 * self.times.seconds(0, first / 2, context_tokens) - whole
