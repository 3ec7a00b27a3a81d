"""`[simulation]`, `[faults]`, `[prices]`: the world of `pearl simulate`, beside fleet, workload and platform."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pearl.config.base import Section
from pearl.config.elastic import MOST_GPUS

_PER_H = 1_000.0
"""Most faults of a kind per hour: one every few seconds."""


class SimulationConfig(Section):
    """`[simulation]`."""

    duration_s: float | None = Field(
        None, gt=0, le=30 * 86_400, description="Virtual seconds after which the run ends; not set: after `run.steps`."
    )
    availability: Path | None = Field(
        None,
        description="CSV `time_s,gpus` of GPUs from outside, at most `fleet.external_gpus` of them at once; not set: all of "
        "them, all the time, or as the next keys say. Relative to the current directory.",
    )
    mean_external_gpus: float | None = Field(
        None,
        ge=0,
        le=MOST_GPUS,
        description="Without a trace: GPUs from outside come and go at random, so many of `fleet.external_gpus` on average; "
        "drawn from `run.seed`.",
    )
    changes_per_h: float = Field(
        10, gt=0, le=10_000, description="With `mean_external_gpus`: how often GPUs come or go, in the long run."
    )
    change_gpus: int = Field(
        1,
        ge=1,
        le=MOST_GPUS,
        description="With `mean_external_gpus`: how many come or go at once; a divisor of `fleet.external_gpus`.",
    )
    notice_s: float = Field(
        30, ge=0, le=86_400, description="Between the notice for a GPU and its loss; 0: none is given."
    )
    mixing: Literal["chunked", "alone"] = Field(
        "chunked",
        description="Whether prompts ride in the iterations of decoding (vLLM), or have iterations of their own (SGLang).",
    )
    network_bytes_per_s: float = Field(
        50e9,
        gt=0,
        description="Of each worker, in each direction; half of 800 Gb/s, which the workers of a node share.",
    )
    weight_bytes: float = Field(16.4e9, gt=0, description="Of one version of the weights: those of Qwen3-8B in bf16.")
    train_tokens_per_gpu_s: float = Field(
        1000,
        gt=0,
        description="Of training: 163.8 s for a batch of 64 trajectories of some 20,000 tokens on 8 GPUs (PEARL, Fig. 2a).",
    )


class FaultsConfig(Section):
    """`[faults]`: what goes wrong in simulation, at random times drawn from `run.seed`; nothing by default."""

    schedule: Path | None = Field(
        None,
        description="JSON list of faults (`at_s`, `kind`, ...), which happen besides those that are drawn; relative to the "
        "current directory.",
    )
    kills_per_h: float = Field(
        0, ge=0, le=_PER_H, description="Rollout workers that die without notice, over the fleet."
    )
    hangs_per_h: float = Field(0, ge=0, le=_PER_H, description="Rollout workers that answer nobody for a while.")
    slow_per_h: float = Field(0, ge=0, le=_PER_H, description="Rollout workers that are slow for a while: slow nodes.")
    failed_starts_per_h: float = Field(0, ge=0, le=_PER_H, description="Starts of workers that fail.")
    environment_faults_per_h: float = Field(
        0, ge=0, le=_PER_H, description="Environments that raise, hang, die or answer nonsense: so many of each."
    )
    mean_s: float = Field(60, gt=0, le=86_400, description="How long something hangs or is slow; exponential.")
    slowest: float = Field(4, ge=1, le=1000, description="Times as long as usual, at most; uniform from 1.")


class PricesConfig(Section):
    """`[prices]`: of a GPU for an hour, in any currency; `pearl compare` tells what a policy costs once one is set."""

    reserved: float | None = Field(None, ge=0, le=1e6, description="Of `fleet.reserved_gpus`.")
    external: float | None = Field(None, ge=0, le=1e6, description="Of `fleet.external_gpus`, while the run has them.")
    training: float | None = Field(None, ge=0, le=1e6, description="Of `fleet.training_gpus`.")
