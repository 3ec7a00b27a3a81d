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
    rollout, engine, environment = recipe.rollout, recipe.engine, recipe.environment
    problems: list[Problem] = []
    if environment.open_at_once < rollout.group_size:
        by_process = environment.process_isolated and environment.processes < rollout.group_size
        problems.append(
            Problem(
                keys=("environment.processes" if by_process else "environment.slots", "rollout.group_size"),
                text=f"got {environment.open_at_once}, want >= rollout.group_size = {rollout.group_size} "
                "(the trajectories of a group run side by side"
                + (", and environment.process_isolated gives each a process)" if by_process else ")"),
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
    if 0 < engine.kv_budget_tokens < rollout.max_context_tokens:
        problems.append(
            Problem(
                keys=("engine.kv_budget_tokens", "rollout.max_context_tokens"),
                text=f"got {engine.kv_budget_tokens}, want 0 or >= rollout.max_context_tokens = "
                f"{rollout.max_context_tokens} (a worker must hold the longest trajectory)",
            )
        )
    if engine.time_scale != 1 and engine.pacing is None:
        problems.append(
            Problem(
                keys=("engine.time_scale", "engine.pacing"),
                text=f"got {engine.time_scale:g} without engine.pacing, want a profile there (it is what is scaled)",
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
