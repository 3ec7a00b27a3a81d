"""A roofline: iteration times of a model on a GPU that have no table, from sizes and bandwidths alone.

The time of an iteration of p prefill tokens and d decoding sequences at context c, n = p + d, on each of tp GPUs, is the sum of

- *dense matrices*: the longer of computing 2 n numbers per weight and of reading the weights;
- *experts*: reading those that some token is sent to, count * (1 - (1 - per_token / count)^n) when tokens choose evenly and for
  themselves, and computing 2 n per_token of them: many small products, which neither overlap nor come near the peak;
- *head*: as a dense matrix, for one token of each sequence;
- *elementwise*: reading and writing activations, norms whole on each GPU;
- *attention of decoding*: reading the KV of all d sequences, of at least one head on each GPU;
- *attention of prefill*: computing 4 numbers per head, dimension and pair of tokens; the p tokens are the last of sequences of c;
- *all-reduce*: twice in each layer where tp > 1: a latency, and 2 (tp - 1) / tp times the activations over the link;
- *kernels*: what each layer takes to start, by kind.

What hardware reaches of its peak is in `EFFICIENCY`, fitted to the tables that pearl ships: 5 % off those on average, 4-17 % off
the same source for other models and GPUs (`docs/iteration-times.md`). Calibrate online.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pearl.core.priors import HAND_OFF, platform_prior
from pearl.core.profile import IterationTimes, PlatformProfile
from pearl.errors import ProfileError
from pearl.silicon.specs import BYTES_PER_NUMBER, MODELS, ExpertShape, GpuSpec, ModelShape
from pearl.units import format_bytes

PREFILL = (0, 1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DECODING = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT = (64, 1024, 4096, 16_384, 65_536, 131_072)
"""Axes of the grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What is reached of each peak, and what starts cost."""

    dense_flops: float
    expert_flops: float
    prefill_flops: float
    weight_bandwidth: float
    kv_bandwidth: float
    activation_bandwidth: float
    link_bandwidth: float
    all_reduce_s: float
    """Latency of one."""
    layer_s: float
    """Starting the kernels of a layer, attention left out."""
    expert_layer_s: float
    """What a layer with experts adds to that."""
    prefill_layer_s: float
    decode_layer_s: float
    """Starting attention."""


EFFICIENCY = Efficiency(
    dense_flops=0.8,
    expert_flops=0.35,
    prefill_flops=0.68,
    weight_bandwidth=0.9,
    kv_bandwidth=0.9,
    activation_bandwidth=0.5,
    link_bandwidth=0.49,
    all_reduce_s=6e-6,
    layer_s=22e-6,
    expert_layer_s=16e-6,
    prefill_layer_s=44e-6,
    decode_layer_s=17e-6,
)
"""Source: least squares over the sixteen shipped tables, within what is physical: at most 0.9 of a bandwidth and 0.8 of the
peak of large matrices, activations at half the bandwidth or more. `scripts/roofline_errors.py` says how exact that is."""

MEMORY_SHARE = 0.9
"""Of a GPU that an engine takes. Source: vLLM's default."""
RESERVED_BYTES = 4.6e9
"""Of that, for activations, buffers and the framework. Source: the tables' estimate, 4.4e9 to 5.2e9."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The law of the module for one model, GPU and tensor parallelism."""

    model: ModelShape
    gpu: GpuSpec
    tp: int
    efficiency: Efficiency = EFFICIENCY

    def seconds(self, prefill_tokens: int, decoding: int, context_tokens: int) -> float:
        """Time of one iteration; of nothing: as of a token, without its attention."""
        tokens = max(1, prefill_tokens + decoding)
        sequences = max(1, decoding + -(-prefill_tokens // context_tokens))
        return (
            self.model.layers * (self._layer_s(tokens) + self._reduce_s(tokens))
            + self._dense_s(self.model.hidden * self.model.vocabulary, sequences)
            + self._decode_attention_s(decoding, context_tokens)
            + self._prefill_attention_s(prefill_tokens, context_tokens)
        )

    def _layer_s(self, tokens: int) -> float:
        """All but attention and communication."""
        model, experts, e = self.model, self.model.experts, self.efficiency
        numbers = 8 * model.hidden
        if experts is None:
            mlp_s, numbers = self._dense_s(model.mlp_weights, tokens), numbers + 3 * model.intermediate // self.tp
        else:
            mlp_s = self._experts_s(experts, tokens) + e.expert_layer_s
        moved = numbers * tokens * BYTES_PER_NUMBER
        elementwise_s = moved / (self.gpu.memory_bytes_per_s * e.activation_bandwidth)
        return self._dense_s(model.attention_weights, tokens) + mlp_s + elementwise_s + e.layer_s

    def _dense_s(self, weights: int, tokens: int) -> float:
        computing_s = 2 * tokens * weights / self.tp / (self.gpu.flops_per_s * self.efficiency.dense_flops)
        return max(computing_s, self._reading_s(weights))

    def _experts_s(self, experts: ExpertShape, tokens: int) -> float:
        weights = self.model.mlp_weights
        computed = 2 * tokens * experts.per_token * weights / self.tp
        computing_s = computed / (self.gpu.flops_per_s * self.efficiency.expert_flops)
        return computing_s + self._reading_s(weights * distinct_experts(experts, tokens))

    def _reading_s(self, weights: float) -> float:
        return weights * BYTES_PER_NUMBER / self.tp / (self.gpu.memory_bytes_per_s * self.efficiency.weight_bandwidth)

    def _reduce_s(self, tokens: int) -> float:
        """Both all-reduces of a layer, as rings."""
        if self.tp == 1:
            return 0.0
        moved = 2 * (self.tp - 1) / self.tp * tokens * self.model.hidden * BYTES_PER_NUMBER
        link = self.gpu.link_bytes_per_s * self.efficiency.link_bandwidth
        return 2 * (self.efficiency.all_reduce_s + moved / link)

    def _decode_attention_s(self, decoding: int, context_tokens: int) -> float:
        if not decoding:
            return 0.0
        read = decoding * context_tokens * self.model.kv_bytes_per_token(self.tp) / self.tp
        bandwidth = self.gpu.memory_bytes_per_s * self.efficiency.kv_bandwidth
        return self.model.layers * self.efficiency.decode_layer_s + read / bandwidth

    def _prefill_attention_s(self, tokens: int, context_tokens: int) -> float:
        if not tokens:
            return 0.0
        whole, rest = divmod(tokens, context_tokens)
        pairs = whole * context_tokens * (context_tokens + 1) / 2 + rest * (context_tokens - (rest - 1) / 2)
        heads = -(-self.model.heads // self.tp)
        computed = 4 * heads * self.model.head_dim * pairs * self.model.layers
        started_s = self.model.layers * self.efficiency.prefill_layer_s
        return started_s + computed / (self.gpu.flops_per_s * self.efficiency.prefill_flops)


def distinct_experts(experts: ExpertShape, tokens: int) -> float:
    """Expected number of experts that at least one token is sent to, when each chooses evenly and for itself."""
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)


def roofline(model: ModelShape, gpu: GpuSpec, tp: int, efficiency: Efficiency = EFFICIENCY) -> PlatformProfile:
    """The profile of a model that has no table. What the law does not know follows the two models that are published:

    hand-offs are theirs; weights load in proportion to their size; starting and sleeping are linear in it; waking is the mean.

    Raises:
        ProfileError: tp does not divide the heads, or the weights leave no room for KV.
    """
    if tp < 1 or model.heads % tp:
        raise ProfileError(f"roofline of {model.name}: tp: got {tp}, want a divisor of its {model.heads} heads")
    capacity_tokens = kv_capacity_tokens(model, gpu, tp)
    if capacity_tokens < 1:
        raise ProfileError(
            f"roofline of {model.name} on {gpu.name}: tp: got {tp}, which leaves no room for KV beside "
            f"{format_bytes(model.weight_bytes)} of weights; want more GPUs"
        )
    line, time_s = Roofline(model, gpu, tp, efficiency), _Changes(model)
    cells_s = tuple(tuple(tuple(line.seconds(p, d, c) for c in CONTEXT) for d in DECODING) for p in PREFILL)
    return PlatformProfile(
        model=model.name,
        model_hash=f"roofline-{model.name.lower()}",
        device=f"NVIDIA {gpu.name.upper()} (roofline)",
        dtype="bfloat16",
        tp=tp,
        iterations=IterationTimes(prefill_tokens=PREFILL, decoding=DECODING, context_tokens=CONTEXT, cells_s=cells_s),
        kv_capacity_tokens=capacity_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token(tp),
        hand_off=HAND_OFF,
        weight_load_s=time_s.weight_load_s,
        sleep_s=time_s.sleep_s,
        wake_s=time_s.wake_s,
        engine_start_s=time_s.start_s,
    )


def kv_capacity_tokens(model: ModelShape, gpu: GpuSpec, tp: int) -> int:
    """Tokens whose KV fits beside the weights on a worker of so many GPUs; below 1 where they do not fit."""
    room = tp * (gpu.memory_bytes * MEMORY_SHARE - RESERVED_BYTES) - model.weight_bytes
    return math.floor(room / model.kv_bytes_per_token(tp))


class _Changes:
    """Changes of state of an engine, by the size of the weights, through what is published of two models."""

    def __init__(self, model: ModelShape) -> None:
        small, large = (platform_prior(f"{name}-h100").by_tp[1] for name in _PUBLISHED)
        small_bytes, large_bytes = (MODELS[name].weight_bytes for name in _PUBLISHED)
        along = (model.weight_bytes - small_bytes) / (large_bytes - small_bytes)
        self.weight_load_s = large.weight_load_s * model.weight_bytes / large_bytes
        self.sleep_s = small.sleep_s + along * (large.sleep_s - small.sleep_s)
        self.wake_s = (small.wake_s + large.wake_s) / 2
        starts_s = small.engine_start_s or 0.0, large.engine_start_s or 0.0
        self.start_s = starts_s[0] + along * (starts_s[1] - starts_s[0])


_PUBLISHED = ("qwen3-8b", "qwen3-30b-a3b")
