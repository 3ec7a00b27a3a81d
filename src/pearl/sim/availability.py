"""Traces of availability: how many GPUs there are from outside, as a step function of time.

A trace is rows `(time_s, gpus)`, times rising from 0: so many GPUs from that time on, until the next row; the last row marks
the end. In a file (CSV) the first line is `time_s,gpus`, every further one a row; empty lines are ignored.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from pearl.core.distribution import LARGEST
from pearl.errors import ProfileError
from pearl.pipeline.tasks import derive_seed
from pearl.report.trajectories import lines_of
from pearl.units import MIB

Availability = tuple[tuple[float, int], ...]

MOST_GPUS = 100_000
"""At once: as of an owner in a recipe."""
MOST_ROWS = 1_000_000
_RARE = 1e-9
"""A share of the time below which it counts as never, and above 1 - which as always."""
_LONGEST_BYTES = 32 * MIB
_HEADER = "time_s,gpus"
_SECONDS = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_COUNT = re.compile(r"[+-]?[0-9]+")


def recorded_availability(path: Path) -> Availability:
    """The trace of a file.

    Raises:
        ProfileError: no such file, no regular one, too large, without rows, or the first line that is not what it should be:
            the message names file and line.
    """
    rows: list[tuple[float, int]] = []
    header = ""
    for where, line in lines_of(path, most_bytes=_LONGEST_BYTES, wanted="want a trace of availability (CSV)"):
        if not header:
            header = line.strip()
            if header != _HEADER:
                raise ProfileError(f"{where}: got {_got(header)}, want {_HEADER}")
            continue
        row = _row(where, line)
        if not rows and row[0]:
            raise ProfileError(f"{where}: time_s: got {row[0]:g}, want 0 (a trace begins at 0)")
        if rows and row[0] <= rows[-1][0]:
            raise ProfileError(f"{where}: time_s: got {row[0]:g} after {rows[-1][0]:g}, want times that rise")
        rows.append(row)
    if len(rows) < 2:
        raise ProfileError(f"{path}: got {len(rows)} rows, want at least 2 (the last one marks the end)")
    return tuple(rows)


def _row(where: str, line: str) -> tuple[float, int]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 2:
        raise ProfileError(f"{where}: got {_got(line.strip())}, want two numbers: {_HEADER}")
    seconds, count = cells
    if not _SECONDS.fullmatch(seconds) or not 0 <= float(seconds) <= LARGEST:
        raise ProfileError(f"{where}: time_s: got {_got(seconds)}, want seconds 0..{LARGEST:g}")
    # Digits are counted first: Python refuses to read a whole number of some thousands of them.
    if not _COUNT.fullmatch(count) or len(count) > 9 or not 0 <= int(count) <= MOST_GPUS:
        raise ProfileError(f"{where}: gpus: got {_got(count)}, want a whole number 0..{MOST_GPUS}")
    return float(seconds), int(count)


def _got(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def synthetic_availability(
    *, seed: int, length_s: float, most_gpus: int, mean_gpus: float, changes_per_h: float, step_gpus: int = 1
) -> Availability:
    """A made-up trace: so many GPUs on average, as many changes by `step_gpus` per hour, both in the long run.

    Each of `most_gpus / step_gpus` blocks comes and goes by itself, as often, and is there the same share of the time.

    Raises:
        ProfileError: a number out of range, or `most_gpus` no multiple of `step_gpus`.
    """
    if not (1 <= step_gpus <= most_gpus <= MOST_GPUS and most_gpus % step_gpus == 0):
        raise ProfileError(
            f"availability: most_gpus: got {most_gpus}, want a multiple of step_gpus = {step_gpus}, 1..{MOST_GPUS}"
        )
    if not 0 <= mean_gpus <= most_gpus:
        raise ProfileError(f"availability: mean_gpus: got {mean_gpus}, want 0..{most_gpus}")
    for name, value in (("length_s", length_s), ("changes_per_h", changes_per_h)):
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"availability: {name}: got {value}, want a finite number > 0")
    if length_s * changes_per_h / 3600 > MOST_ROWS:
        raise ProfileError(f"availability: got more than {MOST_ROWS} changes, want fewer: a shorter or calmer trace")
    draws = np.random.default_rng(derive_seed("availability", seed))
    blocks, share = most_gpus // step_gpus, mean_gpus / most_gpus
    here = int(draws.binomial(blocks, share))
    rows, now_s = [(0.0, here * step_gpus)], 0.0
    # Of n blocks that are there with share a, n a (1 - a) leave per unit of time, and as many come.
    changing = _RARE < share < 1 - _RARE
    pace = changes_per_h / 3600 / (2 * blocks * share * (1 - share)) if changing else 0.0
    while pace and len(rows) <= 2 * MOST_ROWS:
        coming, going = pace * (blocks - here) * share, pace * here * (1 - share)
        now_s += float(draws.exponential(1 / (coming + going)))
        if now_s >= length_s:
            break
        here += 1 if draws.random() * (coming + going) < coming else -1
        if now_s == rows[-1][0]:
            rows.pop()  # gone before the clock could tell
        rows.append((now_s, here * step_gpus))
    return (*rows, (float(length_s), here * step_gpus))
