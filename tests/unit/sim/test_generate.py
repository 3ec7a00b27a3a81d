"""Synthetic workloads: distributions come out as they went in, attempts are alike as asked, order of asking does not matter."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.workload import WorkloadProfile
from pearl.errors import ProfileError
from pearl.sim.generate import MOST_TURNS, Likeness, SyntheticWorkload
from pearl.sim.presets import preset
from pearl.sim.script import Script, script_of
from pearl.sim.workload import profile_of

PROFILE = WorkloadProfile(
    turns=Distribution((1.0, 4.0, 20.0), (0.25, 0.5, 0.25)),
    prompt_tokens=Distribution((50.0, 70.0), (0.5, 0.5)),
    new_tokens=Distribution((0.0, 10.0, 300.0), (0.5, 0.4, 0.1)),
    generated_tokens=Distribution((2.0, 9.5, 100.0), (0.3, 0.6, 0.1)),
    env_s=Distribution((0.0, 0.125, 30.0), (0.6, 0.35, 0.05)),
)


def scripts(
    likeness: Likeness | None = None, groups: int = 600, size: int = 4, **changes: object
) -> list[list[Script]]:
    work = SyntheticWorkload(replace(PROFILE, **changes), seed=5, likeness=likeness)  # type: ignore[arg-type]
    return [[work.script(group, attempt) for attempt in range(size)] for group in range(groups)]


def share_of(values: list[float], value: float) -> float:
    return sum(each == value for each in values) / len(values)


@pytest.mark.parametrize("likeness", [None, Likeness(turns=0.9, generated=0.6, new=0.3)])
def test_distributions_are_those_of_the_profile(likeness: Likeness | None) -> None:
    """4,000 tasks of one attempt: a share of them is known to 0.04, and one of 29,000 turns to 0.01. 9.5 is 9 or 10."""
    made = [group[0] for group in scripts(likeness, groups=4000, size=1)]
    turns = [turn for script in made for turn in script.turns]
    later = [float(turn.input_tokens) for script in made for turn in script.turns[1:]]
    for values, shares, error in (
        ([float(len(script.turns)) for script in made], {1: 0.25, 4: 0.5, 20: 0.25}, 0.04),
        ([float(script.turns[0].input_tokens) for script in made], {50: 0.5, 70: 0.5}, 0.04),
        (later, {0: 0.5, 10: 0.4, 300: 0.1}, 0.015),
        ([float(turn.output_tokens) for turn in turns], {2: 0.3, 9: 0.3, 10: 0.3, 100: 0.1}, 0.015),
        ([turn.env_s for turn in turns], {0: 0.6, 0.125: 0.35, 30: 0.05}, 0.015),
    ):
        assert set(values) == set(shares)
        for value, share in shares.items():
            assert share_of(values, value) == pytest.approx(share, abs=error)


def test_a_refit_finds_the_profile_again() -> None:
    """Theta follows: 6.3 tokens at 10 ms, then 1.54 s."""
    found = profile_of([group[0] for group in scripts(groups=4000, size=1)])
    for name in ("turns", "prompt_tokens", "new_tokens", "generated_tokens", "env_s"):
        assert getattr(found, name).mean == pytest.approx(getattr(PROFILE, name).mean, rel=0.05), name
    generated_tokens, env_s = 0.6 + 5.7 + 10, 0.04375 + 1.5
    assert found.theta == pytest.approx(env_s / (generated_tokens * 0.01), rel=0.1)


def test_scripts_are_sound() -> None:
    for script in (script for group in scripts(groups=30) for script in group):
        assert script == script_of(script.turns)
        turn = script.turns[0]
        assert type(turn.input_tokens) is type(turn.output_tokens) is int
        assert type(turn.env_s) is float
        assert all(type(start) is int for start in script.starts)


def test_attempts_share_their_prompt_and_differ() -> None:
    groups = scripts(groups=40, turns=constant(20))
    assert all(len({script.turns[0].input_tokens for script in group}) == 1 for group in groups)
    assert len({script.turns for group in groups for script in group}) == 160


def test_nothing_alike_and_all_alike() -> None:
    """With everything in common only waits are an attempt's own."""
    all_alike = scripts(Likeness(turns=1, generated=1, new=1), groups=40)
    for group in all_alike:
        assert len({tuple((t.input_tokens, t.output_tokens) for t in script.turns) for script in group}) == 1
    assert any(len({script.turns for script in group}) > 1 for group in all_alike)
    lengths = np.array([[len(script.turns) for script in group] for group in scripts(groups=1500)])
    assert abs(np.corrcoef(lengths[:, 0], lengths[:, 1])[0, 1]) < 0.1


@pytest.mark.parametrize("alike", [0.3, 0.8])
@pytest.mark.parametrize("name", ["turns", "generated", "new"])
def test_attempts_are_alike_as_much_as_asked(name: str, alike: float) -> None:
    """Of a value with two equally likely outcomes, both attempts get the same one with probability 1/2 + asin(a) / pi."""
    halves = {"turns": Distribution((3.0, 4.0), (0.5, 0.5)), "new": Distribution((1.0, 2.0), (0.5, 0.5))}
    groups = scripts(
        Likeness(**{name: alike}),
        groups=2500,
        size=2,
        turns=halves["turns"],
        new_tokens=halves["new"],
        generated_tokens=halves["new"],
    )
    pairs = {
        "turns": [(len(a.turns), len(b.turns)) for a, b in groups],
        "generated": [(a.turns[1].output_tokens, b.turns[1].output_tokens) for a, b in groups],
        "new": [(a.turns[2].input_tokens, b.turns[2].input_tokens) for a, b in groups],
    }
    for other, seen in pairs.items():
        want = 0.5 + np.arcsin(alike if other == name else 0.0) / np.pi
        assert np.mean([a == b for a, b in seen]) == pytest.approx(want, abs=0.05), other


def test_order_of_asking_does_not_matter() -> None:
    work, again = (SyntheticWorkload(PROFILE, seed=9, likeness=Likeness(generated=0.5)) for _ in range(2))
    places = [(group, attempt) for group in range(6) for attempt in range(3)]
    made = {place: work.script(*place) for place in places}
    assert {place: again.script(*place) for place in reversed(places)} == made
    assert SyntheticWorkload(PROFILE, seed=10).script(0, 0) != made[0, 0]


def test_the_same_in_every_process() -> None:
    code = "from pearl.sim.presets import preset; print(preset('tau', seed=3).script(7, 1))"
    seen = []
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        seen.append(done.stdout)
    assert seen == [f"{preset('tau', seed=3).script(7, 1)}\n"] * 2


@given(
    st.lists(st.floats(1, 30), min_size=1, max_size=5, unique=True),
    st.lists(st.floats(0, 1e15), min_size=1, max_size=5, unique=True),
    st.floats(0, 9),
)
@settings(max_examples=50, deadline=None)
def test_any_profile_can_be_played(turns: list[float], numbers: list[float], overhead_s: float) -> None:
    """Zeros become the least that a script allows; the overhead of a turn counts as waiting."""

    profile = WorkloadProfile(
        turns=distribution_of(turns),
        prompt_tokens=distribution_of(numbers),
        new_tokens=distribution_of(numbers),
        generated_tokens=distribution_of([*numbers, 1.0]),
        env_s=distribution_of(numbers),
        turn_overhead_s=overhead_s,
    )
    script = SyntheticWorkload(profile, seed=0).script(3, 4)
    assert script == script_of(script.turns)
    assert all(turn.env_s >= overhead_s for turn in script.turns)


class TestRefused:
    @pytest.mark.parametrize("name", ["turns", "generated", "new"])
    @pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
    def test_likeness(self, name: str, value: float) -> None:
        with pytest.raises(ProfileError, match=rf"^likeness: {name}: got {value}, want 0\.\.1$"):
            Likeness(**{name: value})

    def test_too_many_turns(self) -> None:
        SyntheticWorkload(replace(PROFILE, turns=constant(MOST_TURNS)), seed=0)
        with pytest.raises(ProfileError, match=r"^workload: turns: got 100001, want <= 100000$"):
            SyntheticWorkload(replace(PROFILE, turns=constant(MOST_TURNS + 1)), seed=0)

    def test_what_is_forgotten(self) -> None:
        with pytest.raises(ProfileError, match=r"^workload: retained: got 0\.5, want 1 \(a context keeps all"):
            SyntheticWorkload(replace(PROFILE, retained=0.5), seed=0)


def test_the_mean_of_a_group_stays_where_it_is() -> None:
    """What is alike changes how groups differ, not the mean of all."""
    means = [
        statistics.mean(len(script.turns) for group in scripts(likeness, groups=2000, size=2) for script in group)
        for likeness in (None, Likeness(turns=0.9))
    ]
    assert means == [pytest.approx(7.25, rel=0.06)] * 2
