"""What the configuration tree allows, in words: names, types, bounds and descriptions of its fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from pearl.config.base import Section
from pearl.config.origins import Key, toml_text


def section_at(root: type[Section], key: Key) -> type[Section] | None:
    """The section under a key, None where there is none."""
    section: type[Section] | None = root
    for part in key:
        field = section.model_fields.get(part) if section else None
        section = section_of(field) if field else None
    return section


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, None for a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def field_at(root: type[Section], key: Key) -> FieldInfo | None:
    """The field under a key; the entries of a free table (`environment.params.x`) belong to the table's field."""
    for depth in range(len(key), 0, -1):
        section = section_at(root, key[: depth - 1])
        if section and key[depth - 1] in section.model_fields:
            field = section.model_fields[key[depth - 1]]
            inside = len(key) - depth
            return field if inside == 0 or (inside == 1 and _is_table(field.annotation)) else None
    return None


def known_keys(root: type[Section], prefix: Key = ()) -> Iterator[Key]:
    """Keys of all values below a section, in the order of the tree."""
    for name, field in root.model_fields.items():
        child = section_of(field)
        if child:
            yield from known_keys(child, (*prefix, name))
        else:
            yield (*prefix, name)


def required_keys(section: type[Section], prefix: Key = ()) -> Iterator[Key]:
    """Keys of all values below a section that have no default."""
    for name, field in section.model_fields.items():
        child = section_of(field)
        if not field.is_required():
            continue
        if child:
            yield from required_keys(child, (*prefix, name))
        else:
            yield (*prefix, name)


def wanted(field: FieldInfo, *, entry: bool = False) -> str:
    """What a field takes: `an integer 0..16 (its description)`; `entry` asks about one value of a free table."""
    kind = field.annotation
    if entry:
        kind = typing.get_args(kind)[1]
    bounds = "" if entry else _bounds(field)
    description = f" ({field.description.rstrip('.')})" if field.description else ""
    return f"{_kind_text(kind)}{bounds}{description}"


def _is_table(kind: Any) -> bool:
    return typing.get_origin(kind) is dict


def _kind_text(kind: Any) -> str:
    if section := (kind if isinstance(kind, type) and issubclass(kind, Section) else None):
        return f"a table with {', '.join(section.model_fields)}"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        texts = [toml_text(argument) for argument in arguments]
        return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"
    if origin in (types.UnionType, typing.Union):
        texts = [_kind_text(argument) for argument in arguments if argument is not type(None)]
        if "an integer" in texts and "a number" in texts:
            texts.remove("an integer")
        return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])}, or {texts[-1]}"
    if origin is dict:
        return f"a table of values, each {_kind_text(arguments[1])}"
    if origin is tuple:
        return _list_text(arguments)
    return {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path (text)"}.get(
        kind, str(kind)
    )


def _list_text(arguments: tuple[Any, ...]) -> str:
    """Of as many as it likes of one kind, or of so many."""
    if arguments[-1] is Ellipsis:
        return f"a list, each {_kind_text(arguments[0])}"
    return f"[{', '.join(_kind_text(argument) for argument in arguments)}]"


def _bounds(field: FieldInfo) -> str:
    low: tuple[str, Any] | None = None
    high: tuple[str, Any] | None = None
    pattern: str | None = None
    for item in field.metadata:
        match item:
            case Ge():
                low = (">=", item.ge)
            case Gt():
                low = (">", item.gt)
            case Le():
                high = ("<=", item.le)
            case Lt():
                # Whole numbers below a limit read better as a closed range.
                limit: Any = item.lt
                high = ("<=", limit - 1) if field.annotation is int else ("<", limit)
            case _:
                pattern = getattr(item, "pattern", pattern)
    if pattern:
        return f" matching {pattern}"
    if low and high:
        if low[0] == ">=" and high[0] == "<=":
            return f" {low[1]}..{high[1]}"
        return f" {low[0]} {low[1]} and {high[0]} {high[1]}"
    one = low or high
    return f" {one[0]} {one[1]}" if one else ""
