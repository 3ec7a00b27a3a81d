"""Iteration times in arrays are those of the profile, one by one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pearl.core.lookup import TimesTable, table_of
from pearl.core.profile import IterationTimes
from tests.platforms import linear_times


def uneven(prefill: tuple[int, ...], decoding: tuple[int, ...], contexts: tuple[int, ...], seed: int) -> IterationTimes:
    """Times without any order, so that slopes fall as well as rise."""
    rng = random.Random(seed)
    cells = tuple(tuple(tuple(rng.uniform(0.1, 9) for _ in contexts) for _ in decoding) for _ in prefill)
    return IterationTimes(prefill_tokens=prefill, decoding=decoding, context_tokens=contexts, cells_s=cells)


GRIDS = [
    uneven((0, 100, 1000), (0, 1, 8, 64), (10, 500, 4000), 1),
    uneven((0, 100), (0, 7), (10,), 2),
    uneven((0, 3, 5, 9), (0, 7), (1, 2), 3),
]


@pytest.mark.parametrize("times", GRIDS)
def test_equal_to_the_profile(times: IterationTimes) -> None:
    """On every point of the grid, half way, close to its ends and far beyond, in all combinations."""

    def around(axis: tuple[int, ...]) -> list[float]:
        halves = [(low + high) / 2 for low, high in itertools.pairwise(axis)]
        return [0.0, *axis, *halves, axis[0] + 0.3, axis[-1] - 0.3, axis[-1] + 0.3, 3.0 * axis[-1]]

    table, contexts = TimesTable(times), around(times.context_tokens)
    decoding = np.array([around(times.decoding)] * len(contexts))
    beside = table.at(decoding, np.array(contexts))
    for prefill in around(times.prefill_tokens):
        found = beside.seconds(np.array([prefill]))[0]
        want = [[times.seconds(prefill, n, context) for n in decoding[0]] for context in contexts]
        assert found == pytest.approx(np.array(want), rel=1e-12)


def test_equal_to_the_profile_at_random_points() -> None:
    rng = np.random.default_rng(4)
    times = GRIDS[0]
    for _ in range(20):
        decoding, contexts = rng.uniform(0, 100, (5, 3)), rng.uniform(0, 6000, 5)
        prefill = float(rng.uniform(0, 1500))
        want = [
            [times.seconds(prefill, n, context) for n in row] for row, context in zip(decoding, contexts, strict=True)
        ]
        assert TimesTable(times).at(decoding, contexts).seconds(np.array([prefill]))[0] == pytest.approx(
            np.array(want), rel=1e-12
        )


def test_each_slice_has_its_own_context_and_sequences() -> None:
    """A = 10 ms, 4 ms per sequence (at a context of 8192 a quarter more), 1 ms per prompt token."""
    table = TimesTable(linear_times(0.01, 0.004, 0.001, contexts=(1, 8192)))
    found = table.at(np.array([[0.0, 2.0], [1.0, 10.0]]), np.array([8192.0, 1.0])).seconds(np.array([3.0]))[0]
    want = [[0.013, 0.013 + 2 * 0.005], [0.013 + 0.004, 0.013 + 0.04]]
    assert found == pytest.approx(np.array(want), rel=1e-4)


def test_nothing_to_do_takes_no_time() -> None:
    """Only where nobody decodes and nothing is prefilled."""
    beside = TimesTable(linear_times(0.01, 0.004, 0.001)).at(np.array([[0.0, 1.0]]), np.array([5.0]))
    assert beside.seconds(np.array([0.0]))[0].tolist() == [[0.0, pytest.approx(0.014)]]
    assert beside.seconds(np.array([1.0]))[0] == pytest.approx(np.array([[0.011, 0.015]]))


def test_a_table_is_made_once() -> None:
    assert table_of(GRIDS[0]) is table_of(uneven((0, 100, 1000), (0, 1, 8, 64), (10, 500, 4000), 1))
    assert table_of(GRIDS[0]) is not table_of(GRIDS[1])
