"""Many short streams of random numbers, each begun from its own seed."""

from __future__ import annotations

import numpy as np

from pearl.pipeline.tasks import derive_seed


class Draws:
    """A generator that begins anew for each script: making one takes as long as writing the script."""

    __slots__ = ("_bits", "_generator", "_state")

    def __init__(self) -> None:
        self._bits = np.random.PCG64(0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def begin(self, *parts: int | str) -> np.random.Generator:
        """The generator at the beginning of the stream of these parts; whatever was drawn from it before does not matter.

        All of its 128 bits are seeded: streams of states that differ in few of them would be alike.
        """
        self._state["state"]["state"] = derive_seed("high", *parts) << 64 | derive_seed("low", *parts)
        self._bits.state = self._state
        return self._generator
