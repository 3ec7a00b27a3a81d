"""How much longer a lease lasts, from how long leases lasted before.

The estimate is Kaplan and Meier's over the observed leases and `PRIOR_WEIGHT` pseudo-leases whose durations are
exponential. While R(t) = Y(t) + w exp(-t / mu) leases are at risk (Y of them observed ones that lasted beyond t, w the
weight of the prior, mu its mean), survival falls by the factor (R - d) / R where d observed leases end, and along with R in
between, as the pseudo-leases end one after the other. So it is defined without any data, is memoryless then, and moves to
the data as leases are seen; with w = 0 it is the plain estimate, up to the longest lease seen.

Source: Kaplan and Meier, Nonparametric estimation from incomplete observations, 1958; with the prior it is the posterior
mean of Susarla and Van Ryzin, Nonparametric Bayesian estimation of survival curves from incomplete observations, 1976.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pearl.errors import ProfileError

MAX_LEASES = 256
"""Leases that a history keeps, the newest: spot markets change, and a decision walks over all of them."""

PRIOR_WEIGHT = 2.0
"""Pseudo-leases behind the prior mean: after two real ones data and prior count alike. A choice, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpan:
    """How long one lease was seen."""

    duration_s: float
    """Finite and >= 0."""
    ended: bool
    """Its owner took it back after that; False: it lasted at least so long (still held, or given back by us)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.duration_s) and self.duration_s >= 0):
            raise ProfileError(f"lease history: duration_s: got {self.duration_s}, want a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHistory:
    """Leases of one source, oldest first."""

    spans: tuple[LeaseSpan, ...] = ()
    """At most `MAX_LEASES`."""

    def __post_init__(self) -> None:
        if len(self.spans) > MAX_LEASES:
            raise ProfileError(f"lease history: spans: got {len(self.spans)}, want at most {MAX_LEASES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is left of a lease."""

    survival: float
    """Probability that it lasts through the horizon, 0 .. 1."""
    expected_s: float
    """Seconds that it lasts within the horizon, mean: the integral of survival, given that it has lasted so far."""


def with_lease(history: LeaseHistory, duration_s: float, *, ended: bool) -> LeaseHistory:
    """The history with one more lease; the oldest gives way. What is no duration teaches nothing."""
    if not (math.isfinite(duration_s) and duration_s >= 0):
        return history
    spans = (*history.spans, LeaseSpan(duration_s=duration_s, ended=ended))
    return LeaseHistory(spans=spans[-MAX_LEASES:])


def outlook(
    history: LeaseHistory, *, age_s: float, horizon_s: float, prior_mean_s: float, prior_weight: float = PRIOR_WEIGHT
) -> Outlook:
    """Of a lease that has lasted `age_s`, over the next `horizon_s`.

    Ages and horizons are finite and >= 0, the prior's mean finite and > 0; else the outlook is NaN, which gates refuse.
    Where nothing observed is at risk any more the prior alone says how it goes on, whatever its weight.
    """
    sound = all(math.isfinite(x) and x >= 0 for x in (age_s, horizon_s, prior_mean_s, prior_weight))
    if not sound or prior_mean_s == 0:
        return Outlook(survival=math.nan, expected_s=math.nan)
    end_s = age_s + horizon_s
    later = [span for span in history.spans if span.duration_s > age_s]
    seen = sorted((span.duration_s, not span.ended) for span in later if span.duration_s <= end_s)
    at_s, at_risk, survival, expected_s = age_s, len(later), 1.0, 0.0
    for until_s, censored in [*seen, (end_s, True)]:
        pseudo = prior_weight * math.exp(-at_s / prior_mean_s)
        share = pseudo / (pseudo + at_risk) if at_risk else 1.0
        fallen = -math.expm1((at_s - until_s) / prior_mean_s)
        expected_s += survival * (share * prior_mean_s * fallen + (1 - share) * (until_s - at_s))
        survival *= 1 - share * fallen
        if not censored:
            # Ties end one after the other: (R - 1) / R times (R - 2) / (R - 1) is (R - 2) / R.
            pseudo = prior_weight * math.exp(-until_s / prior_mean_s)
            survival *= (pseudo + at_risk - 1) / (pseudo + at_risk)
        at_s, at_risk = until_s, at_risk - 1
    return Outlook(survival=survival, expected_s=expected_s)


def expected_use_s(
    history: LeaseHistory, age_s: float, horizon_s: float, prior_mean_s: float, *, leaves_in_s: float | None = None
) -> float:
    """Seconds that a lease of an age still lasts within a horizon, mean; NaN where a number is no use (see `outlook`).

    `leaves_in_s`: seconds until its known end or the deadline of a notice, whichever is earlier; None: none is known. One
    that has passed (< 0) leaves nothing.
    """
    if leaves_in_s is not None:
        horizon_s = math.nan if math.isnan(leaves_in_s) else min(horizon_s, max(0.0, leaves_in_s))
    return outlook(history, age_s=age_s, horizon_s=horizon_s, prior_mean_s=prior_mean_s).expected_s
