"""Forward pass of the Qwen3, Qwen3-MoE and Llama families over a slot KV cache, functional and eager.

Sources: Qwen3 technical report, arXiv:2505.09388; Llama 3, arXiv:2407.21783 (grouped-query attention, rotary embedding,
SwiGLU; q / k norm and experts in Qwen3). Equal to the transformers implementation to float32 rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from pearl.engine.embedded.architecture import Architecture, Experts, read_architecture
from pearl.engine.embedded.attention import Batch, Ints
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.operations import TorchOperations, compiled_operations
from pearl.engine.embedded.weights import (
    HOST,
    LayerWeights,
    Place,
    TensorKind,
    Weights,
    hash_of,
    read_checkpoint,
    read_manifest,
)
from pearl.errors import EngineError
from pearl.records.training import Manifest

MLP_TOKENS = 128
"""Tokens that go through an MLP together on a CPU: what it computes in between should stay in the cache of one core."""


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
        rotation = architecture.rotary.rotation(architecture.head_dim, positions or architecture.max_positions)
        self._operations = TorchOperations(architecture, rotation.to(place.device))
        self._compiled = compiled_operations(architecture, rotation) if place == HOST else None

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
        cache.wrote(batch.slots, batch.starts + batch.counts)
        # Compiled loops run on one thread; where torch has more, it makes better use of them.
        compiled = self._compiled if torch.get_num_threads() == 1 else None
        iteration = (compiled or self._operations).iteration(cache, batch)
        hidden = weights.embedding.index_select(0, self._index(token_ids))
        for number, layer in enumerate(weights.layers):
            heads = torch.mm(iteration.norm(hidden), layer.qkv)
            mixed = iteration.mix(heads, layer.head_norms, number)
            hidden = torch.addmm(hidden, mixed, layer.out)
            hidden = self._mlp(layer, iteration.norm(hidden), hidden)
        last = hidden if len(wanted) == len(hidden) else hidden[self._index(wanted)]
        return linear(iteration.norm(last).mul_(weights.norm), weights.head)

    def _index(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.place.device)

    def _mlp(self, layer: LayerWeights, inputs: Tensor, hidden: Tensor) -> Tensor:
        experts = self.architecture.experts
        if layer.router is not None and experts is not None:
            return _mix_experts(layer, layer.router, experts, inputs, hidden)
        if len(inputs) <= MLP_TOKENS or inputs.device.type != "cpu":
            return _gated(layer, inputs, hidden)
        parts = zip(torch.split(inputs, MLP_TOKENS), torch.split(hidden, MLP_TOKENS), strict=True)
        return torch.cat([_gated(layer, part, residual) for part, residual in parts])


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
