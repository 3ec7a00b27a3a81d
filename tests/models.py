"""Tiny checkpoints of strong opinions for tests of the embedded engine, and weights to publish."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest, Shard, model_hash

ROOT = Path(__file__).parents[1]
VOCABULARY = 98


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def make_folder(out: Path, *, norm_seed: int = 5, **sizes: Any) -> Path:
    """A checkpoint with large weights and uneven norm gains, so that every part of the network shows in the logits."""
    script = load_script("make_tiny_qwen3")
    script.make_tiny_qwen3(out, script.TinyQwen3(**{"init_std": 0.25, **sizes}))
    return spread_norms(out, norm_seed)


def spread_norms(folder: Path, seed: int) -> Path:
    """Give every norm gains of its own."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(tensors.items()):
        if "norm" in name:
            tensors[name] = torch.rand(tensor.shape, generator=generator) + 0.5
    save_file(tensors, file, {"format": "pt"})
    return folder


def make_family(out: Path, family: str, **settings: Any) -> Path:
    """A tiny checkpoint of another family, written by transformers itself; `settings` go into its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        **settings,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.float32)
    model.save_pretrained(out)
    return spread_norms(out, seed=3)


def tokens(seed: int, count: int) -> list[int]:
    """Arbitrary token ids."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).tolist()


def publish(path: Path, tensors: Mapping[str, torch.Tensor], version: int) -> Manifest:
    """Write tensors to a safetensors file and describe them."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    shards = tuple(
        Shard(
            name=name,
            dtype="F32",
            shape=tuple(tensor.shape),
            start=(0,) * tensor.dim(),
            size_bytes=4 * tensor.numel(),
            checksum=f"crc32:{zlib.crc32(tensor.numpy().astype('<f4').tobytes()):08x}",
            locations=(str(path),),
        )
        for name, tensor in tensors.items()
    )
    kinds = [(shard.name, shard.dtype, shard.shape) for shard in shards]
    return Manifest(version=WeightVersion(version), model_hash=model_hash(kinds), shards=shards)
