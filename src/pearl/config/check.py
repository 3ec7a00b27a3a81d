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
    return (*problems, *_fleet_problems(recipe), *_elastic_problems(recipe))


def check_plan(recipe: Recipe) -> tuple[Problem, ...]:
    """What planning a fleet needs besides: GPUs that rollout has for itself, enough for a worker."""
    fleet, smallest = recipe.fleet, min(recipe.fleet.tp)
    dedicated = fleet.reserved_gpus + fleet.external_gpus
    if dedicated >= smallest:
        return ()
    return (
        Problem(
            keys=("fleet.reserved_gpus", "fleet.external_gpus", "fleet.tp"),
            text=f"got {dedicated} with fleet.external_gpus, want >= {smallest} (a rollout worker of the smallest fleet.tp "
            "must fit on GPUs that the trainer does not take back)",
        ),
    )


def check_simulation(recipe: Recipe) -> tuple[Problem, ...]:
    """What simulating a fleet needs besides: GPUs, and random availability that can be drawn."""
    fleet, simulation = recipe.fleet, recipe.simulation
    if not (fleet.reserved_gpus or fleet.external_gpus or fleet.training_gpus):
        return (
            Problem(
                keys=("fleet.reserved_gpus", "fleet.external_gpus", "fleet.training_gpus"),
                text="got no GPUs, want some of one kind > 0",
            ),
        )
    mean = simulation.mean_external_gpus
    if mean is None:
        return ()
    problems: list[Problem] = []
    if simulation.availability is not None:
        text = f"got {mean:g} beside simulation.availability, want one of them (a trace, or GPUs that come and go at random)"
        problems.append(Problem(keys=("simulation.mean_external_gpus", "simulation.availability"), text=text))
    if mean > fleet.external_gpus:
        text = f"got {mean:g}, want <= fleet.external_gpus = {fleet.external_gpus}"
        problems.append(Problem(keys=("simulation.mean_external_gpus", "fleet.external_gpus"), text=text))
    elif fleet.external_gpus % simulation.change_gpus:
        text = f"got {simulation.change_gpus}, want a divisor of fleet.external_gpus = {fleet.external_gpus}"
        problems.append(Problem(keys=("simulation.change_gpus", "fleet.external_gpus"), text=text))
    return tuple(problems)


def _fleet_problems(recipe: Recipe) -> list[Problem]:
    fleet = recipe.fleet
    problems: list[Problem] = []
    low, high = min(fleet.tp), max(fleet.tp)
    if low < 1 or len(set(fleet.tp)) < len(fleet.tp):
        problems.append(
            Problem(keys=("fleet.tp",), text=f"got {list(fleet.tp)}, want integers >= 1, each of them once")
        )
    if high > fleet.gpus_per_node:
        problems.append(
            Problem(
                keys=("fleet.tp", "fleet.gpus_per_node"),
                text=f"got {high}, want <= fleet.gpus_per_node = {fleet.gpus_per_node} (a worker never spans nodes)",
            )
        )
    if fleet.gpus_per_node % fleet.overlap_tp:
        problems.append(
            Problem(
                keys=("fleet.overlap_tp", "fleet.gpus_per_node"),
                text=f"got {fleet.overlap_tp}, want a divisor of fleet.gpus_per_node = {fleet.gpus_per_node} "
                "(workers on training GPUs share whole nodes out)",
            )
        )
    if fleet.training_gpus % fleet.overlap_tp:
        problems.append(
            Problem(
                keys=("fleet.training_gpus", "fleet.overlap_tp"),
                text=f"got {fleet.training_gpus}, want a multiple of fleet.overlap_tp = {fleet.overlap_tp} "
                "(each training GPU belongs to one worker)",
            )
        )
    if fleet.training_gpus and fleet.overlap_tp not in fleet.tp:
        problems.append(
            Problem(
                keys=("fleet.overlap_tp", "fleet.tp"),
                text=f"got {fleet.overlap_tp}, want one of fleet.tp = {list(fleet.tp)}",
            )
        )
    strange = [list(pair) for pair in fleet.tp_pairs or () if not set(fleet.tp) >= set(pair)]
    if strange:
        problems.append(
            Problem(
                keys=("fleet.tp_pairs", "fleet.tp"),
                text=f"got {strange[0]}, want pairs of numbers in fleet.tp = {list(fleet.tp)}",
            )
        )
    return problems


def _elastic_problems(recipe: Recipe) -> list[Problem]:
    elastic = recipe.elastic
    needs = {
        "static": ("shape", elastic.shape != "", 'got "", want a shape, e.g. "2P6D@tp2"'),
        "roll_large": ("fixed_gpus", elastic.fixed_gpus is not None, "not set, want an integer >= 1"),
        "rlboost_plus_seeding": ("seeding_s", elastic.seeding_s > 0, "got 0, want a number > 0"),
    }
    key, is_set, text = needs.get(elastic.policy, ("", True, ""))
    if is_set:
        return []
    return [
        Problem(
            keys=(f"elastic.{key}", "elastic.policy"),
            text=f'{text} (elastic.policy = "{elastic.policy}" needs it)',
        )
    ]
