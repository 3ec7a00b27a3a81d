"""Recorded workloads: what is played is what was recorded, groups stay together, and waits are filled in from where it says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pearl.core.distribution import Distribution, constant
from pearl.errors import ProfileError
from pearl.report.trajectories import Recording, read_recording
from pearl.sim.recorded import RecordedWorkload
from pearl.sim.script import ScriptTurn, script_of
from pearl.sim.workload import profile_of

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "workloads"


def turn(new: int, generated: int, env_s: float | None = 0.0, **more: float) -> Mapping[str, object]:
    return {"input_tokens": new, "output_tokens": generated, "env_s": env_s, **more}


def recording(folder: Path, *trajectories: Sequence[Mapping[str, object]], groups: str = "") -> Recording:
    """`groups`: a letter for each trajectory."""
    lines = [
        json.dumps({"turns": turns, **({"group": groups[number]} if groups else {})})
        for number, turns in enumerate(trajectories)
    ]
    path = folder / "t.jsonl"
    path.write_text("\n".join(lines))
    return read_recording(path)


def test_what_is_played_was_recorded(tmp_path: Path) -> None:
    work = RecordedWorkload(recording(tmp_path, [turn(9, 2, 1.5), turn(0, 1, 0)]), seed=0)
    assert work.script(3, 4) == script_of((ScriptTurn(9, 2, 1.5), ScriptTurn(0, 1, 0.0)))
    assert (work.waits, work.grouped) == ("recorded", False)


def test_single_trajectories_are_drawn_alike_often(tmp_path: Path) -> None:
    """4,000 draws of 4: each 1,000 times, give or take five times 27."""
    work = RecordedWorkload(recording(tmp_path, *([turn(number, 1)] for number in range(1, 5))), seed=0)
    drawn = Counter(work.script(group, attempt).starts[0] for group in range(1000) for attempt in range(4))
    assert set(drawn) == {1, 2, 3, 4}
    assert all(abs(count - 1000) < 140 for count in drawn.values())


def test_attempts_of_a_group_are_attempts_at_a_task(tmp_path: Path) -> None:
    """Tasks a (1, 2, 3) and b (4, 5): each attempt once before any is played again."""
    found = recording(tmp_path, *([turn(number, 1)] for number in range(1, 6)), groups="aaabb")
    work = RecordedWorkload(found, seed=0)
    assert work.grouped
    tasks, orders = Counter[int](), set()
    for group in range(300):
        drawn = [work.script(group, attempt).starts[0] for attempt in range(6)]
        size = 3 if drawn[0] <= 3 else 2
        for first in range(0, 6, size):
            assert sorted(drawn[first : first + size]) == ([1, 2, 3] if size == 3 else [4, 5])
        tasks[size] += 1
        orders.add(tuple(drawn))
    assert abs(tasks[3] - 150) < 45
    assert len(orders) > 20


def test_tasks_tried_once_are_no_groups(tmp_path: Path) -> None:
    """Else all attempts of a group would be the same trajectory."""
    work = RecordedWorkload(recording(tmp_path, [turn(1, 1)], [turn(2, 1)], groups="ab"), seed=0)
    assert not work.grouped
    assert {work.script(0, attempt).starts[0] for attempt in range(50)} == {1, 2}


def test_order_of_asking_does_not_matter(tmp_path: Path) -> None:
    found = recording(tmp_path, *([turn(number, 1, None)] for number in range(1, 5)), groups="aabb")
    waits = Distribution((1.0, 2.0, 3.0), (0.2, 0.3, 0.5))
    one, two = (RecordedWorkload(found, seed=7, env_s=waits) for _ in range(2))
    places = [(group, attempt) for group in range(9) for attempt in range(5)]
    made = {place: one.script(*place) for place in places}
    assert {place: two.script(*place) for place in reversed(places)} == made
    other = RecordedWorkload(found, seed=8, env_s=waits)
    assert {place: other.script(*place) for place in places} != made


class TestWaits:
    def test_from_what_was_recorded(self, tmp_path: Path) -> None:
        """Three known waits, 2 s twice: 4,000 others are 2 s two times of three."""
        found = recording(tmp_path, [turn(1, 1, 2), turn(1, 1, None), turn(1, 1, 8), turn(1, 1, 2)])
        work = RecordedWorkload(found, seed=0, env_s=constant(99))
        assert work.waits == "recorded, but for 1 of 4 turns: drawn from the others"
        drawn = Counter(work.script(group, 0).turns[1].env_s for group in range(4000))
        assert set(drawn) == {2.0, 8.0}
        assert drawn[2.0] / 4000 == pytest.approx(2 / 3, abs=0.04)
        assert [turn.env_s for turn in work.script(5, 5).turns[2:]] == [8.0, 2.0]

    def test_from_a_distribution(self, tmp_path: Path) -> None:
        work = RecordedWorkload(
            recording(tmp_path, [turn(1, 1, None)] * 2),
            seed=0,
            env_s=Distribution((0.5, 4.0), (0.75, 0.25)),
            env_source="somewhere",
        )
        assert work.waits == "not recorded: somewhere"
        drawn = Counter(turn.env_s for group in range(2000) for turn in work.script(group, 0).turns)
        assert set(drawn) == {0.5, 4.0}
        assert drawn[4.0] / 4000 == pytest.approx(0.25, abs=0.04)

    def test_from_nowhere(self, tmp_path: Path) -> None:
        work = RecordedWorkload(recording(tmp_path, [turn(1, 1, None)]), seed=0)
        assert work.script(0, 0).turns[0].env_s == 0.0
        assert work.waits == "not recorded: 0: give env_s"

    def test_lower_bounds(self, tmp_path: Path) -> None:
        found = recording(tmp_path, [turn(1, 1, 3, env_lo_s=1), turn(1, 1, 4), turn(1, 1, None, env_lo_s=2)])
        low = RecordedWorkload(found, seed=0, lower_bound=True)
        assert [turn.env_s for turn in low.script(0, 0).turns] == [1.0, 4.0, 2.0]
        assert low.waits == "recorded"
        first, second, third = RecordedWorkload(found, seed=0).script(0, 0).turns
        assert (first.env_s, second.env_s) == (3.0, 4.0)
        assert third.env_s in (3.0, 4.0)


class TestRefused:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([turn(0, 1)], r"script: turn 0: input_tokens: got 0, want >= 1"),
            ([turn(1, 1), turn(1, 0)], r"script: turn 1: output_tokens: got 0, want >= 1"),
        ],
    )
    def test_what_cannot_be_played(self, tmp_path: Path, bad: Sequence[Mapping[str, object]], message: str) -> None:
        with pytest.raises(ProfileError, match=rf"t\.jsonl: line 2: {message}$"):
            RecordedWorkload(recording(tmp_path, [turn(1, 1)], bad), seed=0)

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            ("a", None, "group: got none, want one as on the first line"),
            (None, "a", "group: got a, want none as on the"),
        ],
    )
    def test_groups_here_and_there(self, tmp_path: Path, first: str | None, second: str | None, message: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(json.dumps({"group": group, "turns": [turn(1, 1)]}) for group in (first, second)))
        with pytest.raises(ProfileError, match=rf"t\.jsonl: line 2: {message}"):
            RecordedWorkload(read_recording(path), seed=0)


@pytest.mark.parametrize(
    ("name", "grouped"), [("swe_claudecode_glm47flash", False), ("tau_airline_gpt4o", True), ("webshop_react", False)]
)
def test_shared_recordings(name: str, grouped: bool) -> None:
    """What is played has the mean of what was recorded: 3,000 draws know turns to 1-2 %."""
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("no shared/data beside the project")
    found = read_recording(path)
    work = RecordedWorkload(found, seed=1, env_s=constant(0.1))
    assert work.grouped is grouped
    recorded = sum(len(trajectory.turns) for trajectory in found.trajectories) / len(found.trajectories)
    played = profile_of(work.script(group, attempt) for group in range(750) for attempt in range(4))
    assert played.turns.mean == pytest.approx(recorded, rel=0.05)
