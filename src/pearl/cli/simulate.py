"""`pearl simulate` and `pearl compare`: a recipe on virtual time, under its policy or under several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import get_args

from pearl.cli.recipes import load_arguments
from pearl.config.check import check_plan
from pearl.config.elastic import ElasticConfig
from pearl.config.recipe import Recipe
from pearl.errors import ConfigError
from pearl.pipeline.training_loop import StepOutcome
from pearl.sim.simulate import Simulated, simulate
from pearl.sim.summary import comparison_text, summary_json, summary_text
from pearl.units import format_duration

POLICIES: tuple[str, ...] = get_args(ElasticConfig.model_fields["policy"].annotation)


def run_simulation(arguments: Sequence[str], *, as_json: bool, say: Callable[[str], None]) -> str:
    """Simulate a recipe; `say` hears of each step unless the result is JSON.

    Raises:
        UserError: the recipe is not fine, or a file that it names is not.
        RunFailed: as a real run does.
    """
    recipe = load_arguments(arguments, checks=(check_plan,)).recipe
    run = simulate(recipe, step=None if as_json else lambda outcome: say(_step(outcome)))
    return json.dumps(summary_json(run), indent=2, allow_nan=False) if as_json else summary_text(run)


def compare(arguments: Sequence[str], policies: str, *, as_json: bool, say: Callable[[str], None]) -> str:
    """Simulate a recipe under several policies.

    Raises:
        UserError: the recipe is not fine, or a policy is none.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError("--policies: got none, want some of " + ", ".join(POLICIES))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policies: got {name!r}, want some of {', '.join(POLICIES)}")
    recipes = [load_arguments([*arguments, f'elastic.policy="{name}"'], checks=(check_plan,)).recipe for name in names]
    runs = [_simulated(recipe, say, quiet=as_json) for recipe in recipes]
    if as_json:
        return json.dumps([summary_json(run) for run in runs], indent=2, allow_nan=False)
    return comparison_text(runs)


def _simulated(recipe: Recipe, say: Callable[[str], None], *, quiet: bool) -> Simulated:
    run = simulate(recipe)
    if not quiet:
        say(f"{run.policy}: {run.tokens_per_s:,.0f} tokens/s over {format_duration(run.seconds)}")
    return run


def _step(outcome: StepOutcome) -> str:
    report = outcome.report
    return (
        f"step {report.version}  at {format_duration(outcome.at_s)}  waited {format_duration(outcome.wait_s)}  "
        f"trained {format_duration(report.train_s)}  {report.trained_tokens:,} tokens"
    )
