"""GPUs and models by name, as the roofline needs them: published numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeVar

from pearl.errors import ProfileError
from pearl.units import GIB

BYTES_PER_NUMBER = 2
"""bfloat16: weights, KV and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A kind of GPU."""

    name: str
    flops_per_s: float
    """Dense bfloat16, without sparsity."""
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    """To the other GPUs of its node, in one direction."""

    def __post_init__(self) -> None:
        _check_positive(self, "GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A mixture of experts in the place of each layer's MLP."""

    count: int
    per_token: int
    """Experts that a token goes through, <= count."""
    intermediate: int
    """Inner size of one."""

    def __post_init__(self) -> None:
        _check_positive(self, "experts")
        if self.per_token > self.count:
            raise ProfileError(f"experts: per_token: got {self.per_token}, want <= count, {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped attention and gated MLPs or experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    """Inner size of the MLP; with experts not used."""
    tied: bool = False
    """Whether the head is the embedding."""
    experts: ExpertShape | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "model")
        if self.heads % self.kv_heads:
            raise ProfileError(f"model: kv_heads: got {self.kv_heads}, want a divisor of heads, {self.heads}")

    @property
    def attention_weights(self) -> int:
        """Numbers in the projections of one layer's attention, all heads."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Numbers in one layer's MLP, or in one expert."""
        return 3 * self.hidden * (self.intermediate if self.experts is None else self.experts.intermediate)

    @property
    def weight_bytes(self) -> int:
        """Of the whole model; norms do not count."""
        experts = self.experts
        per_layer = self.attention_weights + self.mlp_weights * (1 if experts is None else experts.count)
        if experts is not None:
            per_layer += self.hidden * experts.count
        return BYTES_PER_NUMBER * (self.layers * per_layer + self.vocabulary * self.hidden * (1 if self.tied else 2))

    def kv_heads_per_gpu(self, tp: int) -> int:
        """Below one head they repeat."""
        return max(1, -(-self.kv_heads // tp))

    def kv_bytes_per_token(self, tp: int) -> int:
        """On all GPUs of a worker together."""
        return 2 * BYTES_PER_NUMBER * self.layers * self.head_dim * self.kv_heads_per_gpu(tp) * tp


Spec = TypeVar("Spec", GpuSpec, ModelShape)


def _check_positive(spec: GpuSpec | ExpertShape | ModelShape, what: str) -> None:
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 2**62:
            raise ProfileError(f"{what}: {field.name}: got {value}, want a number > 0")


# -- GPUs -----------------------------------------------------------------------------------------------------------


def _gpu(name: str, tflops: float, memory_tb_s: float, memory_gib: float, link_gb_s: float) -> GpuSpec:
    return GpuSpec(
        name=name,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_tb_s * 1e12,
        memory_bytes=memory_gib * GIB,
        link_bytes_per_s=link_gb_s * 1e9,
    )


GPUS: Mapping[str, GpuSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            # Source: NVIDIA's data sheets of the SXM boards. H800 and A800: as H100 and A100, with fewer NVLinks.
            _gpu("a100", 312, 2.039, 80, 300),
            _gpu("a800", 312, 2.039, 80, 200),
            _gpu("h100", 989, 3.35, 80, 450),
            _gpu("h800", 989, 3.35, 80, 200),
            _gpu("h200", 989, 4.8, 141, 450),
            _gpu("h20", 148, 4.0, 96, 450),
            _gpu("b200", 2250, 7.7, 180, 900),
            # Without NVLink: PCIe 4 x16.
            _gpu("l40s", 362, 0.864, 45, 32),
        )
    }
)

# -- models ---------------------------------------------------------------------------------------------------------


def _qwen3(name: str, layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocabulary=151_936,
        intermediate=intermediate,
        tied=tied,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, intermediate: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocabulary=128_256,
        intermediate=intermediate,
    )


MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name.lower(): shape
        for shape in (
            # Source: `config.json` of each checkpoint.
            _qwen3("Qwen3-0.6B", 28, 1024, 16, 3072, tied=True),
            _qwen3("Qwen3-1.7B", 28, 2048, 16, 6144, tied=True),
            _qwen3("Qwen3-4B", 36, 2560, 32, 9728, tied=True),
            _qwen3("Qwen3-8B", 36, 4096, 32, 12_288),
            _qwen3("Qwen3-14B", 40, 5120, 40, 17_408),
            _qwen3("Qwen3-32B", 64, 5120, 64, 25_600),
            ModelShape(
                name="Qwen3-30B-A3B",
                layers=48,
                hidden=2048,
                heads=32,
                kv_heads=4,
                head_dim=128,
                vocabulary=151_936,
                intermediate=6144,
                experts=ExpertShape(count=128, per_token=8, intermediate=768),
            ),
            ModelShape(
                name="Qwen2.5-7B",
                layers=28,
                hidden=3584,
                heads=28,
                kv_heads=4,
                head_dim=128,
                vocabulary=152_064,
                intermediate=18_944,
            ),
            _llama("Llama-3.1-8B", 32, 4096, 32, 14_336),
            _llama("Llama-3.1-70B", 80, 8192, 64, 28_672),
        )
    }
)


def gpu_named(name: str) -> GpuSpec:
    """A kind of GPU, its name in any case.

    Raises:
        ProfileError: no such kind; the message lists them.
    """
    return _named(GPUS, "GPU", name)


def model_named(name: str) -> ModelShape:
    """A model, its name in any case.

    Raises:
        ProfileError: no such model; the message lists them.
    """
    return _named(MODELS, "model", name)


def _named(known: Mapping[str, Spec], what: str, name: str) -> Spec:
    if name.lower() not in known:
        raise ProfileError(f"{what}: got {name!r}, want one of {', '.join(known)}; or describe it")
    return known[name.lower()]
