"""Try a recipe's environment before a run begins: what is the matter with it is told at once, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pearl.config.recipe import Recipe
from pearl.env.bounded import BoundedCalls
from pearl.env.registry import build_environment, evaluation_params, player_factory
from pearl.errors import ConfigError, EnvironmentFault

T = TypeVar("T")


def try_environment(recipe: Recipe) -> None:
    """Construct and close the environment, and look for the hooks that the recipe needs.

    Raises:
        ConfigError: it cannot be made, raises, takes longer than `rollout.env_reset_timeout_s`, or lacks a hook.
    """
    kind, params = recipe.environment.kind, recipe.environment.params
    calls = BoundedCalls(repr(kind))

    def tried(call: Callable[[], T], what: str) -> T:
        try:
            return calls.make(call, what, recipe.rollout.env_reset_timeout_s, "rollout.env_reset_timeout_s")
        except EnvironmentFault as error:
            raise ConfigError(f"environment.kind: {error}") from error

    environment = tried(lambda: build_environment(kind, params), "construction")
    tried(environment.close, "close")
    if recipe.warmup.steps:
        tried(lambda: player_factory(kind, recipe.warmup.player), "scripted player")
    if recipe.evaluation.rollouts_per_task:
        tried(lambda: evaluation_params(kind, params), "evaluation_params")
