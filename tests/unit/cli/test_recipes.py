"""Arguments of the command line, and the shape that an engine can have."""

from pathlib import Path

import pytest

from pearl.cli.recipes import check_elastic_shape, check_shape, split_arguments
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


def elastic(policy: str, text: str, **fleet: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": "m"},
            "environment": {"kind": "k"},
            "elastic": {"policy": policy, "shape": text},
            "fleet": fleet,
        }
    )


@pytest.mark.parametrize(
    ("policy", "text", "fleet"),
    [
        ("static", "", {}),
        ("static", "2C", {}),
        ("static", "99P1D", {}),
        ("static", "1P@tp1+1D@tp2+3C@tp1", {"tp": (2, 1)}),
        ("static", "2P1D@tp2", {"tp": (1, 2), "tp_pairs": [(1, 2), (2, 2)]}),
        ("static", "2C", {"tp_pairs": []}),
        # Others do not look at it, as long as it is a shape.
        ("pearl", "2C@tp8", {}),
        ("pearl", "2C+1C@tp2", {}),
        ("pearl", "1P1D", {"tp_pairs": []}),
    ],
)
def test_shapes_of_policies(policy: str, text: str, fleet: dict[str, object]) -> None:
    assert check_elastic_shape(elastic(policy, text, **fleet)) == []


@pytest.mark.parametrize(
    ("policy", "text", "fleet", "keys", "message"),
    [
        ("static", "9X", {}, ("elastic.shape",), "got '9X', want e.g. `2C`, `1P3D@tp2` or `4P@tp1+2D@tp4`"),
        ("pearl", "0C", {}, ("elastic.shape",), "got '0C', want at least 1 worker in each pool"),
        (
            "static",
            "2C@tp4",
            {"tp": (2, 1)},
            ("elastic.shape", "fleet.tp"),
            'got "2C@tp4" with tp 4, want tensor parallelisms in fleet.tp = [2, 1]',
        ),
        (
            "static",
            "2C+1C@tp2",
            {"tp": (1, 2)},
            ("elastic.shape",),
            'got "2C+1C@tp2", want one tensor parallelism for each role',
        ),
        (
            "static",
            "1P@tp2+1D@tp1",
            {"tp": (1, 2), "tp_pairs": [(1, 2), (1, 1)]},
            ("elastic.shape", "fleet.tp_pairs"),
            'got "1P@tp2+1D@tp1", want prefill and decode in fleet.tp_pairs = [[1, 2], [1, 1]]',
        ),
    ],
)
def test_shapes_that_no_policy_can_have(
    policy: str, text: str, fleet: dict[str, object], keys: tuple[str, ...], message: str
) -> None:
    [problem] = check_elastic_shape(elastic(policy, text, **fleet))
    assert problem.keys == keys
    assert problem.text.startswith(message)
