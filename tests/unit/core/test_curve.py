"""Crossings of curves whose inverse is known."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.core.curve import CLOSER, STEPS, Curve, crossing
from pearl.core.distribution import Floats
from pearl.core.makespan import Ints
from pearl.core.stations import POINTS

GRID = np.concatenate(([0.0], np.geomspace(0.01, 100.0, POINTS - 1)))
POPULATIONS = np.array([0.0, 1e-3, 0.01, 0.3, 1.0, 7.0, 50.0, 100.0]).reshape(2, 2, 2)


def curve(bend: float = 0.0, most: float = np.inf, asked: list[Ints] | None = None) -> Curve:
    """Of n sequences min(n, most) run, two turns per second each; n + bend X^2 trajectories."""

    def at(place: Ints) -> tuple[Floats, Floats]:
        if asked is not None:
            asked.append(place)
        return GRID[place], np.minimum(GRID[place], most)

    def totals(n: Floats, running: Floats) -> tuple[Floats, Floats]:
        return n + bend * (2 * running) ** 2, 2 * running

    return Curve(at=at, totals=totals, most=np.full((2, 2, 1), most))


def test_straight_lines_are_exact() -> None:
    assert crossing(curve(), POPULATIONS) == pytest.approx(2 * POPULATIONS, rel=1e-12, abs=1e-12)


def test_beyond_the_grid_it_is_as_at_its_end() -> None:
    assert crossing(curve(), np.full((1, 1, 1), 1e6)) == pytest.approx(200.0)


@pytest.mark.parametrize("most", [0.02, 0.5, 1.234, 60.0])
def test_where_no_more_run_the_bend_is_where_it_is(most: float) -> None:
    """Also between two points of the grid."""
    populations = np.concatenate((POPULATIONS.ravel(), [most, most * 1.001, most * 0.999, most])).reshape(2, 2, 3)
    assert crossing(curve(most=most), populations) == pytest.approx(2 * np.minimum(populations, most), rel=1e-9)


def test_what_bends_between_points() -> None:
    """N = n + b (2 n)^2, so X = 2 n = (sqrt(1 + 16 b N) - 1) / (4 b); a straight line between points is up to 1.1 % off."""
    bend, populations = 5.0, np.array([0.0, 0.011, 0.3, 1.0, 7.0, 50.0, 100.0, 200.0]).reshape(2, 2, 2)
    want = (np.sqrt(1 + 16 * bend * populations) - 1) / (4 * bend)
    assert crossing(curve(bend), populations) == pytest.approx(want, rel=1e-4)


def test_how_often_it_is_looked_at() -> None:
    """Halving, then both ends of an interval; what is in between is not asked for."""
    asked: list[Ints] = []
    crossing(curve(5.0, asked=asked), POPULATIONS)
    assert (POINTS, STEPS, CLOSER) == (33, (16, 8, 4, 2, 1), 2)
    assert len(asked) == len(STEPS) + 2
    low, high = asked[-2:]
    assert (high == low + 1).all()
    assert (GRID[low] + 20 * GRID[low] ** 2 <= POPULATIONS).all()
    assert (GRID[high] + 20 * GRID[high] ** 2 >= POPULATIONS).all()
