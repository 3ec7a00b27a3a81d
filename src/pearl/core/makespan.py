"""What a predictor is: from shapes, profile and progress to when the batch closes.

Shapes go in as arrays, all candidates of a decision at once: a thousand of them must be predicted within a tick.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pearl.core.distribution import Floats
from pearl.core.platform import Platform
from pearl.core.progress import Progress
from pearl.core.shape import Pool, Shape
from pearl.core.state import Role
from pearl.core.workload import WorkloadProfile
from pearl.errors import ShapeError

Ints = npt.NDArray[np.int64]
SERVING_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that a predictor knows of the world."""

    workload: WorkloadProfile
    platform: Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A shape and how it is used."""

    shape: Shape
    append_tokens: int = 0
    """Decode workers compute up to so many new tokens of a turn themselves (append-prefill); 0: none."""

    def __str__(self) -> str:
        return str(self.shape) + (f" append<={self.append_tokens}" if self.append_tokens else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Targets side by side: one tensor parallelism per role, but for a second one of colocated workers."""

    workers: dict[Role, Ints]
    """Prefill, decode, colocated -> shape `[N]`."""
    tp: dict[Role, Ints]
    """Shape `[N]`; 1 where there is no worker."""
    append_tokens: Ints
    """Shape `[N]`."""
    second: Ints
    """Colocated workers of another tensor parallelism: borrowed ones, which keep theirs. Shape `[N]`."""
    second_tp: Ints
    """Shape `[N]`; 1 where there is none."""

    def __len__(self) -> int:
        return len(self.append_tokens)

    def target(self, index: int) -> Target:
        """One of them as a target."""
        pools = [
            Pool(role=role, workers=int(self.workers[role][index]), tp=int(self.tp[role][index]))
            for role in SERVING_ROLES
            if self.workers[role][index] > 0
        ]
        if self.second[index] > 0:
            second = int(self.second[index])
            pools.append(Pool(role=Role.COLOCATED, workers=second, tp=int(self.second_tp[index])))
            pools.sort(key=lambda pool: (SERVING_ROLES.index(pool.role), pool.tp))
        return Target(shape=Shape(tuple(pools)), append_tokens=int(self.append_tokens[index]))


class Infeasible(enum.IntEnum):
    """Why a target cannot serve the batch."""

    NO = 0
    """It can."""
    NO_WORKERS = 1
    """It has none, or prefill without decode, or decode without prefill."""
    UNKNOWN_TP = 2
    """The platform has no profile of a tensor parallelism, or does not allow the pair."""
    KV_CAPACITY = 3
    """The KV of what must be held at once does not fit."""
    UNSUPPORTED = 4
    """The predictor has no model of such a shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """When the batch closes under each candidate."""

    close_s: Floats
    """Seconds from now, shape `[N]`; inf where infeasible."""
    error_s: Floats
    """One standard deviation of what the prediction may be off by, shape `[N]`; inf where infeasible."""
    infeasible: Ints
    """`Infeasible`, shape `[N]`."""


class Forecast(Protocol):
    """Predicts candidates under one profile and progress."""

    def __call__(self, candidates: Candidates) -> Predictions:
        """Of all candidates at once."""
        ...


class Predictor(Protocol):
    """Predicts makespans."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def appends(self) -> bool:
        """Whether it can tell targets with append-prefill from those without."""
        ...

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        """What depends on no candidate, worked out once for all that a decision looks at."""
        ...


def candidates_of(targets: Sequence[Target]) -> Candidates:
    """Targets as arrays.

    Raises:
        ShapeError: a role has workers of more tensor parallelisms than arrays can hold: two of colocated, else one.
    """
    count = len(targets)
    workers = {role: np.zeros(count, dtype=np.int64) for role in SERVING_ROLES}
    tp = {role: np.ones(count, dtype=np.int64) for role in SERVING_ROLES}
    second, second_tp = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    for index, target in enumerate(targets):
        for pool in target.shape.pools:
            if not workers[pool.role][index]:
                workers[pool.role][index], tp[pool.role][index] = pool.workers, pool.tp
            elif pool.role is Role.COLOCATED and not second[index]:
                second[index], second_tp[index] = pool.workers, pool.tp
            else:
                most = "two" if pool.role is Role.COLOCATED else "one"
                raise ShapeError(
                    f"shape {target.shape}: got another tensor parallelism for {pool.role.value}, want at most {most}"
                )
    append_tokens = np.array([target.append_tokens for target in targets], dtype=np.int64)
    return Candidates(workers=workers, tp=tp, append_tokens=append_tokens, second=second, second_tp=second_tp)
