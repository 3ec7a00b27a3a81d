"""Journal entries as lines of JSON and back: compact, typed, defaults left out.

Seconds (fields named `*_s`) are rounded to microseconds; every other number is kept exactly. Numbers that are not
finite are written as text ("NaN", "Infinity", "-Infinity"), because JSON has none.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from pearl.records.journal import (
    STREAMS,
    ChangeEntry,
    ChoiceEntry,
    GroupEntry,
    JournalEntry,
    StateEntry,
    StepEntry,
    TrajectoryEntry,
    TurnEntry,
)

ENTRIES: Mapping[str, type[JournalEntry]] = {
    kind.stream: kind
    for kind in (StateEntry, ChoiceEntry, ChangeEntry, TurnEntry, TrajectoryEntry, GroupEntry, StepEntry)
}
"""Stream name -> the class of its entries."""

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DECIMALS = 6


class MalformedEntry(Exception):
    """A line that is no entry of its stream."""


Reader = Callable[[object], object]
"""Checks a value read from JSON and returns it as the field wants it; `MalformedEntry` when it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    is_seconds: bool
    default: object
    """`MISSING` when there is none."""
    read: Reader


def header_line(stream: str) -> bytes:
    """First line of a stream's file."""
    return _line({"schema": f"pearl.{stream}", "version": STREAMS[stream]})


def dropped_line(count: int) -> bytes:
    """Line that tells how many entries were dropped before it."""
    return _line({"dropped": count})


def encode(entry: JournalEntry) -> bytes:
    """One line, newline included.

    Raises:
        KeyError: a class that no stream knows.
        TypeError, ValueError: a value that JSON cannot hold.
    """
    fields: dict[str, object] = {}
    for field in _FIELDS[type(entry)]:
        value = getattr(entry, field.name)
        if value == field.default:
            continue
        fields[field.name] = round(value, _DECIMALS) if field.is_seconds else value
    try:
        return _line(fields)
    except ValueError:
        return _line(_finite(fields))


def decode(kind: type[JournalEntry], document: object) -> JournalEntry:
    """An entry from a parsed line.

    Raises:
        MalformedEntry: a field is missing, unknown or of the wrong type.
    """
    if not isinstance(document, dict):
        raise MalformedEntry(f"got {_kind(document)}, want an object")
    values: dict[str, Any] = {}
    for field in _FIELDS[kind]:
        if field.name in document:
            try:
                values[field.name] = field.read(document[field.name])
            except MalformedEntry as error:
                raise MalformedEntry(f"{field.name}: {error}") from None
        elif field.default is MISSING:
            raise MalformedEntry(f"{field.name}: missing")
    if unknown := document.keys() - {field.name for field in _FIELDS[kind]}:
        raise MalformedEntry(f"unknown fields {', '.join(sorted(unknown))}")
    return kind(**values)


def dropped_count(document: object) -> int | None:
    """Entries dropped, when the parsed line says so."""
    if isinstance(document, dict) and document.keys() == {"dropped"} and type(document["dropped"]) is int:
        return int(document["dropped"])
    return None


def _line(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def _reader(hint: Any) -> Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if any(typing.get_origin(argument) is dict for argument in arguments):
            return lambda value: value  # `Json`: whatever the parser returned.
        return _one_of(tuple(_reader(argument) for argument in arguments))
    if origin is list:
        return _list_of(_reader(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_of(_reader(arguments[1]))
    if hint is float:
        return _read_float
    return _exactly(hint)


def _exactly(kind: type) -> Reader:
    def read(value: object) -> object:
        if type(value) is not kind:
            raise MalformedEntry(f"got {_kind(value)}, want {kind.__name__}")
        return value

    return read


def _read_float(value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedEntry(f"got {_kind(value)}, want a number")
    return float(value)


def _one_of(readers: tuple[Reader, ...]) -> Reader:
    def read(value: object) -> object:
        for reader in readers[:-1]:
            try:
                return reader(value)
            except MalformedEntry:
                continue
        return readers[-1](value)

    return read


def _list_of(read_item: Reader) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, list):
            raise MalformedEntry(f"got {_kind(value)}, want a list")
        return [read_item(item) for item in value]

    return read


def _mapping_of(read_item: Reader) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, dict):
            raise MalformedEntry(f"got {_kind(value)}, want an object")
        return {key: read_item(item) for key, item in value.items()}

    return read


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _fields(kind: type[JournalEntry]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        _Field(
            name=field.name,
            is_seconds=field.name.endswith("_s"),
            default=field.default_factory() if field.default_factory is not MISSING else field.default,
            read=_reader(hints[field.name]),
        )
        for field in dataclasses.fields(kind)
    )


_FIELDS = {kind: _fields(kind) for kind in ENTRIES.values()}
