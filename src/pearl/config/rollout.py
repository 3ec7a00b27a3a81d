"""`[rollout]`: batches, staleness, limits and time-outs of the hot path."""

from pydantic import Field

from pearl.config.base import Section


class RolloutConfig(Section):
    """`[rollout]`."""

    groups_per_batch: int = Field(16, ge=1, le=1_000_000, description="Groups consumed by one training step.")
    group_size: int = Field(8, ge=1, le=1_000_000, description="Trajectories per group (attempts at one task).")
    max_staleness: int = Field(
        1, ge=0, le=16, description="Versions between the oldest token of a sample and the weights that it trains."
    )
    max_turns: int = Field(8, ge=1, description="A trajectory is truncated after this many turns.")
    max_context_tokens: int = Field(
        256, ge=2, le=1_000_000_000, description="A trajectory is truncated at this length."
    )
    env_reset_timeout_s: float = Field(60, gt=0, description="An environment that takes longer is hung.")
    env_step_timeout_s: float = Field(60, gt=0, description="An environment that takes longer is hung.")
    turn_timeout_s: float = Field(600, gt=0, description="Longest wait for one turn of the model.")
    trajectory_timeout_s: float = Field(3600, gt=0, description="A trajectory that takes longer ends as timed_out.")
    straggler_timeout_s: float = Field(
        3600, gt=0, description="A group that is older, counted from its dispatch, ends as expired and is replaced."
    )
    max_replacements: int = Field(
        4, ge=0, description="Trajectories replaced per group after faults; beyond it the group ends as failed."
    )
    max_failed_groups: int = Field(
        8, ge=0, description="Groups in a row that may fail or expire; beyond it the run stops with an error."
    )
    max_turn_attempts: int = Field(
        8, ge=1, description="Workers a turn may be continued on before its trajectory ends as engine_failed."
    )
