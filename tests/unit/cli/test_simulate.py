"""`pearl simulate` and `pearl compare` as their users meet them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pearl.cli.simulate import POLICIES, compare, run_simulation
from pearl.errors import ConfigError

RECIPE = str(Path(__file__).parents[3] / "recipes" / "sim" / "qwen3_8b_spot.toml")
SMALL = [RECIPE, "rollout.groups_per_batch=1", "rollout.group_size=4", "rollout.max_turns=3", "run.steps=2"]


def test_steps_are_told_as_they_end_and_then_the_sum() -> None:
    said: list[str] = []
    text = run_simulation(SMALL, as_json=False, say=said.append)
    assert [line.split()[:2] for line in said] == [["step", "1"], ["step", "2"]]
    assert text.splitlines()[0].split() == ["policy", "pearl"]


def test_json_is_all_there_is_to_read() -> None:
    said: list[str] = []
    found = json.loads(run_simulation(SMALL, as_json=True, say=said.append))
    assert said == []
    assert (found["policy"], found["steps"], found["trained_twice"], found["stalls"]) == ("pearl", 2, 0, 0)


def test_policies_are_compared_in_the_order_given() -> None:
    text = compare(SMALL, "roll, pearl", as_json=False, say=lambda _: None)
    assert [line.split()[0] for line in text.splitlines()] == ["policy", "roll", "pearl"]


@pytest.mark.parametrize(
    ("policies", "message"), [("", "got none, want some of pearl"), ("pearl,rol", "got 'rol', want")]
)
def test_policies_that_are_none(policies: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--policies: {message}"):
        compare(SMALL, policies, as_json=False, say=lambda _: None)
    assert "rlboost_plus" in POLICIES
