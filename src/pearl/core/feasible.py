"""Which fleets can serve a workload at all, whatever time they take: our predictor's limits.

Law: a fleet is taken to be able unless something that is known says otherwise: no worker for a phase, a tensor parallelism (or
a pair of them) without a profile, a worker on which the longest contexts do not fit.
"""

from __future__ import annotations

import numpy as np

from pearl.core.makespan import SERVING_ROLES, Candidates, Infeasible, Ints, Profile
from pearl.core.state import Role

LONGEST = 0.99
"""Quantile of turns whose context must fit on a worker alone."""


class Limits:
    """What candidates of a profile must keep."""

    def __init__(self, profile: Profile) -> None:
        work, platform = profile.workload, profile.platform
        longest = work.context_tokens(work.turns.quantile(LONGEST) - 1) + work.generated_tokens.mean
        tps = platform.tps
        # Looked up by tensor parallelism; beyond the largest one nothing is known.
        self._unknown = np.array([tp not in tps for tp in range(tps[-1] + 2)])
        self._small = np.array(
            [tp in tps and platform.by_tp[tp].kv_capacity_tokens < longest for tp in range(tps[-1] + 2)]
        )
        self._pairs = platform.tp_pairs

    def broken(self, candidates: Candidates) -> Ints:
        """Why candidates cannot serve, `Infeasible.NO` where they can."""
        prefill, decode, colocated = (candidates.workers[role] > 0 for role in SERVING_ROLES)
        second = candidates.second > 0
        pools = [(candidates.workers[role] > 0, candidates.tp[role]) for role in SERVING_ROLES]
        unknown = np.zeros(len(candidates), dtype=bool)
        small = np.zeros(len(candidates), dtype=bool)
        for some, tp in (*pools, (second, candidates.second_tp)):
            place = np.minimum(tp, len(self._unknown) - 1)
            unknown |= some & self._unknown[place]
            small |= some & self._small[place]
        if self._pairs is not None:
            pairs = zip(candidates.tp[Role.PREFILL].tolist(), candidates.tp[Role.DECODE].tolist(), strict=True)
            unknown |= prefill & np.array([pair not in self._pairs for pair in pairs], dtype=bool)
        found = {
            Infeasible.KV_CAPACITY: small,
            Infeasible.UNKNOWN_TP: unknown,
            Infeasible.NO_WORKERS: ~(colocated | decode) | (prefill != decode),
            Infeasible.UNSUPPORTED: second & (~colocated | decode),
        }
        why = np.full(len(candidates), int(Infeasible.NO))
        for reason, where in found.items():  # the last one that holds is what is said
            why[where] = reason
        return why
