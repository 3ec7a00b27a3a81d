"""Where each value of a recipe comes from: files in layers, then overrides, then defaults.

A layer is flat (key -> value and origin), so that merging two layers, naming the place of a mistake and showing every
value with its origin are the same few lines. Lists are values; tables are not.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Key = tuple[str, ...]
"""Of a value: `("rollout", "max_staleness")`."""

Toml = str | int | float | bool | datetime.datetime | datetime.date | datetime.time | list["Toml"] | dict[str, "Toml"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value was set, e.g. `recipes/x.toml:12`."""

    kind: Literal["file", "override", "default"]
    file: Path | None = None
    """With kind `file`."""
    line: int | None = None
    """1-based; of the start of the statement."""

    def __str__(self) -> str:
        if self.file is None:
            return self.kind
        return f"{self.file}:{self.line}" if self.line else str(self.file)

    @property
    def place(self) -> str:
        """What an error message begins with."""
        return "command line" if self.file is None else str(self.file)


DEFAULT = Origin(kind="default")
OVERRIDE = Origin(kind="override")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it was set."""

    value: Toml
    origin: Origin


Layer = dict[Key, Setting]
"""Key of a value -> its setting; an empty table counts as a value."""


def dotted(key: Key) -> str:
    """The key as people write it, odd names quoted: `environment.params."a b"`."""
    return ".".join(part if _BARE.fullmatch(part) else toml_text(part) for part in key)


def flatten(table: Mapping[str, Toml], prefix: Key = ()) -> Iterator[tuple[Key, Toml]]:
    """Every value below a table with its key."""
    for name, value in table.items():
        key = (*prefix, name)
        if isinstance(value, dict) and value:
            yield from flatten(value, key)
        else:
            yield key, value


def merge(layer: Layer, newer: Layer) -> None:
    """Put a newer layer onto a layer: its values win; a table replaces a plain value and the other way round."""
    for key, setting in newer.items():
        below = [other for other in layer if len(other) > len(key) and other[: len(key)] == key]
        if setting.value == {} and below:
            continue  # An empty table adds nothing to one that has values.
        above = [key[:n] for n in range(1, len(key))]
        for other in (*below, *above):
            layer.pop(other, None)
        layer[key] = setting


def nest(layer: Layer) -> dict[str, Toml]:
    """The layer as tables within tables."""
    root: dict[str, Toml] = {}
    for key, setting in layer.items():
        table = root
        for part in key[:-1]:
            child = table.setdefault(part, {})
            assert isinstance(child, dict), "merge keeps plain values and tables apart"
            table = child
        table[key[-1]] = setting.value
    return root


def lines_of(text: str) -> dict[Key, int]:
    """Line of each value in a valid TOML document.

    The document is cut into statements by asking the parser itself: a statement ends with the first line that makes it
    parse, so that multi-line text and lists cannot be mistaken for keys.
    """
    lines: dict[Key, int] = {}
    prefix: Key = ()
    pending, start = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            start = number
        pending += line + "\n"
        try:
            statement = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        if pending.lstrip().startswith("["):
            prefix = _header_key(statement)
            lines.setdefault(prefix, start)
        else:
            for key, _ in flatten(statement):
                lines.setdefault(prefix + key, start)
        pending = ""
    return lines


def _header_key(statement: Mapping[str, Toml]) -> Key:
    key: list[str] = []
    table: Toml = dict(statement)
    while isinstance(table, dict) and table:
        name = next(iter(table))
        key.append(name)
        table = table[name]
    return tuple(key)


def toml_text(value: object) -> str:
    """A value as TOML writes it, for messages: at most 80 characters, tables by kind."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            text = '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
        case dict():
            return "a table"
        case list():
            text = f"[{', '.join(map(toml_text, value))}]"
        case _:
            text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
