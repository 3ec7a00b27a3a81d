"""Policies: what a fleet may do, and by which prediction. All of them are decided by the same code (`decide`).

A policy is data, so that baselines differ from ours in nothing but what they are allowed:

- `pearl`: everything this package can; our predictor.
- `paper`: the paper's decision space (one tensor parallelism, colocated or xPyD, all training GPUs or none) and its predictor.
- `roll`: colocated workers on the reserved GPUs, whatever else is on offer. `roll_large`: the same on a given number.
- `rlboost_plus`: elastic external GPUs, colocated; `rlboost_plus_seeding`: training GPUs help too for a while after each update.
- `borrow_all`: like `pearl`, but all training GPUs whenever training does not use them.
- `static`: a given shape; when GPUs are missing for it, what is left in the same mode.
- `oracle`: true makespans instead of predictions. Cannot be had in life: an upper bound, never a baseline.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from pearl.core.fluid import APPEND_TOKENS, FluidPredictor
from pearl.core.gate import Z_95, Thresholds
from pearl.core.lines import Space
from pearl.core.makespan import (
    Candidates,
    Forecast,
    Infeasible,
    Predictions,
    Predictor,
    Profile,
    Target,
    candidates_of,
)
from pearl.core.paper_model import PaperPredictor
from pearl.core.progress import Progress
from pearl.core.shape import Shape
from pearl.core.state import Role
from pearl.errors import ConfigError


class Borrow(enum.Enum):
    """Which training GPUs may serve rollout between updates."""

    NEVER = "never"
    ANY = "any"
    """As many as the gate finds best."""
    ALL_OR_NONE = "all_or_none"
    """All or none, as the gate says."""
    SEEDING = "seeding"
    """All, for a while after each update."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be decided, and by what."""

    name: str
    predictor: Predictor
    space: Space
    borrow: Borrow
    external: bool = True
    """Whether it uses GPUs that come and go."""
    gpus: int | None = None
    """Dedicated GPUs that it uses at most; None: all."""
    shape: Shape | None = None
    """The one that it wants, always."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    lease_aware: bool = False
    """Whether workers start only on GPUs that are expected to stay long enough."""
    seeding_s: float = 0.0
    """For how long after an update training GPUs help, with `Borrow.SEEDING`."""
    return_z: float = Z_95
    """Standard deviations of the predicted close by which borrowed GPUs go back early."""
    realisable: bool = True
    """False: knows what nobody can know."""

    def __post_init__(self) -> None:
        if self.shape is not None:
            candidates_of([Target(shape=self.shape)])  # raises ShapeError where no predictor could be asked about it


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """What is configured about policies."""

    tps: tuple[int, ...] | None = None
    """Allowed tensor parallelisms; None: all of the platform's."""
    fixed_tp: int = 1
    """Of policies that know only one."""
    hybrid: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)
    return_z: float = Z_95
    gpus: int | None = None
    """Of `roll_large`."""
    shape: Shape | None = None
    """Of `static`."""
    seeding_s: float = 60.0
    truth: Mapping[str, float] = field(default_factory=dict)
    """Of `oracle`: target as text -> seconds until the batch closes; what is no finite number >= 0 counts as not told."""


@dataclass(frozen=True, slots=True)
class GivenTimes:
    """A predictor that was told: targets as text -> seconds; what it was not told cannot be chosen."""

    truth: Mapping[str, float]
    name: str = "oracle"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:  # noqa: ARG002 (the protocol's)
        """The same for all profiles."""

        def predict(candidates: Candidates) -> Predictions:
            targets = [str(candidates.target(index)) for index in range(len(candidates))]
            told = np.array([self.truth.get(target, np.inf) for target in targets])
            known = np.isfinite(told) & (told >= 0)
            return Predictions(
                close_s=np.where(known, told, np.inf),
                error_s=np.where(known, 0.0, np.inf),
                infeasible=np.where(known, int(Infeasible.NO), int(Infeasible.UNSUPPORTED)),
            )

        return predict


Value = TypeVar("Value")

POLICIES = (
    "pearl",
    "paper",
    "roll",
    "roll_large",
    "rlboost_plus",
    "rlboost_plus_seeding",
    "borrow_all",
    "static",
    "oracle",
)


def policy_named(name: str, options: PolicyOptions) -> Policy:
    """A policy by its name.

    Raises:
        ConfigError: no such policy, or what it needs is missing.
        ShapeError: `shape` has more tensor parallelisms in a role than a predictor can be asked about.
    """
    full = _pearl(options)
    colocated = Policy(
        name=name,
        predictor=full.predictor,
        space=Space(disaggregated=False, tps=(options.fixed_tp,)),
        borrow=Borrow.NEVER,
        thresholds=options.thresholds,
        return_z=options.return_z,
    )
    match name:
        case "pearl":
            return full
        case "paper":
            space = Space(tps=(options.fixed_tp,))
            borrow = Borrow.ALL_OR_NONE
            return replace(full, name=name, predictor=PaperPredictor(), space=space, borrow=borrow, lease_aware=False)
        case "roll":
            return replace(colocated, external=False)
        case "roll_large":
            return replace(colocated, gpus=_given(name, "gpus", options.gpus))
        case "rlboost_plus":
            return colocated
        case "rlboost_plus_seeding":
            return replace(colocated, borrow=Borrow.SEEDING, seeding_s=options.seeding_s)
        case "borrow_all":
            return replace(full, name=name, borrow=Borrow.ALWAYS)
        case "static":
            return _static(full, _given(name, "shape", options.shape))
        case "oracle":
            return replace(full, name=name, predictor=GivenTimes(options.truth), realisable=False)
    raise ConfigError(f"policy: got {name!r}, want one of {', '.join(POLICIES)}")


def _pearl(options: PolicyOptions) -> Policy:
    return Policy(
        name="pearl",
        predictor=FluidPredictor(),
        space=Space(hybrid=options.hybrid, tps=options.tps, append_tokens=APPEND_TOKENS),
        borrow=Borrow.ANY,
        thresholds=options.thresholds,
        lease_aware=True,
        return_z=options.return_z,
    )


def _static(full: Policy, shape: Shape) -> Policy:
    roles = {pool.role for pool in shape.pools}
    space = Space(
        colocated=Role.COLOCATED in roles,
        disaggregated=Role.PREFILL in roles,
        tps=tuple(sorted({pool.tp for pool in shape.pools})),
    )
    return replace(full, name="static", space=space, borrow=Borrow.NEVER, shape=shape, lease_aware=False)


def _given(name: str, what: str, value: Value | None) -> Value:
    if value is None:
        raise ConfigError(f"policy {name}: got no {what}, want one")
    return value
