"""`[train]`, `[warmup]`, `[evaluation]`, `[checkpoint]`, `[weights]`."""

from typing import Literal

from pydantic import Field

from pearl.config.base import Section


class TrainConfig(Section):
    """`[train]`: GRPO with the decoupled loss."""

    learning_rate: float = Field(1e-6, ge=0, description="Peak, Adam.")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="By step, to `final_fraction` of the peak at `run.steps`."
    )
    ramp_steps: int = Field(
        0,
        ge=0,
        description="Training steps over which the learning rate rises to its peak: Adam's first updates are large.",
    )
    final_fraction: float = Field(0.1, ge=0, le=1, description="Of the peak learning rate, at the last step.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW.")
    gradient_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    minibatches: int = Field(1, ge=1, description="Optimizer updates per training step.")
    clip_low: float = Field(0.2, gt=0, lt=1, description="pi / pi_prox is clipped at 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="pi / pi_prox is clipped at 1 + clip_high.")
    importance_cap: float = Field(2.0, gt=0, description="C in min(pi_prox / mu, C).")
    entropy: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    kl: float = Field(0.0, ge=0, description="Weight of the KL to the reference (the weights of version 0).")
    advantage_offset: float = Field(1e-6, gt=0, description="Added to the standard deviation of a group's rewards.")
    micro_batch_tokens: int = Field(16384, ge=1, description="Padded tokens per forward pass of the trainer.")
    threads: int = Field(1, ge=1, description="CPU threads of the trainer.")
    step_timeout_s: float = Field(
        3600, gt=0, description="Longest training step; beyond it the run stops with an error."
    )


class WarmupConfig(Section):
    """`[warmup]`: supervised steps on scripted play before version 0, so that the format is valid."""

    steps: int = Field(0, ge=0, description="0: no warm-up.")
    batch_size: int = Field(64, ge=1, description="Scripted trajectories per step.")
    learning_rate: float = Field(1e-3, gt=0, description="Adam, cosine to zero.")
    timeout_s: float = Field(3600, gt=0, description="Longest warm-up; beyond it the run stops with an error.")
    player: str = Field("", description="`package.module:Name` of the scripted player; empty: the environment's own.")


class EvaluationConfig(Section):
    """`[evaluation]`: success of the sampled model over the environment's evaluation tasks."""

    rollouts_per_task: int = Field(0, ge=0, description="Fresh rollouts per task; 0: no evaluation.")
    seed: int = Field(1_000_003, ge=0, description="Sampling seed, apart from training's.")


class CheckpointConfig(Section):
    """`[checkpoint]`."""

    every_steps: int = Field(0, ge=0, description="0: at the end only.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept.")


class WeightsConfig(Section):
    """`[weights]`: publication of weight versions."""

    host_budget_gib: float = Field(2.0, gt=0, description="Shared memory for the two versions that are kept.")
    timeout_s: float = Field(600, gt=0, description="Longest publication of a version, and longest load by a worker.")
