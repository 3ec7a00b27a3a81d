"""Forward pass of the Qwen3 dense family over a slot KV cache, functional and eager.

Source: Qwen3 technical report, arXiv:2505.09388 (grouped-query attention, q / k norm, rotary embedding, SwiGLU). Equal to
the transformers implementation to float32 rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from pearl.engine.embedded.architecture import Architecture, read_architecture
from pearl.engine.embedded.attention import Batch, Group, Ints, groups_of
from pearl.engine.embedded.weights import LayerWeights, TensorKind, Weights, hash_of, read_checkpoint, read_manifest
from pearl.records.training import Manifest


class KvCache:
    """Keys (rotated) and values of every slot, `[layers, slots, kv_heads, positions, head_dim]`, float32.

    What a slot holds beyond its sequence's length is stale and must stay finite, since a masked position still takes part
    as zero times its value: hence `clear`.
    """

    def __init__(self, architecture: Architecture, slots: int, positions: int) -> None:
        shape = (architecture.layers, slots, architecture.kv_heads, positions, architecture.head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self._positions = positions
        self._kv_heads = architecture.kv_heads

    def clear(self, slot: int) -> None:
        """Zero a slot."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def rows(self, batch: Batch) -> Tensor:
        """Rows `[N kv_heads]` of a layer's cache, seen as `[slots kv_heads positions, head_dim]`, for the new tokens."""
        heads = batch.token_slots[:, None] * self._kv_heads + np.arange(self._kv_heads)
        return torch.from_numpy((heads * self._positions + batch.token_positions[:, None]).ravel())


class Model:
    """Architecture and current weights."""

    def __init__(
        self, architecture: Architecture, weights: Weights, kinds: dict[str, TensorKind], positions: int | None = None
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.kinds = kinds
        self.hash = hash_of(kinds)
        self._norm = _Norm(architecture.hidden, architecture.norm_epsilon)
        self._head_norm = _Norm(architecture.head_dim, architecture.norm_epsilon)
        self._rotation = _rotation(architecture, positions or architecture.max_positions)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a Hugging Face folder.

        Raises:
            ModelError: missing or damaged files, an unsupported architecture, wrong tensors.
        """
        architecture = read_architecture(folder)
        checkpoint = read_checkpoint(folder, architecture)
        return cls(architecture, Weights.fuse(architecture, checkpoint.tensors), dict(checkpoint.kinds))

    def load(self, manifest: Manifest) -> None:
        """Take the weights of a published version; on any fault the old ones stay.

        Raises:
            WeightsError: see `read_manifest`.
        """
        tensors = read_manifest(manifest, self.kinds)
        self.weights = Weights.fuse(self.architecture, tensors)

    @torch.inference_mode()
    def forward(self, cache: KvCache, batch: Batch, token_ids: Ints, wanted: Ints) -> Tensor:
        """Run new tokens, extending the cache.

        Args:
            token_ids: shape `[N]`, in the order of `batch.token_slots`.
            wanted: shape `[n]`: indices among the N whose logits are wanted.

        Returns:
            Logits, shape `[n, vocabulary]`, float32.
        """
        weights = self.weights
        groups = groups_of(batch)
        rows = cache.rows(batch)
        rotation = self._rotation[torch.from_numpy(batch.token_positions)].unsqueeze(1)
        hidden = weights.embedding[torch.from_numpy(token_ids)]
        for index, layer in enumerate(weights.layers):
            keys, values = cache.keys[index], cache.values[index]
            mixed = self._attention(layer, self._norm(hidden), rotation, keys, values, rows, groups)
            hidden = torch.addmm(hidden, mixed, layer.out)
            gate, up = torch.mm(self._norm(hidden), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, silu(gate).mul_(up), layer.down)
        last = hidden if len(wanted) == len(hidden) else hidden[torch.from_numpy(wanted)]
        return linear(self._norm(last).mul_(weights.norm), weights.head)

    def _attention(
        self,
        layer: LayerWeights,
        inputs: Tensor,
        rotation: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        groups: tuple[Group, ...],
    ) -> Tensor:
        """Attend; gives the heads' outputs side by side, `[N, heads d]`."""
        a = self.architecture
        qkv = torch.mm(inputs, layer.qkv).view(len(inputs), -1, a.head_dim)
        split = a.heads + a.kv_heads
        qk = self._head_norm(qkv[:, :split]).mul_(layer.head_norms)
        pairs = torch.view_as_complex(qk.view(len(inputs), split, -1, 2))
        qk = torch.view_as_real(pairs * rotation).flatten(-2)
        keys.view(-1, a.head_dim).index_copy_(0, rows, qk[:, a.heads :].reshape(-1, a.head_dim))
        values.view(-1, a.head_dim).index_copy_(0, rows, qkv[:, split:].reshape(-1, a.head_dim))
        queries = qk[:, : a.heads]
        outs = [group.attend(queries[group.tokens], keys, values) for group in groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _Norm:
    """Root-mean-square norm over the last dimension, without gain."""

    def __init__(self, width: int, epsilon: float) -> None:
        # Mean and epsilon as one matrix product: a reduction and an addition cost three times as much at these sizes.
        self._mean = torch.full((width, 1), 1.0 / width)
        self._epsilon = torch.full((1, 1), epsilon)

    def __call__(self, values: Tensor) -> Tensor:
        squares = (values * values).view(-1, values.shape[-1])
        scale = torch.addmm(self._epsilon, squares, self._mean).rsqrt_()
        return values * scale.view(*values.shape[:-1], 1)


def _rotation(architecture: Architecture, positions: int) -> Tensor:
    """Unit complex numbers `[positions, head_dim / 2]` by which interleaved pairs are turned."""
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / architecture.rotary_base**exponents)
    return torch.polar(torch.ones_like(angles), angles)
