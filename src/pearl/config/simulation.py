"""`[simulation]`: the world of `pearl simulate`, beside fleet, workload and platform."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pearl.config.base import Section


class SimulationConfig(Section):
    """`[simulation]`."""

    duration_s: float | None = Field(
        None, gt=0, le=30 * 86_400, description="Virtual seconds after which the run ends; not set: after `run.steps`."
    )
    availability: Path | None = Field(
        None,
        description="CSV `time_s,gpus` of GPUs from outside, at most `fleet.external_gpus` of them at once; not set: all of "
        "them, all the time. Relative to the current directory.",
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
