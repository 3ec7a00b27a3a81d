"""Priors: what is assumed of platforms and workloads until something is measured. Every one of them is to be replaced.

Pure data with its sources, and the rules that fill the gaps between published numbers. `pearl profile` measures a platform,
a file of trajectories or the run itself measures a workload; a prior only has to be near enough to begin with.

Platforms, from published times of one iteration on an H100 (bf16, vLLM 0.24) at decode batches of 1, 16 and 64 and context
4,096, and for 128 and 2,048 prefill tokens beside 16 decoding sequences (NVIDIA's `aiconfigurator-core`; against measured
vLLM they are 16-26 % off, about 10 % with one fitted factor, so differences below 10 % are noise). Between and beyond:

- decoding is linear in sequences between the published batches; an empty batch lies on the line through 1 and 16;
- context costs what reading its KV costs at the bandwidth of the memory: at 4,096 tokens of Qwen3-8B 0.180 ms per sequence,
  and published are 0.181; beyond 64 sequences each further one costs that reading and nothing else;
- prefill is linear between the published chunks, and every prefill token pays for attention to each token before it;
- *dense*: prefill beside decoding adds to its time what it adds beside 16 sequences; alone it pays for the weights too;
- *mixture of experts*: prefill loads every expert by itself, so decoding beside it only adds the reading of its KV.

Times for appending to a prefix, published apart from these, come out within 5 %.

Recipes take the tables of `pearl.silicon` for iterations and KV instead, which are of the same source and much finer; from
here they have what changes of the fleet cost. The rules above stay for what must not read files, or wants a platform whose every
number can be worked out by hand: this core's tests, and benchmarks that time decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile
from pearl.core.workload import WorkloadProfile
from pearl.errors import ProfileError

# -- platforms ------------------------------------------------------------------------------------------------------

HBM_BYTES_PER_S = 3.35e12
"""Memory bandwidth of an H100 SXM. Source: NVIDIA's data sheet."""
CONTEXT_TOKENS = 4096
"""At which the published times hold."""
APPEND_S = (0.102 - 0.057) / (2048 * (32768 - 8192))
"""Of attention, per new token and token before it, Qwen3-8B on one GPU: 2,048 tokens behind 8,192 and 32,768 took 57 and
102 ms. Source: as the module's, on an H200, which computes as an H100 does."""
HAND_OFF = HandOff(fixed_s=0.0275, s_per_byte=1 / 50e9)
"""Fixed: the middle of 20-35 ms measured between two engines (vLLM, NIXL). Per byte: half of 800 Gb/s InfiniBand (the paper,
§6), since the workers of a node share it."""
_PREFILL = (0, 128, 2048)
_DECODING = (0, 1, 16, 64, 256)
_CONTEXTS = (1, CONTEXT_TOKENS, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Seconds per iteration with one tensor parallelism."""

    decode_s: tuple[float, float, float]
    """At 1, 16 and 64 sequences."""
    mixed_s: tuple[float, float]
    """With 128 and 2,048 prefill tokens beside 16 sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is known of one model."""

    name: str
    experts: bool
    weight_bytes: float
    kv_bytes_per_token: int
    append_s: float
    """As `APPEND_S`."""
    times: Mapping[int, Published]
    """By tensor parallelism."""
    capacity_tokens: Mapping[str, int]
    """Device -> tokens whose KV fits beside the weights on one GPU."""
    costs: TransitionCosts
    weight_load_s: float

    def kv_s(self, tp: int, context_tokens: float) -> float:
        """Time in which the GPUs of a worker read the KV of one sequence."""
        return self.kv_bytes_per_token * context_tokens / tp / HBM_BYTES_PER_S

    def iteration_s(self, tp: int, prefill_tokens: int, decoding: int, context_tokens: int) -> float:
        """Time of one iteration, by the rules of the module, at a point of its grid."""
        times = self.times[tp]
        one, sixteen, many = times.decode_s
        kv_s = self.kv_s(tp, CONTEXT_TOKENS)
        at_batch = {0: one - (sixteen - one) / 15, 1: one, 16: sixteen, 64: many, 256: many + 192 * kv_s}
        decode_s = at_batch[decoding] + decoding * (self.kv_s(tp, context_tokens) - kv_s)
        if not prefill_tokens:
            return decode_s
        mixed_s = dict(zip(_PREFILL[1:], times.mixed_s, strict=True))[prefill_tokens]
        attention_s = self.append_s / tp * prefill_tokens * (context_tokens - CONTEXT_TOKENS)
        if self.experts:
            return mixed_s - 16 * kv_s + attention_s + decoding * self.kv_s(tp, context_tokens)
        return decode_s + mixed_s - sixteen + attention_s

    def capacity(self, device: str, tp: int) -> int:
        """Tokens whose KV fits on a worker of so many GPUs: each of them holds a part of the weights."""
        spare_tokens = (tp - 1) * self.weight_bytes / self.kv_bytes_per_token
        return int(tp * self.capacity_tokens[device] + spare_tokens)


def _published(decode_ms: tuple[float, float, float], mixed_ms: tuple[float, float]) -> Published:
    one, sixteen, many = decode_ms
    return Published(decode_s=(one / 1e3, sixteen / 1e3, many / 1e3), mixed_s=(mixed_ms[0] / 1e3, mixed_ms[1] / 1e3))


_QWEN3_8B = Model(
    name="Qwen3-8B",
    experts=False,
    weight_bytes=2 * 8.19e9,
    kv_bytes_per_token=144 * 1024,
    append_s=APPEND_S,
    times=MappingProxyType(
        {
            1: _published((6.5, 10.7, 19.4), (11.2, 51.0)),
            2: _published((4.3, 6.1, 10.6), (6.9, 32.8)),
            4: _published((3.0, 3.9, 6.8), (4.8, 22.6)),
        }
    ),
    capacity_tokens=MappingProxyType({"h100": 383_000, "h200": 782_000}),
    costs=TransitionCosts(start_s=56.29, finalise_s=11.05, activate_s=6.26, return_s=3.18),
    weight_load_s=0.23,  # as for Qwen3-30B-A3B, by size
)
_QWEN3_30B_A3B = Model(
    name="Qwen3-30B-A3B",
    experts=True,
    weight_bytes=2 * 30.53e9,
    kv_bytes_per_token=96 * 1024,
    append_s=APPEND_S * 48 / 36,  # as many heads, but 48 layers, not 36
    times=MappingProxyType(
        {
            1: _published((4.8, 14.6, 30.3), (26.1, 49.9)),
            2: _published((3.8, 9.6, 17.3), (15.3, 34.1)),
            # Not published: those of tp 2 times what Qwen3-8B gains from tp 2 to tp 4, number by number.
            4: _published((2.7, 6.1, 11.1), (10.6, 23.5)),
        }
    ),
    capacity_tokens=MappingProxyType({"h100": 118_000, "h200": 718_000}),
    costs=TransitionCosts(start_s=67.06, finalise_s=17.89, activate_s=6.09, return_s=4.38),
    weight_load_s=0.85,  # 0.7-1.0 s published for a reshard over NCCL
)
_PLATFORMS = MappingProxyType(
    {
        f"{model.name.lower()}-{device}": (model, device)
        for model in (_QWEN3_8B, _QWEN3_30B_A3B)
        for device in ("h100", "h200")
    }
)
PLATFORM_PRIORS = tuple(_PLATFORMS)
"""Names that `platform_prior` takes. An H200 has the times of an H100, so its decoding is faster than assumed, and its own KV
capacity. Costs of change: the paper, Table 3."""


def platform_prior(name: str) -> Platform:
    """What is assumed of a model on a kind of GPU, at tensor parallelism 1, 2 and 4.

    Raises:
        ProfileError: no such prior; the message lists them.
    """
    if name not in _PLATFORMS:
        raise ProfileError(f"platform: got {name!r}, want one of {', '.join(PLATFORM_PRIORS)}")
    model, device = _PLATFORMS[name]
    by_tp = {tp: _profile(model, device, tp) for tp in model.times}
    return Platform(by_tp=MappingProxyType(by_tp), costs=model.costs)


def _profile(model: Model, device: str, tp: int) -> PlatformProfile:
    cells_s = tuple(
        tuple(tuple(model.iteration_s(tp, p, d, c) for c in _CONTEXTS) for d in _DECODING) for p in _PREFILL
    )
    return PlatformProfile(
        model=model.name,
        model_hash=f"prior-{model.name.lower()}",
        device=f"NVIDIA {device.upper()} (prior)",
        dtype="bfloat16",
        tp=tp,
        iterations=IterationTimes(
            prefill_tokens=_PREFILL, decoding=_DECODING, context_tokens=_CONTEXTS, cells_s=cells_s
        ),
        kv_capacity_tokens=model.capacity(device, tp),
        kv_bytes_per_token=model.kv_bytes_per_token,
        hand_off=HAND_OFF,
        weight_load_s=model.weight_load_s,
        sleep_s=model.costs.return_s,
        wake_s=model.costs.activate_s - model.weight_load_s,
        engine_start_s=model.costs.start_s,
    )


# -- workloads ------------------------------------------------------------------------------------------------------

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Shares at which the workloads below were measured."""
_POINTS = (6, 6, 6, 4, 4, 4, 10)
"""Of a distribution, between neighbours of these."""
DECODE_TOKEN_S = 0.01
"""Assumed when a workload's bubble ratio is: about 16 sequences per worker of Qwen3-8B on one GPU."""


def distribution_through(values: Sequence[float], mean: float) -> Distribution:
    """A distribution with these values at `QUANTILES` and this mean.

    Between two quantiles it rises as `x ** k`, x from 0 to 1; k is the same everywhere and such that the mean is right. Each
    point stands at the upper end of its share, so that quantiles are exact.

    Raises:
        ProfileError: no distribution with these quantiles has this mean.
    """
    low, high = -5.0, 5.0  # of log2 k: beyond, all of a part stands at one of its ends
    for _ in range(60):
        middle = (low + high) / 2
        if _shaped(values, 2.0**middle).mean > mean:
            low = middle
        else:
            high = middle
    found = _shaped(values, 2.0**high)
    if not math.isclose(found.mean, mean, rel_tol=1e-6):
        raise ProfileError(f"distribution: got mean {mean:g}, which values of {values} at {QUANTILES} cannot have")
    return found


def _shaped(values: Sequence[float], exponent: float) -> Distribution:
    points: list[float] = []
    weights: list[float] = []
    for index, count in enumerate(_POINTS):
        begin, end = values[index], values[index + 1]
        points += [begin + (end - begin) * (step / count) ** exponent for step in range(1, count + 1)]
        weights += [(QUANTILES[index + 1] - QUANTILES[index]) / count] * count
    return distribution_of(points, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one kind of task: values at `QUANTILES`, and means."""

    turns: tuple[float, ...]
    turns_mean: float
    prompt_tokens: float
    """All prompts are about as long."""
    new_tokens: tuple[float, ...]
    new_tokens_mean: float
    generated_tokens: tuple[float, ...]
    generated_tokens_mean: float
    env_s: Distribution | None = None
    """Where less than quantiles is known."""
    env_quantiles_s: tuple[float, ...] = ()
    env_mean_s: float = 0.0

    def profile(self) -> WorkloadProfile:
        """As a workload."""
        env_s = self.env_s or distribution_through(self.env_quantiles_s, self.env_mean_s)
        return WorkloadProfile(
            turns=distribution_through(self.turns, self.turns_mean),
            prompt_tokens=constant(self.prompt_tokens),
            new_tokens=distribution_through(self.new_tokens, self.new_tokens_mean),
            generated_tokens=distribution_through(self.generated_tokens, self.generated_tokens_mean),
            env_s=env_s,
            # f, the share of time in which a trajectory decodes, is decoding over decoding and waiting; theta = (1 - f) / f.
            theta=env_s.mean / (self.generated_tokens_mean * DECODE_TOKEN_S),
        )


_WORKLOADS = MappingProxyType(
    {
        # 111 trajectories of a coding agent on SWE-rebench (GLM-4.7-Flash). Source: agentcgroup.
        "swe": Measured(
            turns=(9, 26.5, 45, 65.5, 92, 112, 132.8, 145),
            turns_mean=50.7,
            prompt_tokens=13_480,
            new_tokens=(1, 89, 262, 582, 1268, 2253, 9905, 37_073),
            new_tokens_mean=701,
            generated_tokens=(12, 72, 145, 341, 601, 784, 1399, 8977),
            generated_tokens_mean=258,
            env_quantiles_s=(0.004, 0.019, 0.041, 7.17, 9.54, 11.1, 20.4, 308),
            env_mean_s=3.41,
        ),
        # An agent in a terminal. Lengths: 46,377 trajectories of Terminal-Bench 2.0, median 20, mean 47.3; spread as a lognormal
        # of these two. First prompt: that of the task "hello-world". Tokens: coding sessions, median 694 new and 223 generated;
        # spread as in swe, scaled to that; the longest outputs of commands as in swe, not scaled. Waits: 8,110 tool calls,
        # mean 2.9 s, 50 % 0.04, 90 % 9.0, 99 % 20.6, coefficient of variation 3.55; between these as in swe.
        "terminal": Measured(
            turns=(1, 8, 20, 48, 107, 173, 423, 1000),
            turns_mean=47.3,
            prompt_tokens=862,
            new_tokens=(3, 236, 694, 1542, 3359, 5968, 9905, 37_073),
            new_tokens_mean=1400,
            generated_tokens=(18, 111, 223, 524, 924, 1206, 2152, 13_806),
            generated_tokens_mean=397,
            env_quantiles_s=(0.004, 0.019, 0.04, 5.6, 9.0, 11.1, 20.6, 275),
            env_mean_s=2.9,
        ),
        # 200 conversations of an airline's agent (GPT-4o), 53 % of whose turns go to a simulated user: 0.34 s in the middle,
        # 0.53 s at 95 %. Tools are functions; their time was not recorded. Source: tau-bench.
        "tau": Measured(
            turns=(2, 7, 11, 16.25, 20, 23.1, 30, 30),
            turns_mean=12.3,
            prompt_tokens=3713,
            new_tokens=(4, 21, 34, 255, 320, 359, 978, 2889),
            new_tokens_mean=136,
            generated_tokens=(10, 24, 43, 75, 132, 179, 280, 457),
            generated_tokens_mean=61.8,
            env_s=Distribution((0.0, 0.34, 0.53), (0.47, 0.5, 0.03)),
        ),
        # 500 tasks in a web shop (ReAct prompts). The time of the shop was not recorded; 0.1 s is a guess. Source: ReAct.
        "webshop": Measured(
            turns=(4, 6, 7, 7, 9, 14, 14, 14),
            turns_mean=6.87,
            prompt_tokens=560,
            new_tokens=(4, 6, 9, 112, 180, 200, 255, 3012),
            new_tokens_mean=59.2,
            generated_tokens=(3, 6, 10, 27, 40, 46, 63, 120),
            generated_tokens_mean=17.1,
            env_s=constant(0.1),
        ),
        # A puzzle on a board (Sokoban, FrozenLake) in the process of the environment. At most 10 actions and 100 tokens of an
        # answer: the defaults of RAGEN. All else is a guess: most games go on until they are cut, a board takes some 70
        # tokens, and a move takes no time.
        "game": Measured(
            turns=(1, 4, 7, 10, 10, 10, 10, 10),
            turns_mean=6.6,
            prompt_tokens=300,
            new_tokens=(40, 55, 70, 90, 110, 120, 140, 160),
            new_tokens_mean=75,
            generated_tokens=(8, 40, 65, 90, 100, 100, 100, 100),
            generated_tokens_mean=64,
            env_s=constant(0.001),
        ),
    }
)
WORKLOAD_PRIORS = tuple(_WORKLOADS)
"""Names that `workload_prior` takes. None of them is traffic of reinforcement learning."""


def workload_prior(name: str) -> WorkloadProfile:
    """What is assumed of a kind of task.

    Raises:
        ProfileError: no such prior; the message lists them.
    """
    if name not in _WORKLOADS:
        raise ProfileError(f"workload: got {name!r}, want one of {', '.join(WORKLOAD_PRIORS)}")
    return _WORKLOADS[name].profile()


# -- leases ---------------------------------------------------------------------------------------------------------

LEASE_MEAN_S = 5900.0
"""Of a spot GPU, from when it is given until it is taken: 273 GPU-hours and 166 GPUs taken within 11 hours of p3 instances.
Source: Bamboo (NSDI 23), its AWS log. Its GCP log of A100s is calmer (36,000 s), its roughest two hours are not (1,130 s)."""
