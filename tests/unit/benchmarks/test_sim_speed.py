"""The slope, and what the simulations of the benchmark are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sim_speed
from benchmarks._data import find_data
from pearl.sim.availability import recorded_availability
from pearl.sim.simulate import simulate


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_power_law(power: float) -> None:
    sizes = [100, 200, 400, 800]
    assert sim_speed.exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_the_exponent_of_two_points_is_by_hand() -> None:
    assert sim_speed.exponent([10, 1000], [1, 1000]) == pytest.approx(1.5)


def test_every_trajectory_of_the_ladder_has_its_turns(tmp_path: Path) -> None:
    recording = sim_speed._recording(tmp_path)
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    assert len(lines) == sim_speed.RECORDED
    for line in lines:
        assert len(line["turns"]) == sim_speed.TURNS
        assert sum(turn["input_tokens"] + turn["output_tokens"] for turn in line["turns"]) < sim_speed.CONTEXT_TOKENS
    run = simulate(sim_speed._batch(recording, 16))
    assert run.tally.turns == 16 * sim_speed.PER_GPU * sim_speed.TURNS
    assert dict(run.tally.ends) == {"done": 16 * sim_speed.PER_GPU}
    assert len(run.tally.steps) == 1


def test_the_segment_is_the_recorded_one_or_says_that_it_is_not(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    path, label = sim_speed._trace(find_data(empty), tmp_path)
    assert label.startswith("synthetic")
    assert max(gpus for _, gpus in recorded_availability(path)) == 12
    recipe = sim_speed._segment(path, 60)
    assert (recipe.fleet.training_gpus, recipe.fleet.reserved_gpus, recipe.fleet.external_gpus) == (16, 4, 12)
    assert recipe.elastic.policy == "pearl"


def test_quick_results_have_names_of_their_own_and_targets_in_proportion() -> None:
    spent = sim_speed.Spent(wall_s=2.0, cpu_s=1.0, virtual_s=1200, turns=1000)
    checks = sim_speed._checks(
        spent, {32: spent, 64: sim_speed.Spent(wall_s=4, cpu_s=2, virtual_s=1, turns=2000)}, 1800, "quick_"
    )
    targets = {check.name: (check.value, check.target) for check in checks if check.target}
    assert targets == {
        "quick_segment_wall_s": (2.0, "<= 2"),
        "quick_large_wall_s": (4.0, "<= 7.5"),
        "quick_growth_exponent": (pytest.approx(1.0), "<= 1.15"),
    }
