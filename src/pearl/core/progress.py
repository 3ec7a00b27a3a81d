"""How far the batch is: what is still to be done before the next training step can begin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pearl.errors import ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of the batch that closes next, and of all admitted work that shares the fleet with it."""

    batch_trajectories: int
    """B: trajectories that one training step consumes."""
    unfinished: int
    """R: how many of them still have to finish, 0 .. B."""
    live_groups: int
    """Admitted groups that are not complete: those of this batch and, where staleness allows it, of later ones."""
    needed_groups: int
    """How many of the live groups must complete for the batch to close, 0 .. live_groups."""
    running: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Turns done -> unfinished trajectories of the live groups; those not begun yet have done 0."""
    due_groups: int = 0
    """How many of the needed groups must be in this batch, whichever complete first: staleness lets them wait no longer."""
    due: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Of `running` those of due groups."""
    coming: int = 0
    """Trajectories that begin beside them in `coming_s`, when the update under way has ended: for later batches."""
    coming_s: float = 0.0
    """Finite and >= 0. When they come, what is in flight then computes its contexts again under the new weights."""
    pause_s: float = 0.0
    """Of `coming_s` the end, in which engines load those weights and generate nothing; finite and >= 0."""

    def __post_init__(self) -> None:
        for name in ("coming_s", "pause_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ProfileError(f"progress: {name}: got {seconds}, want a finite number >= 0")
        wants = (
            ("batch_trajectories", self.batch_trajectories, 1, None),
            ("unfinished", self.unfinished, 0, self.batch_trajectories),
            ("live_groups", self.live_groups, 0, None),
            ("needed_groups", self.needed_groups, 0, self.live_groups),
            ("coming", self.coming, 0, None),
            ("due_groups", self.due_groups, 0, self.needed_groups),
        )
        for name, got, low, high in wants:
            if isinstance(got, bool) or not isinstance(got, int) or got < low or (high is not None and got > high):
                allowed = f">= {low}" if high is None else f"{low}..{high}"
                raise ProfileError(f"progress: {name}: got {got}, want {allowed}")
        for turns, count in self.running.items():
            if not (isinstance(turns, int) and isinstance(count, int) and turns >= 0 and count >= 0):
                raise ProfileError(f"progress: running: got {count} trajectories at turn {turns}, want numbers >= 0")
        for turns, count in self.due.items():
            most = self.running.get(turns, 0)
            if not (isinstance(count, int) and 0 <= count <= most):
                raise ProfileError(f"progress: due: got {count} trajectories at turn {turns}, want 0..{most}")

    @property
    def in_flight(self) -> int:
        """Unfinished trajectories of all live groups."""
        return sum(self.running.values())

    @property
    def fraction(self) -> float:
        """R / B, of the paper's gate."""
        return self.unfinished / self.batch_trajectories


def fresh_batch(groups: int, group_size: int, *, batches: int = 1) -> Progress:
    """A batch that begins now: `batches` of it admitted at once, as staleness allows."""
    trajectories = groups * group_size
    return Progress(
        batch_trajectories=trajectories,
        unfinished=trajectories,
        live_groups=groups * batches,
        needed_groups=groups,
        running=MappingProxyType({0: trajectories * batches}),
        due_groups=groups if batches == 1 else 0,
        due=MappingProxyType({0: trajectories} if batches == 1 else {}),
    )
