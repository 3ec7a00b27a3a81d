"""Progress of a batch: shares by hand, every bound on both sides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pearl.core.progress import Progress, fresh_batch
from pearl.errors import ProfileError


def progress(**changes: object) -> Progress:
    values: dict[str, object] = {"batch_trajectories": 8, "unfinished": 6, "live_groups": 4, "needed_groups": 2}
    return Progress(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_in_flight() -> None:
    found = progress(running={0: 3, 2: 4, 7: 1})
    assert found.in_flight == 8
    assert found.fraction == 0.75
    assert progress().in_flight == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_trajectories": 1, "unfinished": 0},
        {"unfinished": 0},
        {"unfinished": 8},
        {"live_groups": 0, "needed_groups": 0},
        {"needed_groups": 0},
        {"needed_groups": 4},
        {"running": {0: 0}},
    ],
)
def test_the_edges_are_allowed(changes: dict[str, object]) -> None:
    found = progress(**changes)
    assert {name: getattr(found, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_trajectories": 0, "unfinished": 0}, "batch_trajectories: got 0, want >= 1"),
        ({"unfinished": -1}, r"unfinished: got -1, want 0\.\.8"),
        ({"unfinished": 9}, r"unfinished: got 9, want 0\.\.8"),
        ({"live_groups": -1}, "live_groups: got -1, want >= 0"),
        ({"needed_groups": -1}, r"needed_groups: got -1, want 0\.\.4"),
        ({"needed_groups": 5}, r"needed_groups: got 5, want 0\.\.4"),
        ({"due_groups": 5}, r"due_groups: got 5, want 0\.\.\d"),
        ({"due": {0: 10_000}}, r"due: got 10000 trajectories at turn 0, want 0\.\.\d+"),
        ({"due": {77: 1}}, r"due: got 1 trajectories at turn 77, want 0\.\.0"),
        ({"coming": -1}, "coming: got -1, want >= 0"),
        ({"coming_s": -1.0}, r"coming_s: got -1\.0, want a finite number >= 0"),
        ({"pause_s": math.nan}, "pause_s: got nan, want a finite number >= 0"),
        ({"coming_s": math.inf}, "coming_s: got inf, want a finite number >= 0"),
        ({"running": {-1: 2}}, "running: got 2 trajectories at turn -1, want numbers >= 0"),
        ({"running": {1: 1, 3: -2}}, "running: got -2 trajectories at turn 3, want numbers >= 0"),
    ],
)
def test_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=f"^progress: {message}$"):
        progress(**changes)


def test_a_fresh_batch() -> None:
    assert fresh_batch(4, 16) == Progress(
        batch_trajectories=64, unfinished=64, live_groups=4, needed_groups=4, running={0: 64}, due_groups=4, due={0: 64}
    )


def test_a_fresh_batch_beside_a_later_one() -> None:
    assert fresh_batch(4, 16, batches=2) == Progress(
        batch_trajectories=64, unfinished=64, live_groups=8, needed_groups=4, running={0: 128}
    )


@pytest.mark.parametrize(
    ("groups", "size", "batches", "name"),
    [(0, 16, 1, "batch_trajectories"), (4, 0, 1, "batch_trajectories"), (4, 16, 0, "needed_groups")],
)
def test_a_batch_of_nothing_is_refused(groups: int, size: int, batches: int, name: str) -> None:
    with pytest.raises(ProfileError, match=name):
        fresh_batch(groups, size, batches=batches)


@pytest.mark.parametrize("name", ["batch_trajectories", "unfinished", "live_groups", "needed_groups"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, True])
def test_counts_are_whole_numbers(name: str, value: float) -> None:
    with pytest.raises(ProfileError, match=rf"^progress: {name}: got {value}, want "):
        replace(fresh_batch(4, 16), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("running", [{0: math.nan}, {math.nan: 64}, {0: 1.5}, {0.5: 1}])
def test_running_is_counted_in_whole_numbers(running: dict[int, int]) -> None:
    with pytest.raises(ProfileError, match=r"^progress: running: got "):
        replace(fresh_batch(4, 16), running=running)
