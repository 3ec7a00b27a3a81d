"""What is wrong with a recipe is found before anything starts. Whole runs: tests/integration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pearl.cluster.job import preflight
from pearl.config.recipe import Recipe
from pearl.errors import ConfigError, ModelError, UserError


def recipe(folder: Path, **sections: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"model": {"path": str(folder)}, "environment": {"kind": "guess_number"}, **sections})


def test_a_good_recipe_passes(tiny_model: Path) -> None:
    preflight(recipe(tiny_model, warmup={"steps": 1}, evaluation={"rollouts_per_task": 1}))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"model": {"path": "nowhere"}}, ModelError, "no config.json in nowhere"),
        ({"environment": {"kind": "guess_numbr"}}, ConfigError, "did you mean 'guess_number'"),
        ({"environment": {"kind": "guess_number", "params": {"turnz": 3}}}, ConfigError, "turnz"),
        (
            {
                "environment": {"kind": "tests.integration.environments:Echo"},
                "evaluation": {"rollouts_per_task": 1},
            },
            ConfigError,
            "evaluation_params",
        ),
        (
            {"environment": {"kind": "tests.integration.environments:Echo"}, "warmup": {"steps": 1}},
            ConfigError,
            "scripted",
        ),
        ({"weights": {"host_budget_gib": 1e-5}}, ConfigError, "weights.host_budget_gib: got 1e-05, want at least"),
    ],
)
def test_a_mistake_is_named(
    tiny_model: Path,
    sections: dict[str, dict[str, object]],
    error: type[UserError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(error, match=message):
        preflight(recipe(tiny_model, **sections))


@pytest.mark.parametrize("damage", ["architecture", "truncated"])
def test_a_model_that_cannot_be_used_is_named_before_anything_starts(
    tiny_model: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    if damage == "architecture":
        config = folder / "config.json"
        config.write_text(config.read_text().replace("qwen3", "llama").replace("Qwen3", "Llama"))
    else:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match=str(folder)):
        preflight(recipe(folder))
