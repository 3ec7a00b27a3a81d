"""`[fleet]`, `[elastic]`, `[workload]`, `[platform]`: the GPUs, who shapes them, what is assumed of work and engines."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pearl.config.base import Section

MOST_GPUS = 100_000
"""Of an owner: beyond, a fleet is a slip of the keyboard, and planning it would take very long."""
LONGEST_S = 86_400
"""Of any one change of the fleet: a day."""


class FleetConfig(Section):
    """`[fleet]`: the GPUs of a run, by owner, and the workers that may stand on them."""

    gpus_per_node: int = Field(8, ge=1, le=1024, description="A worker never spans nodes.")
    reserved_gpus: int = Field(0, ge=0, le=MOST_GPUS, description="Dedicated to rollout for the whole run.")
    external_gpus: int = Field(
        0, ge=0, le=MOST_GPUS, description="Most GPUs from outside at once: spot instances, spare capacity."
    )
    training_gpus: int = Field(
        0, ge=0, le=MOST_GPUS, description="Of the trainer; rollout can borrow them between updates."
    )
    tp: tuple[int, ...] = Field(
        (1,),
        min_length=1,
        description="Allowed tensor parallelisms of rollout workers, each >= 1. Policies that know only one take `overlap_tp` "
        "where there are training GPUs, else the first.",
    )
    overlap_tp: int = Field(1, ge=1, description="Tensor parallelism of workers on training GPUs, fixed for the run.")
    hybrid: bool = Field(False, description="Colocated workers may stand beside prefill and decode workers.")
    tp_pairs: tuple[tuple[int, int], ...] | None = Field(
        None, description="Allowed pairs [prefill, decode] of tensor parallelisms that hand KV over; not set: all."
    )


class ElasticConfig(Section):
    """`[elastic]`: the policy that shapes the rollout fleet."""

    policy: Literal[
        "pearl", "paper", "roll", "roll_large", "rlboost_plus", "rlboost_plus_seeding", "borrow_all", "static"
    ] = Field(
        "pearl",
        description="`pearl`: ours; `paper`: its equations as published; `static`: `elastic.shape`, always; the others are "
        "those that the paper compares with.",
    )
    shape: str = Field("", description="With policy `static`: the shape, e.g. `1P3D@tp2`.")
    switch_gain_ratio: float = Field(
        0.05, ge=0, lt=1, description="The fraction of the remaining time that another ratio must win before GPUs move."
    )
    switch_gain_mode: float = Field(
        0.10, ge=0, lt=1, description="The fraction that another mode must win before GPUs move."
    )
    switch_gain_tp: float = Field(
        0.10, ge=0, lt=1, description="The fraction that another tensor parallelism must win before GPUs move."
    )
    return_z: float = Field(
        1.645,
        ge=0,
        le=5,
        description="Standard deviations of the predicted end of a batch by which borrowed GPUs go back before it; 1.645: the "
        "trainer waits for them in one step of twenty.",
    )
    refit_share: float = Field(
        0.3, gt=0, le=1, description="Weight of the newest training step in the moving averages of the profiles."
    )
    seeding_s: float = Field(
        60,
        ge=0,
        le=LONGEST_S,
        description="With policy `rlboost_plus_seeding`: rollout has all training GPUs for so long in each step.",
    )
    fixed_gpus: int | None = Field(
        None, ge=1, le=MOST_GPUS, description="With policy `roll_large`: dedicated GPUs, held all the time."
    )


class WorkloadConfig(Section):
    """`[workload]`: what is assumed of trajectories until the run has shown its own."""

    prior: Literal["swe", "terminal", "tau", "webshop", "game"] = Field(
        "swe",
        description="Coding agent, agent in a terminal, airline agent with a simulated user, web shop, or puzzle on a board; "
        "from published figures as far as there are any.",
    )
    trajectories: Path | None = Field(
        None,
        description="A file of trajectories (JSONL) or a run folder, to measure instead of the prior; relative to the current "
        "directory.",
    )


class PlatformConfig(Section):
    """`[platform]`: what is assumed of engines and of changes until the run has measured them."""

    prior: Literal["qwen3-8b-h100", "qwen3-8b-h200", "qwen3-30b-a3b-h100", "qwen3-30b-a3b-h200"] = Field(
        "qwen3-8b-h100", description="Model and GPU: shipped tables of iteration times, published costs of changes."
    )
    profiles: tuple[Path, ...] = Field(
        (),
        description="Files of `pearl profile`, one per tensor parallelism, instead of the prior; relative to the current "
        "directory.",
    )
    max_sequences: int = Field(256, ge=1, le=1_000_000, description="Requests that run at once on a worker.")
    prefill_chunk_tokens: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="Prompt tokens that a colocated worker computes beside one decode iteration.",
    )
    readback: bool = Field(True, description="KV of what a decode worker generated goes back to the prefill worker.")
    time_scale: float = Field(
        1,
        gt=0,
        le=100,
        description="What iterations take over what prior or profiles say, until the run has measured it; in simulation, what "
        "they do take.",
    )
    start_s: float | None = Field(
        None,
        ge=0,
        le=LONGEST_S,
        description="A new worker until it could be admitted; not set, as below: that of the prior.",
    )
    finalise_s: float | None = Field(None, ge=0, le=LONGEST_S, description="Admitting a group of new workers.")
    activate_s: float | None = Field(
        None, ge=0, le=LONGEST_S, description="Waking a borrowed worker and giving it weights."
    )
    return_s: float | None = Field(None, ge=0, le=LONGEST_S, description="Giving a borrowed worker's GPUs back.")
    role_change_s: float | None = Field(
        None, ge=0, le=LONGEST_S, description="A worker's change of role; it does not serve meanwhile."
    )
    stop_s: float | None = Field(
        None, ge=0, le=LONGEST_S, description="Interrupting a worker's requests and ending it."
    )
