"""`pearl profile`: measure a platform profile, show it, and write it to a file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from pearl.cli.train import require_train_extra
from pearl.core.profile import IterationTimes, PlatformProfile
from pearl.errors import ConfigError
from pearl.units import GIB, format_bytes, format_duration

_LABEL_WIDTH = 12
_NOT_NEEDED = ("psutil", "ray", "tensorboard")
"""Of the train extra: of these only Ray is used, and its part is left out where it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The command line."""

    model: Path
    out: Path | None
    device: str
    dtype: str
    quick: bool
    max_context_tokens: int | None
    max_sequences: int
    kv_gib: float | None


def run_profile(options: ProfileOptions) -> None:
    """Measure, write, and show what was measured.

    Raises:
        UserError: the model, an option, the installation or the place for the file is not fine; nothing is written.
    """
    require_train_extra("profile", without=_NOT_NEEDED)
    out = options.out or Path(f"{options.model.resolve().name}.profile.json")
    check_writable(out)
    if options.kv_gib is not None and not 0 < options.kv_gib < 2**20:
        raise ConfigError(f"--kv-gib: got {options.kv_gib:g}, want a number > 0")
    # Heavy: torch and transformers.
    from pearl.cluster.profile import ProfileRequest, measure_profile

    request = ProfileRequest(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        max_context_tokens=options.max_context_tokens,
        max_sequences=options.max_sequences,
        kv_bytes=max(1, int(options.kv_gib * GIB)) if options.kv_gib else 0,
        quick=options.quick,
    )
    profile = measure_profile(request, lambda name, text: typer.echo(f"{name:<{_LABEL_WIDTH}} {text}"))
    write_whole(out, profile.to_json())
    typer.echo(f"\n{render_profile(profile, out)}")


def check_writable(out: Path) -> None:
    """Find out before minutes of measuring that a file cannot be written.

    Raises:
        ConfigError: it cannot; nothing is left behind.
    """
    try:
        if out.exists() and not out.is_file():
            # Renaming a file over it would replace the device or pipe itself.
            raise OSError(None, "is a folder" if out.is_dir() else "is no regular file")
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise _unwritable(out, error) from None


def write_whole(out: Path, text: str) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        ConfigError: it cannot be written; what was there before stays.
    """
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, out)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out: {out}: cannot be written: {error.strerror or error}; want a file in a folder that exists"
    )


def render_profile(profile: PlatformProfile, out: Path) -> str:
    """What was measured as plain text, several lines without a final newline."""
    times, hand_off = profile.iterations, profile.hand_off
    capacity_bytes = profile.kv_capacity_tokens * profile.kv_bytes_per_token
    start_s = profile.engine_start_s
    rows = [
        ("profile", str(out)),
        ("", ""),
        ("model", f"{profile.model}, architecture {profile.model_hash}"),
        ("device", f"{profile.device}, {profile.dtype}, tp {profile.tp}"),
        (
            "kv",
            f"{format_bytes(profile.kv_bytes_per_token)} per token, {profile.kv_capacity_tokens:,} tokens in "
            f"{format_bytes(capacity_bytes)}",
        ),
        ("hand-off", "not measured" if hand_off is None else _hand_off_text(hand_off.fixed_s, hand_off.s_per_byte)),
        ("weights", f"loaded in {_seconds(profile.weight_load_s)}"),
        ("engine", f"starts in {format_duration(start_s)}" if start_s is not None else "start not measured"),
        ("", f"sleeps in {_seconds(profile.sleep_s)}, wakes in {_seconds(profile.wake_s)}"),
    ]
    lines = [f"{label:<{_LABEL_WIDTH}} {text}".rstrip() for label, text in rows]
    return "\n".join([*lines, "", *_table(times)])


def _table(times: IterationTimes) -> list[str]:
    """Seconds per iteration: batches that only decode, then chunks that only prefill."""
    head = ["seconds per iteration", *(f"context {context:,}" for context in times.context_tokens)]
    rows = [
        [f"decode {count:,}", *map(_seconds, times.cells_s[0][index])]
        for index, count in enumerate(times.decoding)
        if index
    ]
    rows += [
        [f"prefill {tokens:,}", *map(_seconds, times.cells_s[index][0])]
        for index, tokens in enumerate(times.prefill_tokens)
        if index
    ]
    return _aligned([head, *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _hand_off_text(fixed_s: float, s_per_byte: float) -> str:
    if s_per_byte == 0:
        return f"{_seconds(fixed_s)}, whatever the size"
    return f"{_seconds(fixed_s)} and {format_bytes(int(1 / s_per_byte))} per second"


def _seconds(seconds: float) -> str:
    """Three digits that matter: `0.00123 s`."""
    digits = f"{seconds:.3g}" if seconds >= 1e-4 or seconds == 0 else f"{seconds:.6f}"
    return f"{digits} s"
