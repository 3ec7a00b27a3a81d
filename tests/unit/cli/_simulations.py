"""A small recipe to simulate, for the command line's tests."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from pearl.cli.main import app

RECIPES = Path(__file__).parents[3] / "recipes" / "sim"
RECIPE = str(RECIPES / "qwen3_8b_spot.toml")
SMALL = ("rollout.groups_per_batch=1", "rollout.group_size=4", "rollout.max_turns=3", "run.steps=2")


def pearl(*arguments: str) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, list(arguments))
