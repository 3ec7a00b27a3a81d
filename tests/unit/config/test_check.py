"""Checks across sections, at their edges."""

import pytest

from pearl.config.check import check_plan, check_recipe, check_simulation
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
        ({"fleet": {"tp": (1, 2, 8)}}, None),
        ({"fleet": {"tp": (1, 9)}}, "fleet.tp"),
        ({"fleet": {"tp": (8, 4), "gpus_per_node": 4}}, "fleet.tp"),
        ({"fleet": {"tp": (0, 1)}}, "fleet.tp"),
        ({"fleet": {"tp": (2, 1, 2)}}, "fleet.tp"),
        ({"fleet": {"overlap_tp": 8}}, None),
        ({"fleet": {"overlap_tp": 3}}, "fleet.overlap_tp"),
        ({"fleet": {"overlap_tp": 16}}, "fleet.overlap_tp"),
        ({"fleet": {"overlap_tp": 4, "training_gpus": 12, "tp": (1, 4)}}, None),
        ({"fleet": {"overlap_tp": 4, "training_gpus": 10, "tp": (4,)}}, "fleet.training_gpus"),
        ({"fleet": {"overlap_tp": 2, "training_gpus": 2}}, "fleet.overlap_tp"),
        ({"fleet": {"overlap_tp": 2, "training_gpus": 0}}, None),
        ({"fleet": {"tp": (1, 2), "tp_pairs": [(1, 2), (2, 2)]}}, None),
        ({"fleet": {"tp": (1, 2), "overlap_tp": 4, "tp_pairs": [(1, 2), (2, 4)]}}, "fleet.tp_pairs"),
        ({"fleet": {"tp": (1, 2), "overlap_tp": 4, "tp_pairs": [(1, 2), (1, 8)]}}, "fleet.tp_pairs"),
        ({"fleet": {"tp": (2,), "tp_pairs": []}}, None),
        ({"elastic": {"policy": "static", "shape": "2C"}}, None),
        ({"elastic": {"policy": "static"}}, "elastic.shape"),
        ({"elastic": {"policy": "roll_large", "fixed_gpus": 1}}, None),
        ({"elastic": {"policy": "roll_large"}}, "elastic.fixed_gpus"),
        ({"elastic": {"policy": "rlboost_plus_seeding", "seeding_s": 0.1}}, None),
        ({"elastic": {"policy": "rlboost_plus_seeding"}}, None),
        ({"elastic": {"policy": "rlboost_plus_seeding", "seeding_s": 0}}, "elastic.seeding_s"),
        ({"elastic": {"policy": "pearl", "shape": "2C", "fixed_gpus": 3, "seeding_s": 9}}, None),
        ({"sampling": {"max_new_tokens": 255}}, None),
        ({"sampling": {"max_new_tokens": 256}}, "sampling.max_new_tokens"),
    ],
)
def test_edges(sections: dict[str, dict[str, object]], keys: str | None) -> None:
    assert [problem.keys[0] for problem in check_recipe(recipe(**sections))] == ([keys] if keys else [])


def test_all_problems_are_told() -> None:
    broken = recipe(environment={"slots": 1}, engine={"max_context_tokens": 100}, sampling={"max_new_tokens": 256})
    assert len(check_recipe(broken)) == 3


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"fleet": {"tp": (2, 0)}}, "got [2, 0], want integers >= 1, each of them once"),
        (
            {"fleet": {"tp": (1, 16)}},
            "got 16, want <= fleet.gpus_per_node = 8 (a worker never spans nodes)",
        ),
        (
            {"fleet": {"overlap_tp": 3}},
            "got 3, want a divisor of fleet.gpus_per_node = 8 (workers on training GPUs share whole nodes out)",
        ),
        (
            {"fleet": {"overlap_tp": 2, "training_gpus": 3, "tp": (2,)}},
            "got 3, want a multiple of fleet.overlap_tp = 2 (each training GPU belongs to one worker)",
        ),
        (
            {"fleet": {"tp": (1, 2), "tp_pairs": [(2, 1), (2, 4)]}},
            "got [2, 4], want pairs of numbers in fleet.tp = [1, 2]",
        ),
        (
            {"fleet": {"overlap_tp": 2, "training_gpus": 2, "tp": (1, 4)}},
            "got 2, want one of fleet.tp = [1, 4]",
        ),
        (
            {"elastic": {"policy": "static"}},
            'got "", want a shape, e.g. "2P6D@tp2" (elastic.policy = "static" needs it)',
        ),
        (
            {"elastic": {"policy": "roll_large"}},
            'not set, want an integer >= 1 (elastic.policy = "roll_large" needs it)',
        ),
    ],
)
def test_messages_of_fleet_and_policy(sections: dict[str, dict[str, object]], text: str) -> None:
    assert [problem.text for problem in check_recipe(recipe(**sections))] == [text]


@pytest.mark.parametrize(
    ("fleet", "sound"),
    [
        ({}, False),
        ({"training_gpus": 8}, False),
        ({"reserved_gpus": 1}, True),
        ({"external_gpus": 1}, True),
        ({"reserved_gpus": 1, "external_gpus": 1, "tp": (4, 2)}, True),
        ({"reserved_gpus": 1, "tp": (4, 2)}, False),
    ],
)
def test_a_plan_needs_gpus_that_fit_a_worker(fleet: dict[str, object], sound: bool) -> None:
    found = check_plan(recipe(fleet=fleet))
    assert [problem.keys[0] for problem in found] == ([] if sound else ["fleet.reserved_gpus"])


def test_what_a_plan_lacks_is_told() -> None:
    (problem,) = check_plan(recipe(fleet={"reserved_gpus": 1, "tp": (4, 2)}))
    assert problem.text.startswith("got 1 with fleet.external_gpus, want >= 2 (a rollout worker of the smallest")


@pytest.mark.parametrize(
    ("fleet", "simulation", "keys"),
    [
        ({}, {}, ["fleet.reserved_gpus"]),
        ({"reserved_gpus": 1}, {}, []),
        ({"external_gpus": 4}, {"mean_external_gpus": 4, "change_gpus": 2}, []),
        ({"external_gpus": 4}, {"mean_external_gpus": 0}, []),
        ({"external_gpus": 4}, {"mean_external_gpus": 4.1}, ["simulation.mean_external_gpus"]),
        ({"external_gpus": 4}, {"mean_external_gpus": 1, "change_gpus": 3}, ["simulation.change_gpus"]),
        ({"external_gpus": 4}, {"change_gpus": 3}, []),
        ({"external_gpus": 4}, {"mean_external_gpus": 1, "availability": "t.csv"}, ["simulation.mean_external_gpus"]),
        (
            {"external_gpus": 4},
            {"mean_external_gpus": 5, "availability": "t.csv"},
            ["simulation.mean_external_gpus", "simulation.mean_external_gpus"],
        ),
    ],
)
def test_what_simulating_needs(fleet: dict[str, object], simulation: dict[str, object], keys: list[str]) -> None:
    problems = check_simulation(recipe(fleet=fleet, simulation=simulation))
    assert [problem.keys[0] for problem in problems] == keys
