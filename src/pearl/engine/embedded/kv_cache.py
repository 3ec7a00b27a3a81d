"""Keys and values of all sequences, in slots."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pearl.engine.embedded.architecture import Architecture
from pearl.engine.embedded.attention import Batch, Ints
from pearl.engine.embedded.weights import HOST, Place, zeros


class KvCache:
    """Keys (rotated) and values of every slot, side by side in one tensor.

    What a slot holds beyond its sequence's length is stale and must stay finite, since a masked position still takes part
    as zero times its value: hence `clear`.
    """

    def __init__(self, architecture: Architecture, slots: int, positions: int, place: Place = HOST) -> None:
        a = architecture
        self.blocks = zeros((a.layers, 2, slots, a.kv_heads, positions, a.head_dim), place)
        """Shape `[layers, 2, slots, kv_heads, positions, head_dim]`: keys, then values."""
        self.keys, self.values = self.blocks.unbind(1)
        """Shape `[layers, slots, kv_heads, positions, head_dim]`, views."""
        self.layers = self.blocks.flatten(1, -2).unbind()
        """By layer, shape `[2 slots kv_heads positions, head_dim]`, views."""
        sides_and_heads = np.add.outer(np.arange(2) * slots * a.kv_heads, np.arange(a.kv_heads))
        self._firsts = sides_and_heads.ravel() * positions
        self._slot_rows = a.kv_heads * positions
        self._written = np.zeros(slots, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return self.blocks.numel() * self.blocks.element_size()

    def wrote(self, slots: Ints | int, ends: Ints | int) -> None:
        """Say that positions before `ends` were written to."""
        self._written[slots] = np.maximum(self._written[slots], ends)

    def clear(self, slot: int, start: int = 0) -> None:
        """Zero what was written of a slot from a position on."""
        end = int(self._written[slot])
        if start < end:
            self.blocks[:, :, slot, :, start:end] = 0
            self._written[slot] = start

    def rows(self, batch: Batch) -> Tensor:
        """Rows of `layers` that each new token's keys and values belong in, by head; shape `[N 2 kv_heads]`."""
        tokens = batch.token_slots * self._slot_rows + batch.token_positions
        return torch.from_numpy(np.add.outer(tokens, self._firsts).ravel()).to(self.blocks.device)
