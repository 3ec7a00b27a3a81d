"""Streams begin anew from their parts alone, and those of other parts are others."""

from __future__ import annotations

import numpy as np

from pearl.pipeline.tasks import derive_seed
from pearl.sim.draws import Draws


def test_a_stream_depends_on_its_parts_alone() -> None:
    draws = Draws()
    first = draws.begin("a", 1).standard_normal(5).tolist()
    draws.begin("b", 1).integers(10, size=3)  # leaves half of a word over
    assert draws.begin("a", 1).standard_normal(5).tolist() == first
    assert Draws().begin("a", 1).standard_normal(5).tolist() == first


def test_the_state_is_that_of_the_seeds() -> None:
    """Stepped by hand: state * multiplier + increment, both those of PCG64, then its output function."""
    bits = np.random.PCG64(0)
    state, increment = derive_seed("high", "x") << 64 | derive_seed("low", "x"), bits.state["state"]["inc"]
    state = (state * 47026247687942121848144207491837523525 + increment) % 2**128
    folded, turn = (state >> 64 ^ state) % 2**64, state >> 122
    word = (folded >> turn | folded << (64 - turn)) % 2**64
    assert Draws().begin("x").random() == (word >> 11) / 2**53


def test_streams_of_neighbours_are_not_alike() -> None:
    """4,000 streams, four numbers each: no number tells the next one of its stream, or the same one of the next stream."""
    draws = Draws()
    found = np.array([draws.begin("x", number).random(4) for number in range(4000)])
    together = np.corrcoef(np.hstack([found[:-1], found[1:]]).T) - np.eye(8)
    assert np.abs(together).max() < 5 / np.sqrt(4000)
    assert np.abs(found.mean(axis=0) - 0.5).max() < 5 / np.sqrt(12 * 4000)
