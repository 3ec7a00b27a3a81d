"""Command-line arguments to a recipe, and the checks that need the decision core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pearl.config.check import Problem
from pearl.config.load import Check, LoadedRecipe, load_recipe
from pearl.config.recipe import Recipe
from pearl.core.shape import Pool, Shape, parse_shape
from pearl.core.state import Role
from pearl.errors import ConfigError, ShapeError


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Recipe files (`x.toml`) and overrides (`a.b=c`).

    Raises:
        ConfigError: an argument is neither.
    """
    files: list[Path] = []
    overrides: list[str] = []
    for argument in arguments:
        if "=" in argument:
            overrides.append(argument)
        elif argument.endswith(".toml"):
            files.append(Path(argument))
        else:
            raise ConfigError(f"command line: got {argument!r}, want a recipe (NAME.toml) or an override (a.b=c)")
    return files, overrides


def load_arguments(arguments: Sequence[str], *, checks: Sequence[Check] = ()) -> LoadedRecipe:
    """The recipe that the command line names; `checks`: what the command asks of it besides.

    Raises:
        ConfigError: no recipe, or everything that is wrong with it.
    """
    files, overrides = split_arguments(arguments)
    if not files:
        raise ConfigError("command line: no recipe; want at least one, e.g. `pearl train recipes/NAME.toml`")
    return load_recipe(files[0], overrides, files[1:], checks=(check_shape, check_elastic_shape, *checks))


def check_elastic_shape(recipe: Recipe) -> Sequence[Problem]:
    """Whether the shape of a static policy is one, and one that the fleet may take."""
    elastic, fleet = recipe.elastic, recipe.fleet
    if not elastic.shape:
        return []
    try:
        shape = parse_shape(elastic.shape)
    except ShapeError as error:
        return [Problem(keys=("elastic.shape",), text=str(error).removeprefix("shape: "))]
    if elastic.policy != "static":
        return []
    tps = {pool.role: pool.tp for pool in shape.pools}
    got = f'got "{elastic.shape}"'
    if strange := sorted({pool.tp for pool in shape.pools} - set(fleet.tp)):
        text = f"{got} with tp {strange[0]}, want tensor parallelisms in fleet.tp = {list(fleet.tp)}"
        return [Problem(keys=("elastic.shape", "fleet.tp"), text=text)]
    if len(tps) < len(shape.pools):
        return [Problem(keys=("elastic.shape",), text=f"{got}, want one tensor parallelism for each role")]
    pair = (tps.get(Role.PREFILL), tps.get(Role.DECODE))
    if fleet.tp_pairs is not None and Role.PREFILL in tps and pair not in fleet.tp_pairs:
        text = f"{got}, want prefill and decode in fleet.tp_pairs = {[list(each) for each in fleet.tp_pairs]}"
        return [Problem(keys=("elastic.shape", "fleet.tp_pairs"), text=text)]
    return []


def check_shape(recipe: Recipe) -> Sequence[Problem]:
    """Whether the engine can be laid out in the shape asked for."""
    text = recipe.engine.shape
    try:
        shape = parse_shape(text)
    except ShapeError as error:
        return [_shape_problem(str(error).removeprefix("shape: "))]
    if any(pool.tp > 1 for pool in shape.pools):
        gpus = Counter({role: 0 for role, _ in shape.roles()})
        for role, tp in shape.roles():
            gpus[role] += tp
        spread = Shape(tuple(Pool(role=role, workers=count) for role, count in gpus.items()))
        return [
            _shape_problem(
                f'got "{text}", want tp 1, e.g. "{spread}" (the embedded engine does not spread a worker over GPUs)'
            )
        ]
    return []


def _shape_problem(text: str) -> Problem:
    return Problem(keys=("engine.shape",), text=text)
