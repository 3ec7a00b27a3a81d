"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], offset: float
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the advantage of each sample, `(r - mean) / (std + offset)` within its group, and the fraction of groups at zero.

    `std` is the population's. A group whose rewards are all equal gives exact zeros: nothing to learn from, and no
    rounding error blown up by a small offset.
    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    values = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(values)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    constant = 0
    for indices in members.values():
        own = values[indices]
        if own.min() == own.max():
            constant += 1
            continue
        advantages[indices] = (own - own.mean()) / (own.std() + offset)
    return advantages, constant / len(members) if members else 0.0
