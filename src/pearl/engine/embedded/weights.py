"""Weights of the embedded engine: read from a checkpoint folder or a manifest, checked, and fused for the forward pass.

Invariant *all or nothing*: every tensor is read and checked before anything is returned, so a caller that keeps its old
`Weights` until then never serves a mixture. safetensors only; transformers is not imported.

Fused form (what makes the forward pass short):

- norms before a projection are multiplied into its columns: `W (x * g) = (W * g) x`;
- q, k, v are one matrix, gate and up are one matrix;
- head dimensions of q and k are interleaved, `(i, i + head_dim / 2)` side by side, so that the rotary embedding is one
  complex multiplication; scores do not change, as q and k move alike;
- the softmax scale `head_dim ** -0.5` is part of the q norm or, where there is none, of the q projection.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pearl.engine.embedded.architecture import Architecture
from pearl.errors import ConfigError, ModelError, WeightsError
from pearl.records.training import Manifest, Shard, model_hash

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")
"""What a checkpoint may hold, whatever the engine computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an engine computes, and in which precision."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, device: str, dtype: str) -> Self:
        """Read `engine.device` (`auto`: a GPU where there is one) and `engine.dtype`.

        Raises:
            ConfigError: there is no such device here.
        """
        gpu = torch.cuda.is_available()
        name = ("cuda" if gpu else "cpu") if device == "auto" else device
        if name.startswith("cuda") and not gpu:
            raise ConfigError(f"engine.device: got {device}, want cpu or auto (torch finds no GPU here)")
        place = torch.device(name)
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise ConfigError(f"engine.device: got {device}, want cpu, auto, or cuda:0 to cuda:{last} (the GPUs here)")
        return cls(device=place, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])

    def put(self, tensor: Tensor) -> Tensor:
        """Bring a tensor there."""
        return tensor.to(self.device, self.dtype)


def release_memory(device: torch.device) -> None:
    """Give memory that torch has freed back to the device, or to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # Small tensors come from the C library's heap, which keeps what is freed.
        ctypes.CDLL(None).malloc_trim(0)


def zeros(shape: tuple[int, ...], place: Place) -> Tensor:
    """Zeros; on a CPU in pages of 2 MiB where the system has them, because a batch reads all over a cache in every iteration."""
    if place.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, device=place.device, dtype=place.dtype)
    count = math.prod(shape)
    try:
        memory = mmap.mmap(-1, count * place.dtype.itemsize)
    except (OSError, OverflowError, ValueError) as error:
        raise torch.OutOfMemoryError(f"{count * place.dtype.itemsize} bytes: {error}") from error
    # Without huge pages the memory is as good, only slower.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Written to now: memory that is not there must show here and not in some iteration.
    return torch.frombuffer(memory, dtype=place.dtype, count=count).view(shape).zero_()


HOST = Place(device=torch.device("cpu"), dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """What a stored tensor must look like."""

    dtype: str
    """As in safetensors."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint as stored."""

    tensors: Mapping[str, Tensor]
    kinds: Mapping[str, TensorKind]
    hash: str
    """`pearl.records.training.model_hash` over `kinds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer, fused, each matrix `[in, out]`; h = hidden, d = head_dim, E = experts."""

    qkv: Tensor
    """Shape `[h, (heads + 2 kv_heads) d]`."""
    head_norms: Tensor | None
    """Shape `[heads + kv_heads, d]`: q norm (with the softmax scale) per head, k norm per KV head; None for Llama."""
    out: Tensor
    """Shape `[heads d, h]`."""
    gate_up: Tensor
    """Shape `[h, 2 intermediate]`; with experts `[E, h, 2 intermediate]`."""
    down: Tensor
    """Shape `[intermediate, h]`; with experts `[E, intermediate, h]`."""
    router: Tensor | None
    """Shape `[h, E]`; None for a layer with an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Everything that the forward pass multiplies by, in one dtype on one device."""

    embedding: Tensor
    """Shape `[vocabulary, h]`."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """Shape `[h]`."""
    head: Tensor
    """Shape `[vocabulary, h]`; the embedding itself when tied."""

    @classmethod
    def fuse(cls, architecture: Architecture, tensors: Mapping[str, Tensor], place: Place = HOST) -> Self:
        """Fuse the tensors of a checkpoint, given under their stored names; layer by layer, to need little memory."""
        embedding = place.put(tensors["model.embed_tokens.weight"])
        return cls(
            embedding=embedding,
            layers=tuple(
                _LayerFuser(architecture, tensors, layer, place).fuse() for layer in range(architecture.layers)
            ),
            norm=place.put(tensors["model.norm.weight"]),
            head=embedding if architecture.tied else place.put(tensors["lm_head.weight"]),
        )


class _LayerFuser:
    """Fuses one layer, in float32 on the device, whatever the weights end as."""

    def __init__(self, architecture: Architecture, tensors: Mapping[str, Tensor], layer: int, place: Place) -> None:
        self._architecture, self._tensors, self._layer, self._place = architecture, tensors, layer, place

    def fuse(self) -> LayerWeights:
        gate_up, down, router = self._mlp()
        qkv, head_norms = self._attention()
        return LayerWeights(
            qkv=qkv,
            head_norms=head_norms,
            out=self._put(self._tensor("self_attn.o_proj").t()),
            gate_up=gate_up,
            down=down,
            router=router,
        )

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[f"model.layers.{self._layer}.{name}.weight"].to(self._place.device, torch.float32)

    def _put(self, tensor: Tensor) -> Tensor:
        return self._place.put(tensor).contiguous()

    def _attention(self) -> tuple[Tensor, Tensor | None]:
        a = self._architecture
        width, scale = a.head_dim, a.head_dim**-0.5
        halves = torch.arange(width, device=self._place.device).view(2, width // 2).t().flatten()

        def interleaved(name: str) -> Tensor:
            return self._tensor(name).view(-1, width, a.hidden)[:, halves].flatten(0, 1)

        queries, keys = interleaved("self_attn.q_proj"), interleaved("self_attn.k_proj")
        norms = None
        if a.head_norms:
            q_norm, k_norm = (self._tensor(f"self_attn.{name}_norm")[halves] for name in "qk")
            norms = self._put(torch.cat(((q_norm * scale).expand(a.heads, -1), k_norm.expand(a.kv_heads, -1))))
        else:
            queries = queries * scale
        qkv = torch.cat((queries, keys, self._tensor("self_attn.v_proj"))) * self._tensor("input_layernorm")
        return self._put(qkv.t()), norms

    def _mlp(self) -> tuple[Tensor, Tensor, Tensor | None]:
        gain = self._tensor("post_attention_layernorm")
        experts = self._architecture.experts
        if experts is None or not self._architecture.has_experts(self._layer):
            return self._gate_up("mlp", gain), self._put(self._tensor("mlp.down_proj").t()), None
        names = [f"mlp.experts.{expert}" for expert in range(experts.count)]
        gate_up = torch.stack([self._gate_up(name, gain) for name in names])
        down = torch.stack([self._put(self._tensor(f"{name}.down_proj").t()) for name in names])
        return gate_up, down, self._put((self._tensor("mlp.gate") * gain).t())

    def _gate_up(self, name: str, gain: Tensor) -> Tensor:
        both = torch.cat((self._tensor(f"{name}.gate_proj"), self._tensor(f"{name}.up_proj")))
        return self._put((both * gain).t())


def read_checkpoint(folder: Path, architecture: Architecture) -> Checkpoint:
    """Read the safetensors files of a Hugging Face folder.

    Raises:
        ModelError: a file is missing or damaged, a tensor is missing, too many, or of another shape or type.
    """
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, TensorKind] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    stored = file.get_slice(name)
                    kinds[name] = TensorKind(dtype=str(stored.get_dtype()), shape=tuple(stored.get_shape()))
                    # A copy: the file is mapped, and must not be able to change (or shrink) under a running engine.
                    tensors[name] = file.get_tensor(name).clone()
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; want the weights of the checkpoint") from None
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
    if architecture.tied:
        # Some checkpoints store the head a second time.
        tensors.pop("lm_head.weight", None)
        kinds.pop("lm_head.weight", None)
    fault = _first_fault(architecture, kinds, tensors)
    if fault is not None:
        raise ModelError(f"{folder}: {fault}")
    return Checkpoint(tensors=tensors, kinds=kinds, hash=hash_of(kinds))


def read_manifest(manifest: Manifest, kinds: Mapping[str, TensorKind]) -> dict[str, Tensor]:
    """Read and check every tensor of a published version; `kinds` is what this model's checkpoint holds.

    Raises:
        WeightsError: another model's weights, a part of a tensor, damaged or vanished bytes.
    """
    where = f"weights of version {manifest.version}"
    own = hash_of(kinds)
    if manifest.model_hash != own:
        raise WeightsError(f"{where}: model_hash: got {manifest.model_hash}, want {own} (this engine's model)")
    shards: dict[str, Shard] = {}
    for shard in manifest.shards:
        if shard.name in shards:
            raise WeightsError(f"{where}: {shard.name}: got more than one shard, want whole tensors")
        kind = kinds.get(shard.name)
        got = TensorKind(dtype=shard.dtype, shape=shard.shape)
        if kind != got or any(shard.start):
            raise WeightsError(f"{where}: {shard.name}: got {got} at {shard.start}, want {kind} whole")
        if not shard.locations:
            raise WeightsError(f"{where}: {shard.name}: no location")
        shards[shard.name] = shard
    missing = kinds.keys() - shards.keys()
    if missing:
        raise WeightsError(f"{where}: {len(missing)} tensors are missing, the first is {min(missing)}")
    return _read_shards(where, shards.values())


def hash_of(kinds: Mapping[str, TensorKind]) -> str:
    """Hash of an architecture."""
    return model_hash((name, kind.dtype, kind.shape) for name, kind in kinds.items())


def _read_shards(where: str, shards: Iterable[Shard]) -> dict[str, Tensor]:
    by_path: dict[str, list[Shard]] = {}
    for shard in shards:
        by_path.setdefault(shard.locations[0], []).append(shard)
    tensors: dict[str, Tensor] = {}
    for path, stored in by_path.items():
        try:
            with safe_open(path, framework="pt") as file:
                for shard in stored:
                    tensors[shard.name] = file.get_tensor(shard.name).clone()
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{where}: {path}: cannot be read: {error}") from None
        for shard in stored:
            _check_shard(f"{where}: {path}: {shard.name}", shard, tensors[shard.name])
    return tensors


def _check_shard(where: str, shard: Shard, tensor: Tensor) -> None:
    if tuple(tensor.shape) != shard.shape or _dtype_name(tensor) != shard.dtype:
        got = f"{_dtype_name(tensor)} {tuple(tensor.shape)}"
        raise WeightsError(f"{where}: got {got} in the file, want {shard.dtype} {shard.shape} as announced")
    checksum = f"crc32:{zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data):08x}"
    if checksum != shard.checksum:
        raise WeightsError(f"{where}: checksum: got {checksum}, want {shard.checksum} (the bytes are damaged)")
    if not bool(torch.isfinite(tensor).all()):
        raise WeightsError(f"{where}: holds numbers that are not finite (training has diverged)")


def _dtype_name(tensor: Tensor) -> str:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    return names.get(tensor.dtype, str(tensor.dtype))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not index.exists():
        return [folder / WEIGHTS_FILE]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error!r}") from None


def _first_fault(
    architecture: Architecture, kinds: Mapping[str, TensorKind], tensors: Mapping[str, Tensor]
) -> str | None:
    """What is wrong with the stored tensors, None when nothing is."""
    want = architecture.tensors()
    for name in sorted(want.keys() - kinds.keys()):
        return f"{name}: missing from the weights, want shape {want[name]}"
    for name in sorted(kinds.keys() - want.keys()):
        return f"{name}: got a tensor that config.json does not call for"
    for name, shape in want.items():
        kind = kinds[name]
        if kind.shape != shape:
            return f"{name}: got shape {kind.shape}, want {shape} (by config.json)"
        if kind.dtype not in DTYPES:
            return f"{name}: got type {kind.dtype}, want one of {', '.join(DTYPES)}"
        if not bool(torch.isfinite(tensors[name]).all()):
            return f"{name}: holds numbers that are not finite"
    return None
