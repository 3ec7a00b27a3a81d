"""`[engine]` and `[sampling]`: rollout workers and how they draw tokens."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pearl.config.base import Section


class EngineConfig(Section):
    """`[engine]`."""

    kind: Literal["embedded"] = Field("embedded", description="`embedded`: pearl's own engine on torch.")
    shape: str = Field(
        "1C",
        description="Rollout workers, e.g. `2C`: two colocated workers; `1P2D`: one for prefill, two for decode.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="Where it computes; `auto`: a GPU where there is one."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What it computes in; on a CPU bfloat16 is the slower one."
    )
    max_sequences: int = Field(64, ge=1, description="Requests that run at once on a worker.")
    kv_budget_tokens: int = Field(
        0,
        ge=0,
        description="Tokens that a worker's KV cache holds, in slots of max_context_tokens (one shorter slot if less); "
        "slots beyond max_sequences keep prefixes. 0: max_sequences slots.",
    )
    append_prefill_tokens: int = Field(
        64,
        ge=0,
        description="A decode worker that holds a trajectory's prefix computes up to this many new context tokens itself; "
        "beyond it a prefill worker does. 0: always a prefill worker.",
    )
    readback: bool = Field(
        True,
        description="KV of what a decode worker generated goes back to the prefill worker, which then need not compute it.",
    )
    kv_ttl_s: float = Field(30, gt=0, description="KV that nobody fetched is given up after this long.")
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
    pacing: Path | None = Field(
        None,
        description="A file of `pearl profile`: iterations last as long as it says, to act as another device; "
        "relative to the current directory.",
    )
    time_scale: float = Field(
        1.0, gt=0, le=1e6, description="With pacing: times of the profile are multiplied by this."
    )


class SamplingConfig(Section):
    """`[sampling]`."""

    temperature: float = Field(1.0, ge=0, le=10, description="0 is greedy.")
    max_new_tokens: int = Field(64, ge=1, description="Per turn.")
