"""Texts of `pearl config`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import tomli_w

from pearl.cli.recipes import split_arguments
from pearl.config.load import LoadedRecipe
from pearl.config.origins import DEFAULT, Key, Toml, dotted, flatten

_MAX_ALIGNED = 48
"""Longer values push their own origin to the right, not everybody's."""


def as_toml_text(loaded: LoadedRecipe) -> str:
    """The recipe as TOML, each value followed by its origin as a comment; a valid recipe itself."""
    tables: dict[Key, list[tuple[str, str]]] = {}
    for key, value in _values(loaded):
        tables.setdefault(key[:-1], []).append((_line(key[-1], value), f"# {loaded.origins[dotted(key)]}"))
    lengths = [len(text) for rows in tables.values() for text, _ in rows]
    width = max((length for length in lengths if length <= _MAX_ALIGNED), default=0)
    return "\n\n".join(
        "\n".join([f"[{dotted(table)}]", *(f"{text:<{width}}  {origin}" for text, origin in rows)])
        for table, rows in tables.items()
    )


def as_json_text(loaded: LoadedRecipe) -> str:
    """Dotted key -> value and origin."""
    document = {
        dotted(key): {"value": value, "origin": str(loaded.origins[dotted(key)])} for key, value in _values(loaded)
    }
    return json.dumps(document, indent=2)


def check_text(arguments: Sequence[str], loaded: LoadedRecipe) -> str:
    """That a recipe is fine, and how much of it is set."""
    files, _ = split_arguments(arguments)
    set_values = sum(origin != DEFAULT for origin in loaded.origins.values())
    return f"{' + '.join(map(str, files))}: fine; {set_values} values set, {len(loaded.origins) - set_values} defaults"


def _values(loaded: LoadedRecipe) -> Iterator[tuple[Key, Toml | None]]:
    yield from flatten(loaded.recipe.model_dump(mode="json"))


def _line(name: str, value: Toml | None) -> str:
    if value is None:
        return f"# {name} is not set"
    if value == {}:
        # As a header, an empty table would begin a section of its own.
        return f"{name} = {{}}"
    if isinstance(value, list):
        # One line, so that its origin stands beside it; no key of a list needs quotes.
        return f"{name} = {_list_text(value)}"
    return tomli_w.dumps({name: value}).rstrip("\n")


def _list_text(values: list[Toml]) -> str:
    texts = (
        _list_text(value) if isinstance(value, list) else tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
        for value in values
    )
    return f"[{', '.join(texts)}]"
