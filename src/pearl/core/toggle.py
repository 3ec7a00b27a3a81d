"""What borrowing costs a training step, learned from steps with and without it.

The difference of two moving averages of what a step takes beside its rollout and its update: so that indirect costs, such as
evicted caches or a trainer that comes back slowly, count as well as waking and giving back. Laws:

- *unbiased*: an average weighs its observations by beta^k and divides by the sum of these weights, so it begins at the first
  one.
- *cold start*: with n observations of the rarer kind the difference counts n / (n + `PRIOR_STEPS`), the prior the rest.
- *fading*: each step of one kind leaves 2^(-1 / `HALF_LIFE_STEPS`) of what the observations of the other count as, and its
  average as it was; a new one then weighs the more. So a bad estimate, which by keeping steps from borrowing would keep itself
  from being corrected, gives way to the prior: after a steps without borrowing at most m = `MOST_STEPS` 2^(-a /
  `HALF_LIFE_STEPS`) observations are left, whatever was seen before.
- *tame*: one step counts as at most `OUTLIER` times what is known of its kind; the first one of a kind, of which nothing is
  known, as at most `OUTLIER` times the prior and the average of the other kind together. So a single step with borrowing,
  whatever it took, leaves the estimate within (`OUTLIER` - 1) (prior + r) m / (m + `PRIOR_STEPS`) of the prior, m =
  2^(-a / `HALF_LIFE_STEPS`), after a steps without it that take r beside rollout and update, r <= `OUTLIER` prior; and where
  the first step without is odd as well, within (`OUTLIER`^2 + `OUTLIER` - 1) prior m / (m + `PRIOR_STEPS`). Steps that keep
  taking more are believed: each raises its average to less than `OUTLIER` times. Where all that is known is 0, nothing is far.
- *sober*: what is no finite number >= 0 teaches nothing, and nothing fades for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from pearl.core.platform import TransitionCosts
from pearl.errors import ProfileError

BETA = 0.8
"""Weight of the past: an observation counts a tenth after ten steps. A choice, not a measurement."""

PRIOR_STEPS = 2.0
"""Steps of either kind that the prior counts as. A choice, not a measurement."""

HALF_LIFE_STEPS = 30.0
"""Steps of one kind that halve what is known of the other: long against the ten steps that an average holds, so that turns of
both kinds keep what they know; short against the hundreds of steps of a run. A choice, not a measurement."""

MOST_STEPS = 40.0
"""Steps that what is known of a kind counts as at most: its average holds fewer, so more would only put off the day when it has
faded; with so many the prior counts less than a twentieth. A choice, not a measurement."""

OUTLIER = 4.0
"""Times what is known: what a single step can teach. A choice, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """An exponential moving average that knows how much it has seen."""

    mean_s: float = 0.0
    """Finite and >= 0; 0 before the first observation."""
    observations: float = 0.0
    """How many it counts as, >= 0: those that it saw, less what has faded."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"average: {each.name}: got {value}, want a finite number >= 0")

    def with_value(self, value_s: float) -> Average:
        """After one more observation.

        n observations weigh 1 - beta^n together, beta (1 - beta^n) once there is one more, and that one 1 - beta.
        Source: Kingma and Ba, Adam, 2015, section 3; here n may be no whole number.
        """
        before, new = BETA * (1 - BETA**self.observations), 1 - BETA
        mean_s = (before * self.mean_s + new * value_s) / (before + new)
        return Average(mean_s=mean_s, observations=min(self.observations + 1, MOST_STEPS))

    def faded(self) -> Average:
        """After a step of the other kind."""
        return replace(self, observations=self.observations * 2 ** (-1 / HALF_LIFE_STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToggleEstimate:
    """Incremental cost of borrowing in one training step."""

    prior_s: float
    """Before anything is known, finite and >= 0; see `toggle_prior`."""
    per_worker_s: float = 0.0
    """What each borrowed worker costs on top, known beforehand, finite and >= 0."""
    borrowing: Average = Average()
    """Overhead of steps that borrowed."""
    resting: Average = Average()
    """Overhead of steps that did not."""

    def __post_init__(self) -> None:
        for name in ("prior_s", "per_worker_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"toggle: {name}: got {value}, want a finite number >= 0")

    @property
    def observations(self) -> float:
        """Steps of the kind of which less is known: what the difference is known by."""
        return min(self.borrowing.observations, self.resting.observations)


def toggle_prior(costs: TransitionCosts, *, per_worker_s: float = 0.0) -> ToggleEstimate:
    """The estimate before any step: waking and giving back.

    Under disaggregation the metadata of KV buffers is refreshed too; the paper has no figure for that, so it is learned, as
    all that is indirect.

    Raises:
        ProfileError: a negative time, or one that is not finite.
    """
    return ToggleEstimate(prior_s=costs.activate_s + costs.return_s, per_worker_s=per_worker_s)


def observe(estimate: ToggleEstimate, borrowed: bool, overhead_s: float) -> ToggleEstimate:
    """The estimate after a training step; `overhead_s`: what it took beside rollout and update, finite and >= 0."""
    if not (math.isfinite(overhead_s) and overhead_s >= 0):
        return estimate
    own, other = (estimate.borrowing, estimate.resting) if borrowed else (estimate.resting, estimate.borrowing)
    # Of its own kind where that says something, else the order of the two would bias their difference.
    known_s = own.mean_s or other.mean_s + estimate.prior_s
    value_s = min(overhead_s, OUTLIER * known_s) if known_s > 0 else overhead_s
    if borrowed:
        return replace(estimate, borrowing=estimate.borrowing.with_value(value_s), resting=estimate.resting.faded())
    return replace(estimate, resting=estimate.resting.with_value(value_s), borrowing=estimate.borrowing.faded())


def toggle_s(estimate: ToggleEstimate, workers: int) -> float:
    """Seconds that borrowing so many workers costs, >= 0; 0 for none."""
    if workers <= 0:
        return 0.0
    learned_s = max(0.0, estimate.borrowing.mean_s - estimate.resting.mean_s)
    share = estimate.observations / (estimate.observations + PRIOR_STEPS)
    return share * learned_s + (1 - share) * estimate.prior_s + estimate.per_worker_s * workers
