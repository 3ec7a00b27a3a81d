"""Rotary position embedding: frequencies of the scaling methods that checkpoints name, and the rotations by position.

Sources: Su et al., arXiv:2104.09864 (default); Chen et al., arXiv:2306.15595 (linear); Peng et al., arXiv:2309.00071 (YaRN);
the Llama 3.1 release (llama3). Equal to transformers to float32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROTARY_BASE = 10_000.0
"""Where a configuration names none."""

_KINDS = ("default", "linear", "llama3", "yarn")
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How positions turn queries and keys."""

    base: float = ROTARY_BASE
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    """By which contexts are stretched."""
    original_positions: float = 0.0
    """Positions of pretraining; `llama3` and `yarn`."""
    low_frequency: float = 1.0
    high_frequency: float = 1.0
    """`llama3`: turns over the original positions below which a frequency is stretched, above which it is kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """`yarn`: the same, the other way round."""
    truncate: bool = True
    """`yarn`: whether the ends of the ramp are whole dimensions."""
    attention_factor: float | None = None
    """`yarn`: by which queries and keys grow; None: 0.1 ln(factor) + 1."""

    def rotation(self, head_dim: int, positions: int) -> Tensor:
        """Complex numbers `[positions, head_dim / 2]` by which interleaved pairs are multiplied."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.frequencies(head_dim))
        return torch.polar(torch.full_like(angles, self._growth()), angles)

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position, shape `[head_dim / 2]`."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        plain = 1.0 / self.base**exponents
        match self.kind:
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain, head_dim)
            case _:
                return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        turns = self.original_positions * plain / (2 * math.pi)
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain

    def _yarn(self, plain: Tensor, head_dim: int) -> Tensor:
        def dimension(turns: float) -> float:
            return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return stretched * plain / self.factor + (1 - stretched) * plain

    def _growth(self) -> float:
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


def read_rotary(config: Mapping[str, Any]) -> Rotary:
    """Read both layouts of transformers: `rope_parameters` (5), or `rope_theta` with `rope_scaling` (4).

    Raises:
        ValueError: `key: got ..., want ...`.
    """
    key = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{key}: got {given!r}, want an object")
    values: dict[str, Any] = {"rope_theta": config.get("rope_theta", ROTARY_BASE), **given}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"{key}: got rope_type {kind!r}, want one of {', '.join(_KINDS)}")
    unknown = sorted(set(values) - _KNOWN)
    if unknown:
        raise ValueError(f"{key}: got {', '.join(unknown)}, want none of them (not implemented)")
    return Rotary(
        base=_positive(key, values, "rope_theta"),
        kind=kind,
        **{
            ours: _positive(key, values, theirs)
            for theirs, ours in _FIELDS.items()
            if theirs in _NEEDS[kind] or (kind == "yarn" and values.get(theirs) is not None)
        },
        truncate=bool(values.get("truncate", True)),
    )


_FIELDS: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}


def _positive(where: str, values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{where}.{key}: got {value!r}, want a number > 0")
    return float(value)
