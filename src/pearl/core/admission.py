"""Group admission and batch closing under bounded staleness.

The laws, for batches of B groups and a bound of eta (`max_staleness`):

- *admission*: consumed + live groups <= (v + eta + 1) * B, v the oldest version that a serving worker may hold. So at most
  eta + 1 batches are in flight, the one being trained included. (The bound of AReaL, arXiv 2505.24298, section 5.)
- *slots*: a group is admitted only when the environment pool can hold all of its trajectories.
- *deadline*: a group admitted at version a must be consumed by the training step that begins at version a + eta.
- *close*: a batch closes on completed groups in completion order, but never so that the groups left behind cannot all
  meet their deadlines at B per step; it waits for the groups that it needs instead. Admission keeps this feasible: at
  most (d - v + 1) * B live groups ever have a deadline of d or earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pearl.records.ids import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What bounds the work in flight."""

    groups_per_batch: int
    group_size: int
    max_staleness: int
    slots: int
    """Of the environment pool, in trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A group that is admitted and not consumed."""

    index: int
    admitted_version: WeightVersion
    completed_rank: int | None
    """Place in the order of completion; None while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCloses:
    """The batch is complete."""

    indices: tuple[int, ...]
    """`groups_per_batch` group indices, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWaits:
    """The batch cannot close yet."""

    needed: tuple[int, ...]
    """Running groups, one or more of which must be in this batch; empty when merely too few groups have completed."""


def admissible_groups(
    limits: AdmissionLimits, *, served_version: int, consumed: int, live: int, active_trajectories: int
) -> int:
    """How many more groups may begin now, >= 0."""
    by_staleness = (served_version + limits.max_staleness + 1) * limits.groups_per_batch - consumed - live
    by_slots = (limits.slots - active_trajectories) // limits.group_size
    return max(0, min(by_staleness, by_slots))


def close_batch(limits: AdmissionLimits, version: int, live: Sequence[LiveGroup]) -> BatchCloses | BatchWaits:
    """Pick the groups of the training step that begins at `version`, or say what it waits for."""
    deadlines = {g.index: g.admitted_version + limits.max_staleness for g in live}
    ranks = {g.index: g.completed_rank for g in live if g.completed_rank is not None}
    done = sorted(ranks, key=lambda index: ranks[index])
    chosen: dict[int, None] = {}
    for deadline in sorted(set(deadlines.values())):
        urgent = {index for index, due in deadlines.items() if due <= deadline}
        later_steps = max(0, deadline - version)
        short = len(urgent) - later_steps * limits.groups_per_batch - len(urgent & chosen.keys())
        if short <= 0:
            continue
        ready = [index for index in done if index in urgent and index not in chosen]
        if len(ready) < short:
            return BatchWaits(needed=tuple(sorted(urgent - ranks.keys())))
        chosen |= dict.fromkeys(ready[:short])
    rest = [index for index in done if index not in chosen]
    chosen |= dict.fromkeys(rest[: max(0, limits.groups_per_batch - len(chosen))])
    if len(chosen) < limits.groups_per_batch:
        return BatchWaits(needed=())
    return BatchCloses(indices=tuple(sorted(chosen)))
