"""Checks across the sections of a recipe: pure functions of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.config.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Values that are fine one by one and cannot go together."""

    keys: tuple[str, ...]
    """Dotted keys that have a part in it; the first is the one to change."""
    text: str
    """`got ..., want ... (why)`."""


def check_recipe(recipe: Recipe) -> tuple[Problem, ...]:
    """Every contradiction between sections; empty for a sound recipe."""
    rollout, engine = recipe.rollout, recipe.engine
    problems: list[Problem] = []
    if recipe.environment.slots < rollout.group_size:
        problems.append(
            Problem(
                keys=("environment.slots", "rollout.group_size"),
                text=f"got {recipe.environment.slots}, want >= rollout.group_size = {rollout.group_size} "
                "(the trajectories of a group run side by side)",
            )
        )
    if engine.max_context_tokens < rollout.max_context_tokens:
        problems.append(
            Problem(
                keys=("engine.max_context_tokens", "rollout.max_context_tokens"),
                text=f"got {engine.max_context_tokens}, want >= rollout.max_context_tokens = "
                f"{rollout.max_context_tokens} (a worker must hold the longest trajectory)",
            )
        )
    if recipe.sampling.max_new_tokens >= rollout.max_context_tokens:
        problems.append(
            Problem(
                keys=("sampling.max_new_tokens", "rollout.max_context_tokens"),
                text=f"got {recipe.sampling.max_new_tokens}, want < rollout.max_context_tokens = "
                f"{rollout.max_context_tokens} (a turn needs room for its prompt)",
            )
        )
    return tuple(problems)
