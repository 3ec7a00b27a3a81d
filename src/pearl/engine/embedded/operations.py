"""What a forward pass does between its matrix products: norms, rotations, writing to the cache, and attention.

Twice: on torch, for every device and precision, and compiled, for float32 on a CPU, where the many small operations of a
decode iteration would cost more than its matrix products.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from pearl.engine.embedded.architecture import Architecture
from pearl.engine.embedded.attention import Batch, groups_of
from pearl.engine.embedded.kv_cache import KvCache

COMPILER = "numba"

_log = logging.getLogger(__name__)


class Iteration(Protocol):
    """The operations of one iteration: N new tokens, of which the cache has a place for each."""

    def norm(self, rows: Tensor) -> Tensor:
        """Root-mean-square norm of rows `[n, hidden]`, without gain."""

    def mix(self, heads: Tensor, gains: Tensor | None, layer: int) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache, and attend.

        Args:
            heads: queries, keys and values of the new tokens, `[N, (heads + 2 kv_heads) d]`; may be changed.
            gains: of the norm of queries and keys, `[heads + kv_heads, d]`; None: they have no norm.
            layer: whose keys and values these are.

        Returns:
            What the heads saw, side by side, `[N, heads d]`.
        """


class Operations(Protocol):
    """A way to compute."""

    def iteration(self, cache: KvCache, batch: Batch) -> Iteration:
        """Prepare for the new tokens of a batch."""


def compiled_operations(architecture: Architecture, rotation: Tensor) -> Operations | None:
    """Compiled operations for float32 on a CPU; None where there is no compiler."""
    if find_spec(COMPILER) is None:
        return None
    try:
        from pearl.engine.embedded.compiled import CompiledOperations
    except ImportError as error:
        _log.warning("%s is installed but cannot be used, torch is slower: %s", COMPILER, error)
        return None
    return CompiledOperations(architecture, rotation)


class TorchOperations:
    """For every device and precision; norms and rotations in float32."""

    def __init__(self, architecture: Architecture, rotation: Tensor) -> None:
        """`rotation`: complex, `[positions, d / 2]`, on the device."""
        self.architecture = architecture
        self.rotation = rotation
        self.norm = _Norm(architecture.hidden, architecture.norm_epsilon, rotation.device)
        self.head_norm = _Norm(architecture.head_dim, architecture.norm_epsilon, rotation.device)

    def iteration(self, cache: KvCache, batch: Batch) -> Iteration:
        """Prepare for the new tokens of a batch."""
        return _TorchIteration(self, cache, batch)


class _TorchIteration:
    def __init__(self, operations: TorchOperations, cache: KvCache, batch: Batch) -> None:
        a = operations.architecture
        self._architecture = a
        self._norm, self._head_norm = operations.norm, operations.head_norm
        self._layers = cache.layers
        self._rows = cache.rows(batch)
        self._groups = groups_of(batch, cache.blocks, a.heads // a.kv_heads)
        self._seen = [group.seen(cache.blocks) for group in self._groups]
        positions = torch.from_numpy(batch.token_positions).to(operations.rotation.device)
        self._rotation = operations.rotation.index_select(0, positions).unsqueeze(1)

    def norm(self, rows: Tensor) -> Tensor:
        return self._norm(rows)

    def mix(self, heads: Tensor, gains: Tensor | None, layer: int) -> Tensor:
        a = self._architecture
        count, width, split = len(heads), a.head_dim, a.heads + a.kv_heads
        heads = heads.view(count, -1, width)
        qk = heads[:, :split]
        if gains is not None:
            qk = self._head_norm(qk.reshape(-1, width)).view(count, split, width).mul_(gains)
        pairs = torch.view_as_complex(qk.float().view(count, split, -1, 2))
        qk = torch.view_as_real(pairs * self._rotation).view(count, split, width).to(heads.dtype)
        new = torch.cat((qk[:, a.heads :], heads[:, split:]), 1)
        self._layers[layer].index_copy_(0, self._rows, new.view(-1, width))
        queries = qk[:, : a.heads]
        outs = [
            group.attend(queries[group.tokens], *seen[layer])
            for group, seen in zip(self._groups, self._seen, strict=True)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _Norm:
    """Root-mean-square norm of rows `[n, width]`, without gain; computed in float32."""

    def __init__(self, width: int, epsilon: float, device: torch.device) -> None:
        # Mean and epsilon as one matrix product: a reduction and an addition cost three times as much at these sizes.
        self._mean = torch.full((width, 1), 1.0 / width, device=device)
        self._value = epsilon
        self._epsilon = self._mean[:0]

    def __call__(self, values: Tensor) -> Tensor:
        exact = values.float()
        epsilon = self._epsilon
        if len(epsilon) != len(exact):
            # Kept at its full size: spreading it out takes a third of the time of a call.
            epsilon = self._epsilon = exact.new_full((len(exact), 1), self._value)
        scale = torch.addmm(epsilon, exact * exact, self._mean).rsqrt_()
        return (exact * scale).to(values.dtype)
