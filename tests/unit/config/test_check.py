"""Checks across sections, at their edges."""

import pytest

from pearl.config.check import check_recipe
from pearl.config.recipe import Recipe


def recipe(**sections: dict[str, object]) -> Recipe:
    environment = {"kind": "k", **sections.pop("environment", {})}
    return Recipe.model_validate({"model": {"path": "m"}, "environment": environment, **sections})


def test_the_defaults_are_sound() -> None:
    assert check_recipe(recipe()) == ()


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"environment": {"slots": 8}, "rollout": {"group_size": 8}}, None),
        ({"environment": {"slots": 7}, "rollout": {"group_size": 8}}, "environment.slots"),
        (
            {"environment": {"process_isolated": True, "processes": 7}, "rollout": {"group_size": 8}},
            "environment.processes",
        ),
        (
            {"environment": {"process_isolated": True, "processes": 8, "slots": 7}, "rollout": {"group_size": 8}},
            "environment.slots",
        ),
        ({"environment": {"process_isolated": True, "processes": 8}, "rollout": {"group_size": 8}}, None),
        ({"engine": {"max_context_tokens": 300}, "rollout": {"max_context_tokens": 300}}, None),
        ({"engine": {"max_context_tokens": 299}, "rollout": {"max_context_tokens": 300}}, "engine.max_context_tokens"),
        ({"engine": {"kv_budget_tokens": 256}}, None),
        ({"engine": {"kv_budget_tokens": 255}}, "engine.kv_budget_tokens"),
        ({"engine": {"kv_budget_tokens": 1}, "rollout": {"max_context_tokens": 100}}, "engine.kv_budget_tokens"),
        ({"engine": {"time_scale": 2}}, "engine.time_scale"),
        ({"engine": {"time_scale": 2, "pacing": "p.json"}}, None),
        ({"sampling": {"max_new_tokens": 255}}, None),
        ({"sampling": {"max_new_tokens": 256}}, "sampling.max_new_tokens"),
    ],
)
def test_edges(sections: dict[str, dict[str, object]], keys: str | None) -> None:
    assert [problem.keys[0] for problem in check_recipe(recipe(**sections))] == ([keys] if keys else [])


def test_all_problems_are_told() -> None:
    broken = recipe(environment={"slots": 1}, engine={"max_context_tokens": 100}, sampling={"max_new_tokens": 256})
    assert len(check_recipe(broken)) == 3
