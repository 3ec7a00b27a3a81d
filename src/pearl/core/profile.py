"""The platform profile: what one engine's iterations, hand-offs and changes of state cost on one kind of device.

Invariant *sound or refused*: whatever holds a profile holds finite numbers of the right shape; everything else is a
`ProfileError` when it is made. Reading and writing files is the caller's; here a profile is text.

`IterationTimes.seconds` interpolates its grid linearly along each axis (multilinear):

- at a point of the grid it gives what was measured there, and between points it never leaves the range of the
  neighbours, so it rises where the data rise;
- beyond the last point of an axis the last slope goes on; where that slope falls, the value stays level instead, so it
  is never below 0 and never falls beyond an edge;
- contexts shorter than the first point cost what that point costs; the other axes begin at 0;
- an iteration of nothing takes no time. The grid's own value at 0 prefill tokens and 0 decoding sequences is what an
  iteration costs before its first token; it matters between 0 and the next point.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from pearl.errors import ProfileError
from pearl.units import MIB

SCHEMA = "pearl.platform_profile"
VERSION = 1
MAX_WHOLE = 2**53
"""Whole numbers up to here are exact in every JSON reader."""
LONGEST_PROFILE_BYTES = 16 * MIB
"""Of a profile's text; those that are measured have some ten KiB."""

Axis = tuple[int, ...]
Grid = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Measured times of one iteration (one forward of an engine, and drawing its tokens) over a grid of what it computes."""

    prefill_tokens: Axis
    """Shape `[P]`, rising from 0: tokens computed for sequences that have more than one to compute."""
    decoding: Axis
    """Shape `[D]`, rising from 0: sequences that compute one token."""
    context_tokens: Axis
    """Shape `[C]`, rising, >= 1: length of each decoding sequence, its new token included; of each prefilled one where
    none decodes."""
    cells_s: Grid
    """Shape `[P][D][C]`."""

    def __post_init__(self) -> None:
        _check_axis("prefill_tokens", self.prefill_tokens, first=0, points=2)
        _check_axis("decoding", self.decoding, first=0, points=2)
        _check_axis("context_tokens", self.context_tokens, first=None, points=1)
        self._check_cells()

    def seconds(self, prefill_tokens: float, decoding: float, context_tokens: float) -> float:
        """Time of an iteration; numbers between whole ones are fine, for means.

        Raises:
            ValueError: a number is negative or no number.
        """
        if not (prefill_tokens >= 0 and decoding >= 0 and context_tokens >= 0):
            raise ValueError(
                f"iteration of {prefill_tokens} prefill tokens and {decoding} sequences at context {context_tokens}: "
                "want numbers >= 0"
            )
        if prefill_tokens == 0 and decoding == 0:
            return 0.0
        low_p, high_p, along_p = _place(self.prefill_tokens, prefill_tokens)
        low_d, high_d, along_d = _place(self.decoding, decoding)
        low_c, high_c, along_c = _place(self.context_tokens, context_tokens)

        def row(p: int, d: int) -> float:
            cells = self.cells_s[p][d]
            return _between(cells[low_c], cells[high_c], along_c)

        def plane(p: int) -> float:
            return _between(row(p, low_d), row(p, high_d), along_d)

        return _between(plane(low_p), plane(high_p), along_p)

    def _check_cells(self) -> None:
        want = (len(self.prefill_tokens), len(self.decoding), len(self.context_tokens))
        where = "iterations.cells_s"
        _check_length(where, self.cells_s, want[0], "prefill_tokens")
        for p, plane in enumerate(self.cells_s):
            _check_length(f"{where}[{p}]", plane, want[1], "decoding")
            for d, row in enumerate(plane):
                _check_length(f"{where}[{p}][{d}]", row, want[2], "context_tokens")
                for c, value in enumerate(row):
                    _check_number(f"{where}[{p}][{d}][{c}]", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """Added time of a turn whose prefill and decode run on two engines, over one that stays on its engine."""

    fixed_s: float
    s_per_byte: float
    """Per byte of KV."""

    def __post_init__(self) -> None:
        _check_number("hand_off.fixed_s", self.fixed_s)
        _check_number("hand_off.s_per_byte", self.s_per_byte)

    def seconds(self, size_bytes: float) -> float:
        """Time to hand over so much KV."""
        return self.fixed_s + self.s_per_byte * size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProfile:
    """One model on one kind of device with one tensor parallelism."""

    model: str
    """Name, for people."""
    model_hash: str
    """Of the architecture, as in `EngineInfo`."""
    device: str
    """Name, for people."""
    dtype: str
    """What the engine computed in."""
    tp: int
    """>= 1."""
    iterations: IterationTimes
    kv_capacity_tokens: int
    """Tokens whose KV fits on the device beside the weights."""
    kv_bytes_per_token: int
    hand_off: HandOff | None
    """None where it was not measured."""
    weight_load_s: float
    """Taking a published version, from the host's shared memory."""
    sleep_s: float
    """Freeing weights and KV."""
    wake_s: float
    """Taking memory for KV again; weights are loaded afterwards."""
    engine_start_s: float | None
    """A new process until it could serve; None where it was not measured."""

    def __post_init__(self) -> None:
        for name in ("model", "model_hash", "device", "dtype"):
            _check_text(name, getattr(self, name))
        for name in ("tp", "kv_capacity_tokens", "kv_bytes_per_token"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("weight_load_s", "sleep_s", "wake_s"):
            _check_number(name, getattr(self, name))
        if self.engine_start_s is not None:
            _check_number("engine_start_s", self.engine_start_s)

    def to_json(self) -> str:
        """The text of a profile file; `parse_profile` reads it back as an equal profile."""
        lines = [f'"schema": {json.dumps(SCHEMA)}', f'"version": {VERSION}']
        for field in fields(self):
            value = getattr(self, field.name)
            match value:
                case IterationTimes():
                    text = _times_text(value)
                case HandOff():
                    text = json.dumps({"fixed_s": value.fixed_s, "s_per_byte": value.s_per_byte})
                case _:
                    text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{json.dumps(field.name)}: {text}")
        return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def parse_profile(text: str, where: str = "profile") -> PlatformProfile:
    """Read the text of a profile file; `where` is what messages begin with.

    Raises:
        ProfileError: the first thing that is wrong.
    """
    try:
        return _profile(_document(text))
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


# -- interpolation --------------------------------------------------------------------------------------------------


def _place(axis: Axis, value: float) -> tuple[int, int, float]:
    """The points around a value, and how far it is from one to the other: more than 1 beyond the last point."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0, 0.0
    low = min(bisect_right(axis, value), len(axis) - 1) - 1
    return low, low + 1, (value - axis[low]) / (axis[low + 1] - axis[low])


def _between(low: float, high: float, along: float) -> float:
    if along <= 1:
        return low * (1 - along) + high * along
    return high + (along - 1) * max(0.0, high - low)


# -- checks ---------------------------------------------------------------------------------------------------------


def _check_axis(name: str, axis: object, *, first: int | None, points: int) -> None:
    where = f"iterations.{name}"
    if not isinstance(axis, tuple) or len(axis) < points:
        raise ProfileError(f"{where}: got {_got(axis)}, want a list of at least {points} numbers")
    for index, value in enumerate(axis):
        _check_whole(f"{where}[{index}]", value, 0 if first == 0 else 1)
        if index and value <= axis[index - 1]:
            raise ProfileError(f"{where}[{index}]: got {value} behind {axis[index - 1]}, want rising numbers")
    if first is not None and axis[0] != first:
        raise ProfileError(f"{where}[0]: got {axis[0]}, want {first}")


def _check_length(where: str, cells: object, want: int, axis: str) -> None:
    if not isinstance(cells, tuple):
        raise ProfileError(f"{where}: got {_got(cells)}, want a list of {want} (as many as {axis})")
    if len(cells) != want:
        raise ProfileError(f"{where}: got a list of {len(cells)}, want {want} (as many as {axis})")


def _check_number(where: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"{where}: got {_got(value)}, want a number >= 0")
    if value > MAX_WHOLE or not math.isfinite(value) or value < 0:
        raise ProfileError(f"{where}: got {_got(value)}, want a finite number >= 0")


def _check_whole(where: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_WHOLE:
        raise ProfileError(f"{where}: got {_got(value)}, want a whole number >= {low}")


def _check_text(where: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ProfileError(f"{where}: got {_got(value)}, want text")


def _got(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case int() if abs(value) > MAX_WHOLE:
            return "a whole number beyond 2**53"
        case _:
            text = repr(value)
            return text if len(text) <= 60 else f"{text[:57]}..."


# -- the file -------------------------------------------------------------------------------------------------------


def _times_text(times: IterationTimes) -> str:
    axes = [f'"{name}": {json.dumps(getattr(times, name))}' for name in _AXES]
    planes = ",\n      ".join(json.dumps(plane) for plane in times.cells_s)
    return "{\n    " + ",\n    ".join([*axes, f'"cells_s": [\n      {planes}\n    ]']) + "\n  }"


_AXES = ("prefill_tokens", "decoding", "context_tokens")


def _document(text: str) -> Mapping[str, object]:
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProfileError(f"cannot be read as JSON: {reason}; want a file written by `pearl profile`") from None
    if not isinstance(document, dict):
        raise ProfileError(f"got {_got(document)}, want an object")
    schema, version = document.pop("schema", None), document.pop("version", None)
    if schema != SCHEMA:
        raise ProfileError(f"schema: got {_got(schema)}, want {SCHEMA!r}; want a file written by `pearl profile`")
    if type(version) is not int or version != VERSION:
        raise ProfileError(f"version: got {_got(version)}, want {VERSION}; measure again with `pearl profile`")
    return document


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        raise ProfileError(f"{next(name for name in names if names.count(name) > 1)}: stands there twice, want it once")
    return document


def _no_constant(name: str) -> float:
    raise ProfileError(f"got {name}, want finite numbers")


def _profile(document: Mapping[str, object]) -> PlatformProfile:
    values = _exactly(document, PlatformProfile, "")
    times = _exactly(values.pop("iterations"), IterationTimes, "iterations.")
    hand_off = values.pop("hand_off")
    return PlatformProfile(
        iterations=IterationTimes(**{name: _frozen(value) for name, value in times.items()}),  # type: ignore[arg-type]
        hand_off=None if hand_off is None else HandOff(**_exactly(hand_off, HandOff, "hand_off.")),  # type: ignore[arg-type]
        **values,  # type: ignore[arg-type]
    )


Record = TypeVar("Record", PlatformProfile, IterationTimes, HandOff)


def _exactly(value: object, kind: type[Record], prefix: str) -> dict[str, object]:
    """The fields of a record as they stand in the file: all of them, and no other."""
    if not isinstance(value, dict):
        raise ProfileError(f"{prefix.rstrip('.')}: got {_got(value)}, want an object")
    known = [field.name for field in fields(kind)]
    for name in value:
        if name not in known:
            raise ProfileError(f"{prefix}{name}: unknown key; allowed: {', '.join(known)}")
    for name in known:
        if name not in value:
            raise ProfileError(f"{prefix}{name}: missing")
    return dict(value)


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
