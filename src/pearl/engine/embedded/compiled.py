"""The operations of a forward pass in compiled loops: float32 on a CPU, one thread.

Single tokens (decode) attend in a loop over exactly the positions that each may see, so that neither sequences of unequal
length nor holes between slots cost anything. Chunks attend on torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pearl.engine.embedded import kernels
from pearl.engine.embedded.architecture import Architecture
from pearl.engine.embedded.attention import Batch, groups_of
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.operations import Iteration


class CompiledOperations:
    """Tables that every iteration needs."""

    def __init__(self, architecture: Architecture, rotation: Tensor) -> None:
        """`rotation`: complex, `[positions, d / 2]`."""
        self.architecture = architecture
        self.rotation = torch.view_as_real(rotation).contiguous().numpy()
        self.epsilon = np.float32(architecture.norm_epsilon)
        self.no_gains = np.empty((0, architecture.head_dim), dtype=np.float32)

    def iteration(self, cache: KvCache, batch: Batch) -> Iteration:
        """Prepare for the new tokens of a batch."""
        return _CompiledIteration(self, cache, batch)


class _CompiledIteration:
    def __init__(self, operations: CompiledOperations, cache: KvCache, batch: Batch) -> None:
        a = operations.architecture
        self._operations, self._architecture = operations, a
        self._slots, self._positions = batch.token_slots, batch.token_positions
        self._blocks = cache.blocks.numpy()
        # Sequences are in order of their chunks' length.
        self._singles = int(np.count_nonzero(batch.counts == 1))
        chunks = batch.behind(self._singles)
        self._groups = groups_of(chunks, cache.blocks, a.heads // a.kv_heads) if len(chunks.counts) else ()
        self._seen = [group.seen(cache.blocks) for group in self._groups]
        # Room to compute in is the iteration's own: a model may serve several engines.
        self._head = np.empty(a.head_dim, dtype=np.float32)
        self._scores = np.empty((a.heads // a.kv_heads, cache.blocks.shape[-2]), dtype=np.float32)

    def norm(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        kernels.norm(rows.numpy(), self._operations.epsilon, out.numpy())
        return out

    def mix(self, heads: Tensor, gains: Tensor | None, layer: int) -> Tensor:
        a, operations, singles = self._architecture, self._operations, self._singles
        heads = heads.view(len(heads), -1, a.head_dim)
        numbers = heads.numpy()
        kernels.turn(
            numbers,
            operations.no_gains if gains is None else gains.numpy(),
            operations.rotation,
            self._slots,
            self._positions,
            self._blocks[layer],
            a.heads,
            operations.epsilon,
            self._head,
        )
        out = heads.new_empty(len(heads), a.heads * a.head_dim)
        kernels.attend(
            numbers, self._slots, self._positions, singles, self._blocks[layer], a.heads, out.numpy(), self._scores
        )
        queries, rest = heads[singles:, : a.heads], out[singles:]
        for group, seen in zip(self._groups, self._seen, strict=True):
            rest[group.tokens] = group.attend(queries[group.tokens], *seen[layer])
        return out
