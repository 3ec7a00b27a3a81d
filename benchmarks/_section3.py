"""Profiles of Qwen3-8B and Qwen3-30B-A3B from what the paper's section 3 states, and from nothing that it found later.

Fixed before any choice was made with it. No figure of the paper's section 6 is in here, nor what Fig. 2c found.

Statements of section 3 that are used:

1. Qwen3-8B, 8 training GPUs, TP2 (Fig. 2a): training takes 163.8 s per step, rollout 5.7 times that on 16 GPUs.
2. Rollout on 24 and 32 GPUs takes 0.897 and 0.808 of the time on 16. (With statement 1 that is 4.6 times training on
   32 GPUs, where the text says 4.5 and 81.8 % of all time: 2 % apart, from rounding; the ratios are kept.)
3. A mean trajectory with one on each worker takes 216.3 s (8B), which is why unlimited GPUs leave training 24.3 % idle.
4. Prefill is 96.68 % of tokens (Fig. 2b, 30B). Read as: of all tokens that requests carry, prompts with what of them is
   cached are 96.68 %. (Read as new tokens only, a trajectory that fits Qwen3's context would generate some 1,300 tokens, and
   one decode iteration of the 8B alone would have to take 0.25 s to fill statement 1.)
5. Prefill is 26.48 % of time (Fig. 2b, 30B). Read as: of the time that colocated engines work on 16 GPUs.
6. Decode yields about 400 tokens/s per GPU between prefills (Fig. 2b, 30B).

Facts that are not the paper's: bf16 weights of 8.19e9 and 30.5e9 parameters, KV of 144 and 96 KiB per token, a context of 40,960
tokens (the models' published configurations); 80 GiB of memory per GPU, nine tenths of it used (the H800's, vLLM's default).

What section 3 leaves open is in `Open`, each with its neutral value. What follows from the statements:

- T(N) = alpha + beta / N, N workers, least squares over statements 1 and 2: equation (1) with
  alpha = S (r A + T_over) + T_env and beta = S B (dL t_prefill + r b).
- S over the mean number of turns: the slowest trajectory alone on a worker takes alpha + beta / B, the mean one 216.3 s, and
  both the same per turn. Turns are log-normal with that ratio of the slowest of B (its quantile 1 - 1/(2B)) to the mean.
- r and dL: the slowest trajectory fills the model's context; the mean prompt over all turns is 96.68 / 3.32 of r.
- A, b, t_prefill of the 8B: alpha and beta, with prefill 26.48 % of what engines do on 8 workers (statement 5 is the only one on
  this; it was measured on the 30B).
- A, b, t_prefill of the 30B: the same trajectories; A + b B / N is what gives 800 tokens/s per TP2 worker at B / 8 sequences;
  b is the 8B's times 96 / 144, the ratio of KV bytes; prefill is 26.48 %.
- theta by its definition: f is decoding time over time in flight, colocated on 16 GPUs.

t_prefill is seconds per *new* token with whatever of the prefix is computed again, which section 3 does not tell apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.makespan import Profile
from pearl.core.platform import Platform
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile
from pearl.core.workload import WorkloadProfile, bubble_ratio

TP = 2
TRAINING_S = 163.8
ROLLOUT_16_S = 5.7 * TRAINING_S
ROLLOUT_S = {8: ROLLOUT_16_S, 12: 0.897 * ROLLOUT_16_S, 16: 0.808 * ROLLOUT_16_S}
"""TP2 workers -> seconds of a rollout, colocated (statements 1 and 2)."""
MEAN_ALONE_S = 216.3
PROMPT_SHARE = 0.9668
PREFILL_TIME_SHARE = 0.2648
DECODE_TOKENS_PER_S = 400.0 * TP
"""Per worker."""
MEASURED_WORKERS = 8
"""Where prefill's share of time and theta are taken: 16 GPUs, the size that Fig. 2a and Fig. 2c share."""

CONTEXT_TOKENS = 40_960
MEMORY_BYTES = TP * 0.9 * 80 * 2**30
GRID_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is published of a model."""

    name: str
    parameters: float
    kv_bytes_per_token: int


QWEN3_8B = Model(name="Qwen3-8B", parameters=8.19e9, kv_bytes_per_token=144 * 1024)
QWEN3_30B_A3B = Model(name="Qwen3-30B-A3B", parameters=30.5e9, kv_bytes_per_token=96 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """What section 3 leaves open."""

    batch: int = 64
    """B of Fig. 2a and 2b, which do not say: the middle of Fig. 2c's 32..96."""
    mean_turns: float = 30.0
    """Turns of a mean trajectory. Equations (1)-(3) see turns only through products that statements fix, but for `env_s`."""
    env_s: float = 2.9
    """Per turn. Mean of 8,110 recorded tool calls of coding agents, none of them the paper's."""
    theta: float | None = None
    """None: by its definition, from the rest."""
    bytes_per_s: float = 50e9
    """Between pools: one 400 Gb/s adapter, as servers of these GPUs have for each. Of little weight: a few seconds per batch."""
    overhead_s: float = 0.0
    """Per turn: alpha holds it together with A and the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a TP2 worker, in the paper's symbols."""

    fixed_s: float
    """A."""
    per_sequence_s: float
    """b."""
    prefill_s: float
    """dL t_prefill: of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """What both models' trajectories are taken to be."""

    turns: Distribution
    generated: float
    """r."""
    new: float
    """dL."""

    @property
    def slowest(self) -> float:
        """S."""
        return self.turns.largest


def fitted_rollout() -> tuple[float, float]:
    """alpha in s and beta in s x workers."""
    workers = np.array(list(ROLLOUT_S), dtype=np.float64)
    beta, alpha = np.polyfit(1 / workers, np.array(list(ROLLOUT_S.values())), 1)
    return float(alpha), float(beta)


def turns_like(mean: float, slowest_over_mean: float, batch: int) -> Distribution:
    """Log-normal turns of a batch at its quantiles (i + 1/2) / B, with the given ratio of the last one to the mean."""
    normal = NormalDist()
    marks = np.array([normal.inv_cdf((i + 0.5) / batch) for i in range(batch)])
    low, high = 0.0, 4.0
    for _ in range(80):
        spread = (low + high) / 2
        values = np.exp(spread * marks)
        low, high = (spread, high) if values[-1] / values.mean() < slowest_over_mean else (low, spread)
    return distribution_of((mean * values / values.mean()).tolist())


def trajectories(choices: Open) -> Trajectories:
    """Turns from Fig. 2a, tokens from Fig. 2b."""
    alpha, beta = fitted_rollout()
    turns = turns_like(choices.mean_turns, (alpha + beta / choices.batch) / MEAN_ALONE_S, choices.batch)
    # The first prompt is like every turn's new tokens: the model has no other. So contexts grow by dL + r from 0.
    growth = CONTEXT_TOKENS / turns.largest
    # Prompts of a trajectory of n turns: sum over k < n of dL + k (dL + r); over all turns its mean is as below.
    long_run = (turns.variance + turns.mean**2) / turns.mean
    mean_prompt_and_reply = growth * (long_run + 1) / 2
    generated = mean_prompt_and_reply * (1 - PROMPT_SHARE)
    return Trajectories(turns=turns, generated=generated, new=growth - generated)


def costs_8b(choices: Open, seen: Trajectories) -> Costs:
    """From alpha, beta and prefill's share."""
    alpha, beta = fitted_rollout()
    fixed_in_all = alpha - seen.slowest * (choices.env_s + choices.overhead_s)
    prefill_in_all = PREFILL_TIME_SHARE * (fixed_in_all + beta / MEASURED_WORKERS)
    decode_beta = beta - prefill_in_all * MEASURED_WORKERS
    decoded = seen.slowest * seen.generated
    return Costs(
        fixed_s=fixed_in_all / decoded,
        per_sequence_s=decode_beta / (decoded * choices.batch),
        prefill_s=prefill_in_all * MEASURED_WORKERS / (choices.batch * seen.slowest),
    )


def costs_30b(choices: Open, seen: Trajectories) -> Costs:
    """From the rate of decoding and prefill's share."""
    sequences = choices.batch / MEASURED_WORKERS
    iteration_s = sequences / DECODE_TOKENS_PER_S
    ratio = QWEN3_30B_A3B.kv_bytes_per_token / QWEN3_8B.kv_bytes_per_token
    per_sequence_s = ratio * costs_8b(choices, seen).per_sequence_s
    prefill_over_decode = PREFILL_TIME_SHARE / (1 - PREFILL_TIME_SHARE)
    return Costs(
        fixed_s=iteration_s - sequences * per_sequence_s,
        per_sequence_s=per_sequence_s,
        prefill_s=prefill_over_decode * seen.generated * iteration_s / sequences,
    )


def decoding_share(choices: Open, seen: Trajectories, costs: Costs) -> float:
    """f, colocated on 16 GPUs."""
    sequences = choices.batch / MEASURED_WORKERS
    decode_s = seen.generated * (costs.fixed_s + sequences * costs.per_sequence_s)
    return decode_s / (decode_s + sequences * costs.prefill_s + choices.overhead_s + choices.env_s)


def iteration_times(seen: Trajectories, costs: Costs) -> IterationTimes:
    """A grid that is linear in both axes and does not know contexts; prefilling dL tokens alone takes dL t_prefill."""
    per_token_s = (costs.prefill_s - costs.fixed_s) / seen.new
    rows = tuple(
        tuple((costs.fixed_s + tokens * per_token_s + n * costs.per_sequence_s,) for n in (0, GRID_SEQUENCES))
        for tokens in (0, CONTEXT_TOKENS)
    )
    return IterationTimes(
        prefill_tokens=(0, CONTEXT_TOKENS),
        decoding=(0, GRID_SEQUENCES),
        context_tokens=(CONTEXT_TOKENS,),
        cells_s=rows,
    )


def profile(model: Model, choices: Open, seen: Trajectories, costs: Costs) -> Profile:
    """Workload and platform in pearl's records."""
    theta = choices.theta
    if theta is None:
        theta = bubble_ratio(decoding_share(choices, seen, costs))
    worker = PlatformProfile(
        model=model.name,
        model_hash="section3",
        device="H800-80GB",
        dtype="bfloat16",
        tp=TP,
        iterations=iteration_times(seen, costs),
        kv_capacity_tokens=math.floor((MEMORY_BYTES - 2 * model.parameters) / model.kv_bytes_per_token),
        kv_bytes_per_token=model.kv_bytes_per_token,
        hand_off=HandOff(fixed_s=0.0, s_per_byte=1 / choices.bytes_per_s),
        weight_load_s=0.0,
        sleep_s=0.0,
        wake_s=0.0,
        engine_start_s=None,
    )
    workload = WorkloadProfile(
        turns=seen.turns,
        prompt_tokens=constant(seen.new),
        new_tokens=constant(seen.new),
        generated_tokens=constant(seen.generated),
        env_s=constant(choices.env_s),
        turn_overhead_s=choices.overhead_s,
        theta=theta,
    )
    return Profile(workload=workload, platform=Platform(by_tp={TP: worker}))


def qwen3_8b(choices: Open | None = None) -> Profile:
    """As in Fig. 2a."""
    choices = choices or Open()
    seen = trajectories(choices)
    return profile(QWEN3_8B, choices, seen, costs_8b(choices, seen))


def qwen3_30b_a3b(choices: Open | None = None) -> Profile:
    """As in Fig. 2b."""
    choices = choices or Open()
    seen = trajectories(choices)
    return profile(QWEN3_30B_A3B, choices, seen, costs_30b(choices, seen))
