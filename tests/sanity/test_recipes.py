"""Every recipe in the repository is sound, and the reference of the format is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.cli.recipes import check_shape
from pearl.config.check import check_plan
from pearl.config.load import dump_toml, load_recipe
from pearl.config.recipe import Recipe
from pearl.config.schema import known_keys
from pearl.env.registry import build_environment, evaluation_params, player_factory
from scripts import recipe_reference

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted([*(ROOT / "recipes").rglob("*.toml"), *(ROOT / "examples").rglob("*.toml")])


def test_there_is_a_demo() -> None:
    assert ROOT / "recipes" / "demo" / "guess_number.toml" in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_sound(path: Path, tmp_path: Path) -> None:
    loaded = load_recipe(path, checks=(check_shape,))
    environment, warmup = loaded.recipe.environment, loaded.recipe.warmup

    build_environment(environment.kind, environment.params).close()
    if warmup.steps:
        player_factory(environment.kind, warmup.player)
    if loaded.recipe.evaluation.rollouts_per_task:
        assert evaluation_params(environment.kind, environment.params)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_toml(loaded.recipe))
    assert load_recipe(copy).recipe == loaded.recipe


@pytest.mark.parametrize("name", ["qwen3_8b_spot", "qwen3_30b_spot"])
def test_a_recipe_to_plan_with_is_the_setting_of_the_paper(name: str) -> None:
    """Section 6: 16 GPUs train, 4 reserved and up to 12 external ones serve at tp 2; 4 groups of 16; staleness <= 1."""
    recipe = load_recipe(ROOT / "recipes" / "plan" / f"{name}.toml", checks=(check_plan,)).recipe
    fleet, rollout = recipe.fleet, recipe.rollout
    assert (fleet.training_gpus, fleet.reserved_gpus, fleet.external_gpus) == (16, 4, 12)
    assert (fleet.tp, fleet.overlap_tp, fleet.gpus_per_node) == ((2,), 2, 8)
    assert (rollout.groups_per_batch, rollout.group_size, rollout.max_staleness) == (4, 16, 1)
    assert rollout.max_context_tokens == 32768
    model = "qwen3-8b" if "8b" in name else "qwen3-30b-a3b"
    assert recipe.platform.prior == f"{model}-h100"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_what_it_is(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# "), f"{path.name}: begin with a comment"


def test_the_reference_is_up_to_date() -> None:
    assert recipe_reference.main(["--check"]) == 0, "run `python scripts/recipe_reference.py`"


def test_the_reference_has_every_key() -> None:
    """Read off the page itself, so that the generator cannot leave something out."""
    lines = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines()
    section, found = "", set()
    for line in lines:
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            found.add((section, line.split("`")[1]))

    assert found == set(known_keys(Recipe))


def test_the_reference_tells_defaults_and_bounds() -> None:
    """Spot checks by hand."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")

    assert "| `max_staleness` | an integer 0..16 | `1` |" in page
    assert "| `path` | a path (text) | required |" in page
    assert "| `stop_at_success` | a number 0..1 | not set |" in page
    assert "| `tp` | a list, each an integer | `[1]` |" in page


def test_an_outdated_reference_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "recipes.md"
    monkeypatch.setattr(recipe_reference, "PAGE", page)

    assert recipe_reference.main(["--check"]) == 1
    assert recipe_reference.main([]) == 0
    assert recipe_reference.main(["--check"]) == 0
    page.write_text(page.read_text() + "x")
    assert recipe_reference.main(["--check"]) == 1
