"""What a simulated engine puts into an iteration."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from pearl.errors import ProfileError


class Mixing(enum.Enum):
    """Where prompts are computed."""

    CHUNKED = "chunked"
    """In iterations that decode too, as vLLM does."""
    ALONE = "alone"
    """In iterations of their own, as SGLang does by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine puts into an iteration."""

    max_sequences: int = 256
    """Requests under way at once."""
    chunk_tokens: int = 2048
    """Prompt tokens per iteration."""
    iteration_tokens: int | None = None
    """Prompt tokens and decoding requests together, the latter first, as vLLM's `max_num_batched_tokens`; None: no such limit."""
    mixing: Mixing = Mixing.CHUNKED
    longest_run: int = 1 << 40
    """Iterations that are simulated at once, at most."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 1:
                raise ProfileError(f"engine: {each.name}: got {value}, want >= 1")
