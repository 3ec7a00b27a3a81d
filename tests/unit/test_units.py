"""Sizes and durations as people read them."""

from __future__ import annotations

import pytest

from pearl.units import GIB, KIB, MIB, format_bytes, format_duration


def test_units_are_binary() -> None:
    assert (KIB, MIB, GIB) == (2**10, 2**20, 2**30)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30 + 2**29, "1.5 GiB"),
        (5 * 2**40, "5120.0 GiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (1.24, "1.2 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
