"""What goes into a decision beside the fleet's state, and what comes out of it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from pearl.core.choose import Option
from pearl.core.gate import Verdict
from pearl.core.makespan import Profile
from pearl.core.plan import Plan, PlanRefusal
from pearl.core.priors import LEASE_MEAN_S
from pearl.core.progress import Progress
from pearl.core.survival import LeaseHistory
from pearl.core.toggle import ToggleEstimate
from pearl.errors import ProfileError
from pearl.records.ids import WorkerId


class Moment(enum.Enum):
    """What there is to decide about."""

    STARTED = "started"
    TRAINING_BEGAN = "training_began"
    """A batch is complete, and training needs its GPUs."""
    TRAINING_FINISHED = "training_finished"
    GPUS_CHANGED = "gpus_changed"
    """GPUs came, left, or are under notice."""
    WORKERS_CHANGED = "workers_changed"
    """A plan is done or given up, or a worker is lost."""
    REFITTED = "refitted"
    TICK = "tick"
    """Time has come to look again: `Decision.look_again_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known beside the fleet's state."""

    profile: Profile
    progress: Progress
    toggle: ToggleEstimate
    append_tokens: int = 0
    """Bound of append-prefill in force."""
    leases: LeaseHistory = field(default_factory=LeaseHistory)
    lease_prior_s: float = LEASE_MEAN_S
    training: bool = False
    """Whether an update runs or is about to, from `TRAINING_BEGAN` until `TRAINING_FINISHED`: training needs its GPUs."""
    since_training_s: float | None = None
    """Seconds since the last update finished; None: training, or never."""

    def __post_init__(self) -> None:
        wants = (
            ("append_tokens", self.append_tokens, self.append_tokens >= 0, ">= 0"),
            ("lease_prior_s", self.lease_prior_s, 0 < self.lease_prior_s < math.inf, "a finite number > 0"),
            ("since_training_s", self.since_training_s, 0 <= (self.since_training_s or 0) < math.inf, "None or >= 0"),
        )
        for name, got, fine, allowed in wants:
            if not fine:
                raise ProfileError(f"situation: {name}: got {got}, want {allowed}")


class Reason(enum.Enum):
    """What a decision comes down to."""

    BEST = "best"
    """Nothing is predicted to be faster than what there is."""
    GATED = "gated"
    """Something is, but not by enough, or on GPUs that leave too soon: see the verdicts."""
    MOVED = "moved"
    """To another shape, or without a plan: to another bound of append-prefill."""
    BORROWED = "borrowed"
    FORCED = "forced"
    """Workers had to go, or what was left could not serve."""
    RETURNED = "returned"
    """Training GPUs go back."""
    IN_TRANSITION = "in_transition"
    """Nothing has to change, or can, before the last change is done."""
    NOTHING_FITS = "nothing_fits"
    """No shape on these GPUs can serve."""
    NO_PLAN = "no_plan"
    """There is no way to the shape: see `refusal`."""
    BAD_TIME = "bad_time"
    """Now is no time: not finite, or negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """A gate's verdict."""

    gate: str
    """return, lease, hysteresis, expansion or borrow."""
    about: str
    """The shape, or the GPUs, that it is about."""
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the fleet does, and why."""

    reason: Reason
    current: Option | None = None
    """What would serve if nothing were done: workers that can stay; None where there is none."""
    chosen: Option | None = None
    """What shall serve; None: nothing can."""
    plan: Plan | None = None
    """None: nothing changes."""
    refusal: PlanRefusal | None = None
    gates: tuple[Gated, ...] = ()
    """In the order in which they were asked."""
    considered: tuple[Option, ...] = ()
    """The best of each kind of shape with the borrowed workers that there are, fastest first; then one for each other number,
    and what else gates were asked about."""
    evaluated: int = 0
    """Shapes predicted to find those, the current one included."""
    look_again_s: float | None = None
    """When, on the clock of `now_s`, something falls due; None: no time is known."""
    called_off: tuple[WorkerId, ...] = ()
    """Rollout workers in transition on GPUs that have to go: they must not begin to serve. Whoever carries out the plan that
    moves them takes its group back; no plan made meanwhile names them."""
