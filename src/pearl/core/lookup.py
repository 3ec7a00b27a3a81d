"""Iteration times for whole arrays at once; the law of interpolation is `IterationTimes`'."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pearl.core.distribution import Floats
from pearl.core.makespan import Ints
from pearl.core.profile import IterationTimes


class TimesTable:
    """The grid of a profile as arrays."""

    def __init__(self, times: IterationTimes) -> None:
        axes = (times.prefill_tokens, times.decoding, times.context_tokens)
        self._prefill, self._decoding, self._context = (np.array(axis, dtype=np.float64) for axis in axes)
        self._cells = np.array(times.cells_s)

    def at(self, decoding: Floats, context_tokens: Floats) -> Beside:
        """What is left to choose once it is known what decodes; shapes `[K, G]` and `[K]`, values >= 0."""
        c, c_along = _place(self._context, context_tokens)
        rows = _between(self._cells[..., c], self._cells[..., _next(self._context, c)], c_along)
        d, d_along = _place(self._decoding, decoding)
        slices = np.arange(len(context_tokens))[:, None]
        planes = _between(rows[:, d, slices], rows[:, _next(self._decoding, d), slices], d_along)
        return Beside(self._prefill, planes, decoding == 0)


class Beside:
    """Iterations with some decoding sequences, over the prompt tokens that are computed in them too."""

    def __init__(self, prefill_tokens: Floats, planes: Floats, idle: np.ndarray) -> None:
        self._axis, self._planes, self._idle = prefill_tokens, planes, idle

    def seconds(self, prefill_tokens: Floats) -> Floats:
        """Time of the iterations, shape `[U, K, G]` for `[U]` numbers of tokens; those of nothing take none."""
        low, along = _place(self._axis, prefill_tokens)
        taken = _between(self._planes[low], self._planes[_next(self._axis, low)], along[:, None, None])
        taken[prefill_tokens == 0] *= ~self._idle
        return taken


@lru_cache(maxsize=64)
def table_of(times: IterationTimes) -> TimesTable:
    """The arrays of a grid, made once."""
    return TimesTable(times)


def _place(axis: Floats, value: Floats) -> tuple[Ints, Floats]:
    """The point below each value, and how far it is to the next one: more than 1 beyond the last point."""
    if len(axis) == 1:
        return np.zeros(value.shape, dtype=np.int64), np.zeros(value.shape)
    low = np.minimum(np.searchsorted(axis[1:], value, side="right"), len(axis) - 2)
    return low, np.maximum((value - axis[low]) / (axis[low + 1] - axis[low]), 0.0)


def _next(axis: Floats, low: Ints) -> Ints:
    return np.minimum(low + 1, len(axis) - 1)


def _between(low: Floats, high: Floats, along: Floats) -> Floats:
    rise = high - low
    beyond = np.maximum(along - 1, 0.0)
    return np.asarray(low + rise * (along - beyond) + np.maximum(rise, 0.0) * beyond, dtype=np.float64)
