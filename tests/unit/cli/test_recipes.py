"""Arguments of the command line, and the shape that an engine can have."""

from pathlib import Path

import pytest

from pearl.cli.recipes import check_shape, split_arguments
from pearl.config.recipe import Recipe
from pearl.errors import ConfigError


def test_files_and_overrides_in_any_order() -> None:
    arguments = ["a.toml", "x.y=1", "b/c.toml", "file=d.toml"]
    assert split_arguments(arguments) == ([Path("a.toml"), Path("b/c.toml")], ["x.y=1", "file=d.toml"])


@pytest.mark.parametrize("argument", ["a", "a.tom", "run.steps", ""])
def test_what_is_neither(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"want a recipe \(NAME\.toml\) or an override \(a\.b=c\)"):
        split_arguments([argument])


def shape(text: str) -> Recipe:
    return Recipe.model_validate({"model": {"path": "m"}, "environment": {"kind": "k"}, "engine": {"shape": text}})


@pytest.mark.parametrize("text", ["1C", "4C", "4C@tp1", "1P3D", "2P2D+1C", "1P1D1C"])
def test_workers_of_every_role_are_served(text: str) -> None:
    assert check_shape(shape(text)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got '', want e.g. `2C`"),
        ("C", "got 'C', want e.g. `2C`"),
        ("0C", "got '0C', want at least 1 worker in each pool"),
        ("2P", "got '2P', which has no decode (D) worker; prefill and decode need each other"),
        ("2C@tp2", 'got "2C@tp2", want tp 1, e.g. "4C"'),
        ("2P@tp1+1D@tp4", 'got "2P@tp1+1D@tp4", want tp 1, e.g. "2P4D"'),
        ("2C@tp2+3C@tp1", 'got "2C@tp2+3C@tp1", want tp 1, e.g. "7C"'),
    ],
)
def test_other_shapes_are_refused(text: str, message: str) -> None:
    [problem] = check_shape(shape(text))
    assert problem.keys == ("engine.shape",)
    assert problem.text.startswith(message)
