"""From TOML files and `a.b=c` overrides to a checked recipe whose every value knows where it was set.

Layers, each over the one before: the files that a file `extends`, the file itself, further files, overrides. Types are
strict: `"3"`, `true` or `2.5` is no integer. All mistakes of a recipe are reported at once, one a line.
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from pydantic import ValidationError

from pearl.config.check import Problem, check_recipe
from pearl.config.origins import (
    DEFAULT,
    OVERRIDE,
    Key,
    Layer,
    Origin,
    Setting,
    Toml,
    dotted,
    flatten,
    lines_of,
    merge,
    nest,
    toml_text,
)
from pearl.config.recipe import Recipe
from pearl.config.schema import field_at, known_keys, required_keys, section_at, wanted
from pearl.errors import ConfigError
from pearl.text_file import Unreadable, read_text
from pearl.units import MIB

_OVERRIDE_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_LONGEST_BYTES = MIB
"""Of a recipe; real ones have a few KiB."""

_DEEPEST = 32
"""Tables and lists within each other; recipes have four or five, and what walks them (pydantic's JSON, too) ends somewhere."""

Check = Callable[[Recipe], Sequence[Problem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A checked recipe."""

    recipe: Recipe
    origins: Mapping[str, Origin]
    """Dotted key -> where the value was set; every value of the tree has one."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    layers: Sequence[Path] = (),
    *,
    checks: Sequence[Check] = (),
) -> LoadedRecipe:
    """Read a recipe; `layers` are further files over it, `checks` run besides those of the configuration itself.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    layer: Layer = {}
    for file in (path, *layers):
        merge(layer, _read(Path(os.path.normpath(file)), ()))
    for override in overrides:
        merge(layer, parse_override(override))
    last = Path(os.path.normpath((path, *layers)[-1]))
    recipe = _validate(layer, last, (check_recipe, *checks))
    return LoadedRecipe(recipe=recipe, origins=_origins(recipe, layer))


def parse_override(text: str) -> Layer:
    """Read `a.b=value`: a TOML value, or else plain text.

    Raises:
        ConfigError: no key, or not text.
    """
    key, equals, value = text.partition("=")
    if not equals or not _OVERRIDE_KEY.fullmatch(key.strip()):
        raise ConfigError(f"command line: got {text!r}, want key=value with a dotted key, e.g. rollout.max_staleness=2")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"command line: {key}: got bytes that are not UTF-8, want text") from None
    document = _override_value(value)
    for part in reversed(key.strip().split(".")):
        document = {part: document}
    assert isinstance(document, dict)
    if _is_deep(document):
        raise ConfigError(
            f"command line: got a value nested more than {_DEEPEST} deep, want one of a recipe: {text[:40]}..."
        )
    return {leaf_key: Setting(value=leaf, origin=OVERRIDE) for leaf_key, leaf in flatten(document)}


def dump_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML, defaults included; what `load_recipe` reads back as the same recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def _override_value(text: str) -> Toml:
    # The second form catches text that is only by accident TOML: `3 # 4`, or two lines.
    try:
        document = tomllib.loads(f"value = {text}\nlist = [{text}]")
    except (ValueError, RecursionError):  # TOMLDecodeError, a number of thousands of digits, thousands of brackets
        return text
    same = document.keys() == {"value", "list"} and document["list"] == [document["value"]]
    value: Toml = document["value"] if same else text
    return value


def _read(path: Path, parents: tuple[Path, ...]) -> Layer:
    text = _read_text(path, parents)
    if path.resolve() in [parent.resolve() for parent in parents]:
        chain = " -> ".join(str(file) for file in (*parents, path))
        raise ConfigError(f"{parents[-1]}: extends: a circle of files: {chain}")
    try:
        document: dict[str, Toml] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, or brackets
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path}: not valid TOML: {reason}") from None
    if _is_deep(document):
        raise ConfigError(f"{path}: got values nested more than {_DEEPEST} deep, want the sections of a recipe")
    layer: Layer = {}
    for base in _extends(path, document.pop("extends", [])):
        merge(layer, _read(Path(os.path.normpath(path.parent / base)), (*parents, path)))
    lines = lines_of(text)
    merge(
        layer,
        {
            key: Setting(value=value, origin=Origin(kind="file", file=path, line=lines.get(key)))
            for key, value in flatten(document)
        },
    )
    return layer


def _is_deep(document: Toml) -> bool:
    level = [document]
    for _ in range(_DEEPEST + 1):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def _read_text(path: Path, parents: tuple[Path, ...]) -> str:
    try:
        return read_text(path, most_bytes=_LONGEST_BYTES)
    except Unreadable as error:
        named = f", which {parents[-1]} extends" if parents else ""
        raise ConfigError(f"{error}{named}; want a recipe (.toml)") from None


def _extends(path: Path, value: Toml) -> list[str]:
    if not isinstance(value, list):
        raise ConfigError(f'{path}: extends: got {toml_text(value)}, want a list of files, e.g. ["base.toml"]')
    files: list[str] = []
    for file in value:
        if not isinstance(file, str) or not file:
            raise ConfigError(
                f"{path}: extends: got {toml_text(file)} in the list, want a file relative to {path.parent}"
            )
        files.append(file)
    return files


def _validate(layer: Layer, last: Path, checks: Sequence[Check]) -> Recipe:
    """The recipe, or one error with every problem."""
    recipe, wrong = _parse(layer)
    problems = [(_origin_of(key, layer), _field_problem(key, kind, layer)) for key, kind in wrong]
    if recipe is None:
        # What the other values have to say to each other is worth knowing now, not after the next try.
        sound = {key: setting for key, setting in layer.items() if not any(_starts(key, bad) for bad, _ in wrong)}
        recipe, _ = _parse(sound)
    unsure = {dotted(key) for key, _ in wrong}
    crossed = [problem for check in checks if recipe for problem in check(recipe)]
    problems += [
        (_blamed(problem, layer), f"{problem.keys[0]}: {problem.text}")
        for problem in crossed
        if not unsure.intersection(problem.keys)
    ]
    if problems or recipe is None:
        raise ConfigError("\n".join(_in_order(problems, last)))
    return recipe


def _in_order(problems: Sequence[tuple[Origin | None, str]], last: Path) -> list[str]:
    """One line each, by place; what is missing is missing in the last file."""

    def place(problem: tuple[Origin | None, str]) -> tuple[bool, str, int]:
        origin = problem[0] or Origin(kind="file", file=last)
        return origin.file is None, origin.place, origin.line or 0

    lines: list[str] = []
    for origin, text in sorted(problems, key=place):
        line = f" [line {origin.line}]" if origin and origin.line else ""
        lines.append(f"{origin.place if origin else last}: {text}{line}")
    return lines


def _parse(layer: Layer) -> tuple[Recipe | None, list[tuple[Key, str]]]:
    """The recipe, or the keys that are wrong with pydantic's word for what is wrong."""
    # Through JSON, because only there `strict` still takes text for a path.
    text = json.dumps(nest(layer), default=_no_json)
    try:
        return Recipe.model_validate_json(text, strict=True), []
    except ValidationError as error:
        wrong: dict[Key, str] = {}
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            location = tuple(map(str, item["loc"]))
            key = location if item["type"] == "extra_forbidden" else _value_key(location)
            if item["type"] == "missing" and (section := section_at(Recipe, key)):
                wrong |= dict.fromkeys(required_keys(section, key), "missing")
            else:
                wrong.setdefault(key, item["type"])
        return None, list(wrong.items())


def _no_json(value: object) -> list[str]:
    # Dates exist in TOML and nowhere in a recipe; a list is refused by every field as well.
    assert isinstance(value, datetime.date | datetime.time), f"TOML has no {type(value).__name__}"
    return []


def _value_key(location: Key) -> Key:
    """Pydantic's location without the names of the union members that it tried."""
    for depth in range(len(location), 0, -1):
        if field_at(Recipe, location[:depth]):
            return location[:depth]
    return location


def _field_problem(key: Key, kind: str, layer: Layer) -> str:
    if kind == "extra_forbidden":
        return f"{dotted(key)}: unknown key{_guess(key)}"
    field = field_at(Recipe, key)
    assert field is not None, f"no field at {dotted(key)}"
    want = wanted(field, entry=section_at(Recipe, key[:-1]) is None)
    if kind == "missing":
        return f"{dotted(key)}: missing, want {want}"
    return f"{dotted(key)}: got {toml_text(_value_at(key, layer))}, want {want}"


def _blamed(problem: Problem, layer: Layer) -> Origin | None:
    # A default that clashes with something set is reported where that was set.
    origins = [_origin_of(tuple(key.split(".")), layer) for key in problem.keys]
    return next((origin for origin in origins if origin), None)


def _guess(key: Key) -> str:
    """`; did you mean ...? (allowed: ...)`."""
    siblings = list((section_at(Recipe, key[:-1]) or Recipe).model_fields)
    allowed = f"allowed in {dotted(key[:-1])}" if key[:-1] else "allowed at the top"
    near = difflib.get_close_matches(key[-1], siblings, n=1)
    guess = dotted((*key[:-1], near[0])) if near else None
    if guess is None:
        # The right name in the wrong section.
        everywhere: dict[str, str] = {}
        for other in known_keys(Recipe):
            everywhere.setdefault(other[-1], dotted(other))
        near = difflib.get_close_matches(key[-1], everywhere, n=1, cutoff=0.8)
        guess = everywhere[near[0]] if near else None
    meant = f"; did you mean {guess}?" if guess else ";"
    return f"{meant} {allowed}: {', '.join(siblings)}"


def _starts(key: Key, prefix: Key) -> bool:
    return key[: len(prefix)] == prefix


def _origin_of(key: Key, layer: Layer) -> Origin | None:
    return next((setting.origin for other, setting in layer.items() if _starts(other, key)), None)


def _value_at(key: Key, layer: Layer) -> Toml:
    return layer[key].value if key in layer else {}


def _origins(recipe: Recipe, layer: Layer) -> dict[str, Origin]:
    return {dotted(key): layer[key].origin if key in layer else DEFAULT for key in _recipe_keys(recipe)}


def _recipe_keys(recipe: Recipe) -> Iterator[Key]:
    for key, _ in flatten(recipe.model_dump(mode="json")):
        yield key
