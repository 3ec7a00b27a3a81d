"""What a simulated engine is like, and what of the world it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from pearl.core.profile import PlatformProfile
from pearl.errors import ProfileError
from pearl.records.ids import WorkerId
from pearl.records.training import Manifest
from pearl.sim.limits import Limits


class KvLinks(Protocol):
    """Moves bytes between workers, known by `end_name`; `pearl.sim.network.Network` is one."""

    async def transfer(self, source: str, target: str, size_bytes: float) -> None:
        """Return when they have arrived.

        Raises:
            WorkerLost: an end was lost on the way.
        """


class WeightSource(Protocol):
    """Brings published weights to workers, known by `end_name`; `pearl.sim.weights.SimWeightStore` is one."""

    async def pull(self, receiver: str, manifest: Manifest) -> None:
        """Return when all bytes of a version are there.

        Raises:
            WeightsError: the version is not kept any more.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorld:
    """Shared by the engines of a fleet."""

    links: KvLinks | None = None
    """None: KV takes what `hand_off` of the profile says, however much travels at once."""
    weights: WeightSource | None = None
    """None: weights are there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Of one simulated engine."""

    profile: PlatformProfile
    limits: Limits = field(default_factory=Limits)
    time_scale: float = 1.0
    """> 0; iterations take so many times what the profile says: a slow node."""
    max_context_tokens: int = 1 << 20
    """>= 2; a context that does not fit into the memory for KV is too long as well."""
    progress_interval_s: float = 0.5
    """> 0; what an unannounced death loses is younger."""
    report_interval_s: float = 60.0
    """> 0; how often progress is really told, for whoever takes silence for death."""
    kv_ttl_s: float = 60.0
    """> 0; how long a handle may be used."""

    def __post_init__(self) -> None:
        for name in ("time_scale", "progress_interval_s", "report_interval_s", "kv_ttl_s"):
            value = getattr(self, name)
            if not value > 0 or (name == "time_scale" and not math.isfinite(value)):
                raise ProfileError(f"engine: {name}: got {value}, want > 0")
        if self.max_context_tokens < 2:
            raise ProfileError(f"engine: max_context_tokens: got {self.max_context_tokens}, want >= 2")


def end_name(worker: WorkerId) -> str:
    """What a worker is called by the network and the weight store."""
    return f"worker {worker}"
