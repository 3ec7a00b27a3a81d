"""The platform: what the fleet's GPUs can do with the model, by tensor parallelism, and what changes of the fleet cost.

Measured by `pearl profile` where there is a machine to measure on, else priors, each with its source; then corrected online:
`refit_platform` follows what iterations and changes really took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from pearl.core.profile import PlatformProfile
from pearl.errors import ProfileError

LARGEST_SURPRISE = 4.0
"""One measurement counts as at most this many times what was expected, and at least as one part in it."""
LARGEST_SCALE = 1e3
"""A scale stays within this and one part in it: beyond, the profile is of another device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionCosts:
    """Seconds that changes of the fleet take."""

    start_s: float = 56.3
    """A new worker until it could be admitted, in the background. Source of the default: the paper, Table 3, Qwen3-8B."""
    finalise_s: float = 11.1
    """Admitting a group of new workers: new admissions pause. Source: the paper, Table 3."""
    activate_s: float = 6.3
    """Waking a borrowed worker and giving it weights. Source: the paper, Table 3."""
    return_s: float = 3.2
    """Giving a borrowed worker's GPUs back. Source: the paper, Table 3."""
    role_change_s: float = 20.0
    """Rebinding, routing, graph recapture; the worker does not serve. Source: the paper, §4.4: tens of seconds."""
    stop_s: float = 1.0
    """Interrupting a worker's requests and ending it."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"costs: {each.name}: got {value}, want a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The GPUs of a fleet under one model; they are alike."""

    by_tp: Mapping[int, PlatformProfile]
    """Tensor parallelism -> what a worker of so many GPUs does; the keys are what a worker may have."""
    costs: TransitionCosts = TransitionCosts()
    max_sequences: int = 256
    """Requests that a worker runs at once, >= 1."""
    prefill_chunk_tokens: int = 2048
    """Prompt tokens that a colocated worker computes beside one decode iteration, >= 1."""
    readback: bool = True
    """Whether KV of what a decode worker generated goes back to the prefill worker, which else computes it again."""
    tp_pairs: frozenset[tuple[int, int]] | None = None
    """Allowed (tp of prefill, tp of decode); None: all."""
    time_scale: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Tensor parallelism -> measured over tabulated iteration time; 1 where there is none."""

    def __post_init__(self) -> None:
        if not self.by_tp:
            raise ProfileError("platform: by_tp: got no profile, want one for each tensor parallelism that may be used")
        for tp, profile in self.by_tp.items():
            if profile.tp != tp:
                raise ProfileError(f"platform: by_tp: got a profile of tp {profile.tp} under {tp}, want its own")
        for name in ("max_sequences", "prefill_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ProfileError(f"platform: {name}: got {getattr(self, name)}, want >= 1")
        for tp, scale in self.time_scale.items():
            if tp not in self.by_tp or not (math.isfinite(scale) and scale > 0):
                raise ProfileError(f"platform: time_scale: got {scale} for tp {tp}, want > 0 for one of {self.tps}")

    @property
    def tps(self) -> tuple[int, ...]:
        """Allowed tensor parallelisms, ascending."""
        return tuple(sorted(self.by_tp))

    def scale(self, tp: int) -> float:
        """Measured over tabulated iteration time."""
        return self.time_scale.get(tp, 1.0)

    def allows(self, prefill_tp: int, decode_tp: int) -> bool:
        """Whether workers of these two may hand KV to each other."""
        return self.tp_pairs is None or (prefill_tp, decode_tp) in self.tp_pairs


def refit_scale(platform: Platform, tp: int, measured_over_expected: float, share: float) -> Platform:
    """Follow what iterations took against what this platform (its scale included) expected, as a moving average of the logarithm.

    A ratio that is no finite number > 0 teaches nothing, nor does a tensor parallelism that the platform does not have.
    """
    if tp not in platform.by_tp or not (math.isfinite(measured_over_expected) and measured_over_expected > 0):
        return platform
    step = min(math.log(LARGEST_SURPRISE), max(-math.log(LARGEST_SURPRISE), math.log(measured_over_expected)))
    scale = min(LARGEST_SCALE, max(1 / LARGEST_SCALE, platform.scale(tp) * math.exp(share * step)))
    return replace(platform, time_scale=MappingProxyType({**platform.time_scale, tp: scale}))


def refit_costs(costs: TransitionCosts, measured_s: Mapping[str, float], share: float) -> TransitionCosts:
    """Follow what changes took: name of the cost -> seconds; unknown names and nonsense teach nothing.

    A cost that is taken to be 0 has no surprise: it follows whatever was measured.
    """
    changes: dict[str, float] = {}
    for each in fields(costs):
        seconds, had = measured_s.get(each.name, math.nan), getattr(costs, each.name)
        if math.isfinite(seconds) and seconds >= 0:
            counted = min(had * LARGEST_SURPRISE, max(had / LARGEST_SURPRISE, seconds)) if had > 0 else seconds
            changes[each.name] = had + share * (counted - had)
    return replace(costs, **changes)
