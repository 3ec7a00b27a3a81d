"""Recipes to simulate: each says how to run it and what to expect, and runs, at a fraction of its length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pearl.cli.compare import POLICIES
from pearl.cli.main import app
from pearl.cli.recipes import load_arguments
from pearl.cli.simulate import CHECKS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "sim").glob("*.toml"))
FRACTION = (
    *("rollout.groups_per_batch=1", "rollout.group_size=4", "rollout.max_turns=4", "run.steps=2"),
    *("faults.environment_faults_per_h=0",),
)


def header(path: Path) -> str:
    return "\n".join(line for line in path.read_text(encoding="utf-8").split("\n\n")[0].splitlines())


def test_there_are_some() -> None:
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_says_how_to_run_it_and_what_to_expect(path: Path) -> None:
    said, name = header(path), f"recipes/sim/{path.name}"
    commands = re.findall(r"^#     pearl (\w+) (\S+)(?: --policies (\S+))?$", said, re.MULTILINE)
    assert [command[:2] for command in commands] == [("simulate", name), ("compare", name)]
    policies = commands[1][2].split(",")
    assert {policy.partition(":")[0] for policy in policies} <= set(POLICIES)
    expected = said.split("What to expect: ")[1]
    # A figure for each policy that it compares.
    for policy in policies:
        assert re.search(rf"{re.escape(policy)} [\d,]+", expected), policy
    assert re.search(r"tokens/s", expected)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    arguments = ["simulate", str(path), *FRACTION, f"run.root={tmp_path}", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["steps"], found["trained_twice"]) == (2, 0)
    assert found["tokens_per_s"] > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_is_sound_as_it_is(path: Path) -> None:
    recipe = load_arguments([str(path)], checks=CHECKS).recipe
    assert recipe.run.name.startswith("sim-")
