"""`[engine]` and `[sampling]`: rollout workers and how they draw tokens."""

from typing import Literal

from pydantic import Field

from pearl.config.base import Section


class EngineConfig(Section):
    """`[engine]`."""

    kind: Literal["embedded"] = Field("embedded", description="`embedded`: pearl's own engine on torch.")
    shape: str = Field("1C", description="Rollout workers, e.g. `2C`: two colocated workers.")
    max_sequences: int = Field(64, ge=1, description="Trajectories whose KV a worker holds at once.")
    max_context_tokens: int = Field(256, ge=2, description="Longest context of one trajectory, in tokens.")
    prefill_chunk_tokens: int = Field(
        512, ge=1, description="Context tokens computed per iteration, over all sequences."
    )
    progress_interval_s: float = Field(
        0.1, ge=0, description="Progress of running requests is reported at most this often."
    )
    on_load: Literal["keep_kv", "recompute"] = Field(
        "recompute", description="What running requests do when new weights arrive."
    )
    threads: int = Field(1, ge=1, description="CPU threads per worker; more than one collapses on busy machines.")


class SamplingConfig(Section):
    """`[sampling]`."""

    temperature: float = Field(1.0, ge=0, le=10, description="0 is greedy.")
    max_new_tokens: int = Field(64, ge=1, description="Per turn.")
