"""Forward pass of the Qwen3, Qwen3-MoE and Llama families over a slot KV cache, functional and eager.

Sources: Qwen3 technical report, arXiv:2505.09388; Llama 3, arXiv:2407.21783 (grouped-query attention, rotary embedding,
SwiGLU; q / k norm and experts in Qwen3). Equal to the transformers implementation to float32 rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from pearl.engine.embedded.architecture import Architecture, Experts, read_architecture
from pearl.engine.embedded.attention import Batch, Group, Ints, groups_of
from pearl.engine.embedded.weights import (
    HOST,
    LayerWeights,
    Place,
    TensorKind,
    Weights,
    hash_of,
    read_checkpoint,
    read_manifest,
    zeros,
)
from pearl.errors import EngineError
from pearl.records.training import Manifest

MLP_TOKENS = 128
"""Tokens that go through an MLP together on a CPU: what it computes in between should stay in the cache of one core."""


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

    def clear(self, slot: int) -> None:
        """Zero what was written of a slot."""
        self.blocks[:, :, slot, :, : self._written[slot]] = 0
        self._written[slot] = 0

    def rows(self, batch: Batch) -> Tensor:
        """Rows of `layers` that each new token's keys and values belong in, by head; shape `[N 2 kv_heads]`."""
        tokens = batch.token_slots * self._slot_rows + batch.token_positions
        return torch.from_numpy(np.add.outer(tokens, self._firsts).ravel()).to(self.blocks.device)


class Model:
    """Architecture and current weights; without weights (`unload`) it can do nothing but `load`."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        kinds: dict[str, TensorKind],
        positions: int | None = None,
        place: Place = HOST,
    ) -> None:
        self.architecture = architecture
        self.weights: Weights | None = weights
        self.kinds = kinds
        self.place = place
        self.hash = hash_of(kinds)
        self._norm = _Norm(architecture.hidden, architecture.norm_epsilon, place)
        self._head_norm = _Norm(architecture.head_dim, architecture.norm_epsilon, place)
        turns = architecture.rotary.rotation(architecture.head_dim, positions or architecture.max_positions)
        self._rotation = turns.to(place.device)

    @classmethod
    def read(cls, folder: Path, place: Place = HOST) -> Self:
        """Read a Hugging Face folder.

        Raises:
            ModelError: missing or damaged files, an unsupported architecture, wrong tensors.
        """
        architecture = read_architecture(folder)
        checkpoint = read_checkpoint(folder, architecture)
        weights = Weights.fuse(architecture, checkpoint.tensors, place)
        return cls(architecture, weights, dict(checkpoint.kinds), place=place)

    def load(self, manifest: Manifest) -> None:
        """Take the weights of a published version; on any fault the old ones stay.

        Raises:
            WeightsError: see `read_manifest`.
        """
        tensors = read_manifest(manifest, self.kinds)
        self.weights = Weights.fuse(self.architecture, tensors, self.place)

    def unload(self) -> None:
        """Free the weights."""
        self.weights = None

    @torch.inference_mode()
    def forward(self, cache: KvCache, batch: Batch, token_ids: Ints, wanted: Ints) -> Tensor:
        """Run new tokens, extending the cache.

        Args:
            token_ids: shape `[N]`, in the order of `batch.token_slots`.
            wanted: shape `[n]`: indices among the N whose logits are wanted.

        Returns:
            Logits, shape `[n, vocabulary]`, in the model's precision.
        """
        weights = self.weights
        if weights is None:
            raise EngineError("the model has no weights; load some first")
        groups = groups_of(batch, cache.blocks, self.architecture.heads // self.architecture.kv_heads)
        seen = zip(*(group.seen(cache.blocks) for group in groups), strict=True)
        rows = cache.rows(batch)
        cache.wrote(batch.slots, batch.starts + batch.counts)
        rotation = self._rotation.index_select(0, self._index(batch.token_positions)).unsqueeze(1)
        hidden = weights.embedding.index_select(0, self._index(token_ids))
        for layer, blocks, views in zip(weights.layers, cache.layers, seen, strict=True):
            queries, new = self._project(layer, self._norm(hidden), rotation)
            blocks.index_copy_(0, rows, new)
            mixed = _attend(groups, queries, views)
            hidden = self._mlp(layer, torch.addmm(hidden, mixed, layer.out))
        last = hidden if len(wanted) == len(hidden) else hidden[self._index(wanted)]
        return linear(self._norm(last).mul_(weights.norm), weights.head)

    def _index(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.place.device)

    def _project(self, layer: LayerWeights, inputs: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[N, heads, d]`, and new rows of the cache `[N 2 kv_heads, d]`: keys and values; turned by position."""
        a = self.architecture
        count, width, split = len(inputs), a.head_dim, a.heads + a.kv_heads
        qkv = torch.mm(inputs, layer.qkv).view(count, -1, width)
        qk = qkv[:, :split]
        if layer.head_norms is not None:
            qk = self._head_norm(qk.reshape(-1, width)).view(count, split, width).mul_(layer.head_norms)
        pairs = torch.view_as_complex(qk.float().view(count, split, -1, 2))
        qk = torch.view_as_real(pairs * rotation).view(count, split, width).to(qkv.dtype)
        return qk[:, : a.heads], torch.cat((qk[:, a.heads :], qkv[:, split:]), 1).view(-1, width)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        inputs, experts = self._norm(hidden), self.architecture.experts
        if layer.router is not None and experts is not None:
            return _mix_experts(layer, layer.router, experts, inputs, hidden)
        if len(inputs) <= MLP_TOKENS or inputs.device.type != "cpu":
            return _gated(layer, inputs, hidden)
        parts = zip(torch.split(inputs, MLP_TOKENS), torch.split(hidden, MLP_TOKENS), strict=True)
        return torch.cat([_gated(layer, part, residual) for part, residual in parts])


def _attend(groups: tuple[Group, ...], queries: Tensor, seen: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    """Attend, each group to what it sees of a layer; gives the heads' outputs side by side, `[N, heads d]`."""
    outs = [group.attend(queries[group.tokens], *view) for group, view in zip(groups, seen, strict=True)]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _gated(layer: LayerWeights, inputs: Tensor, residual: Tensor) -> Tensor:
    gate, up = torch.mm(inputs, layer.gate_up).chunk(2, -1)
    return torch.addmm(residual, silu(gate).mul_(up), layer.down)


def _mix_experts(layer: LayerWeights, router: Tensor, experts: Experts, inputs: Tensor, hidden: Tensor) -> Tensor:
    """Add to each token what its experts make of it; each expert runs once, over all its tokens."""
    odds = torch.softmax(torch.mm(inputs, router).float(), -1)
    shares, chosen = odds.topk(experts.per_token, -1)
    if experts.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    tokens = order // experts.per_token
    weights = shares.flatten()[order].to(inputs.dtype).unsqueeze(1)
    taken = inputs[tokens]
    out = hidden.clone()
    start = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=experts.count).tolist()):
        if count:
            mine = slice(start, start + count)
            gate, up = torch.mm(taken[mine], layer.gate_up[expert]).chunk(2, -1)
            made = torch.mm(silu(gate).mul_(up), layer.down[expert]).mul_(weights[mine])
            out.index_add_(0, tokens[mine], made)
            start += count
    return out


class _Norm:
    """Root-mean-square norm of rows `[n, width]`, without gain; computed in float32."""

    def __init__(self, width: int, epsilon: float, place: Place) -> None:
        # Mean and epsilon as one matrix product: a reduction and an addition cost three times as much at these sizes.
        self._mean = torch.full((width, 1), 1.0 / width, device=place.device)
        self._value = epsilon
        self._epsilon = self._mean[:0]

    def __call__(self, values: Tensor) -> Tensor:
        exact = values.float()
        if len(self._epsilon) != len(exact):
            # Kept at its full size: spreading it out takes a third of the time of a call.
            self._epsilon = exact.new_full((len(exact), 1), self._value)
        scale = torch.addmm(self._epsilon, exact * exact, self._mean).rsqrt_()
        return (exact * scale).to(values.dtype)
