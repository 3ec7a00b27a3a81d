"""A tiny model of strong opinions, requests, and a driver that collects what an engine generates."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.model import Model
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import TokenIds
from pearl.records.training import Manifest, Shard, model_hash
from pearl.records.turn import Chunk, EndReason, Sampling, TurnRequest

ROOT = Path(__file__).parents[4]
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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., EmbeddedEngine]:
    def make(model: Path | Model | None = None, **settings: Any) -> EmbeddedEngine:
        defaults = {"max_sequences": 8, "max_context_tokens": 96, "progress_interval_s": 0.0}
        return EmbeddedEngine(model or folder, EngineConfig(**{**defaults, **settings}))

    return make


def tokens(seed: int, count: int) -> list[int]:
    """Arbitrary token ids."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).tolist()


def request(
    name: str,
    context: Sequence[int],
    *,
    trajectory: str | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    stops: tuple[int, ...] = (),
    new: int = 12,
    **fields: Any,
) -> TurnRequest:
    values: dict[str, Any] = {
        "id": RequestId(name),
        "trajectory": TrajectoryId(trajectory or f"trajectory of {name}"),
        "turn": 0,
        "context": TokenIds(context),
        "sampling": Sampling(seed=seed, temperature=temperature, stop_token_ids=stops),
        "max_new_tokens": new,
        "min_version": WeightVersion(0),
    }
    return TurnRequest(**{**values, **fields})


@dataclass
class Result:
    """Everything that chunks said about one request."""

    start: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    end: EndReason | None = None
    error: str | None = None
    computed: int = 0
    chunks: int = 0


def collect(chunks: Iterable[Chunk], into: dict[str, Result] | None = None) -> dict[str, Result]:
    """Join chunks, insisting that they join without gap or overlap and end once."""
    results = {} if into is None else into
    for chunk in chunks:
        result = results.setdefault(chunk.request, Result(start=chunk.start))
        assert result.end is None, f"{chunk.request}: a chunk after the end"
        assert chunk.start == result.start + len(result.ids), f"{chunk.request}: gap or overlap"
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
        result.ids += chunk.token_ids.tolist()
        result.logprobs += chunk.logprobs.tolist()
        for run in chunk.versions.runs:
            result.versions += [run.version] * run.tokens
        result.end, result.error, result.computed = chunk.end, chunk.error, chunk.computed_prompt_tokens
        result.chunks += 1
    return results


def drain(engine: EmbeddedEngine, into: dict[str, Result] | None = None) -> dict[str, Result]:
    """Run an engine until it is idle."""
    results = {} if into is None else into
    while engine.step():
        collect(engine.take_chunks(0.0), results)
    return collect(engine.take_chunks(0.0, force=True), results)


def generate(engine: EmbeddedEngine, *requests: TurnRequest) -> dict[str, Result]:
    engine.submit(requests)
    return drain(engine)


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


class Kit:
    """The functions above for test modules (which cannot import a conftest)."""

    tokens = staticmethod(tokens)
    request = staticmethod(request)
    collect = staticmethod(collect)
    drain = staticmethod(drain)
    generate = staticmethod(generate)
    publish = staticmethod(publish)
    make_folder = staticmethod(make_folder)
    make_family = staticmethod(make_family)
    load_script = staticmethod(load_script)
    vocabulary = VOCABULARY


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
