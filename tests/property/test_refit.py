"""Refits: whatever a step shows, the profile stays one, and moves no further than its share.

- *valid*: any numbers at all go in; what comes out is a profile (making one checks it), with at most `MAX_POINTS` points.
- *bounded*: a mean moves towards that of the sample, and at most by the share of the way.
- *outliers*: one value of any size moves a mean by less than share * OUTLIER * largest.
- *order*: the order of a sample is of no account.
- *counted*: what is left out is counted, neither more nor less.
"""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.distribution import LARGEST, MAX_POINTS, distribution_of
from pearl.core.platform import LARGEST_SURPRISE, TransitionCosts, refit_costs
from pearl.core.workload import OUTLIER, WorkloadProfile, WorkloadSample, refit_workload

SOUND = st.floats(0, LARGEST, allow_subnormal=True)
COUNTS = st.floats(0, 1e5)
ANY = st.floats(allow_nan=True, allow_infinity=True)
SHARES = st.floats(0.01, 1)


@st.composite
def profiles(draw: st.DrawFn) -> WorkloadProfile:
    def some(low: float) -> list[float]:
        return draw(st.lists(st.floats(low, 1e5), min_size=1, max_size=80))

    return WorkloadProfile(
        turns=distribution_of(some(1)),
        prompt_tokens=distribution_of(some(0)),
        new_tokens=distribution_of(some(0)),
        generated_tokens=distribution_of(some(1)),
        env_s=distribution_of(some(0)),
        retained=draw(st.floats(0, 1)),
        turn_overhead_s=draw(st.floats(0, 1e3)),
        theta=draw(st.floats(0, 1e3)),
    )


@st.composite
def samples(draw: st.DrawFn) -> WorkloadSample:
    def some() -> list[float]:
        return draw(st.lists(st.one_of(COUNTS, ANY), max_size=20))

    def one() -> float | None:
        return draw(st.one_of(st.none(), st.floats(0, 1), ANY))

    return WorkloadSample(
        turns=some(),
        prompt_tokens=some(),
        new_tokens=some(),
        generated_tokens=some(),
        env_s=some(),
        retained=one(),
        turn_overhead_s=one(),
        decoding_share=one(),
    )


@given(profiles(), st.lists(samples(), min_size=1, max_size=4), SHARES)
@settings(max_examples=60)
def test_a_profile_stays_one(profile: WorkloadProfile, steps: list[WorkloadSample], share: float) -> None:
    for step in steps:
        found = refit_workload(profile, step, share)
        profile = found.profile
        assert len(profile.env_s.values) <= MAX_POINTS
        assert profile.turns.values[0] >= 1
        assert profile.generated_tokens.values[0] >= 1
        assert 0 <= profile.retained <= 1
        assert profile.theta <= 1000


@given(st.lists(SOUND, min_size=1, max_size=120), st.lists(SOUND, min_size=1, max_size=120), st.floats(0.01, 0.99))
@settings(max_examples=100)
def test_a_mixture_has_the_mean_of_its_parts(old: list[float], new: list[float], share: float) -> None:
    one, two = distribution_of(old), distribution_of(new)
    mixed = one.mixed_with(two, share)
    want = one.mean + share * (two.mean - one.mean)
    assert math.isclose(mixed.mean, want, rel_tol=1e-6, abs_tol=1e-6 * max(one.largest, two.largest))
    assert len(mixed.values) <= MAX_POINTS
    assert mixed.largest == max(one.largest, two.largest)


@given(profiles(), st.lists(COUNTS, min_size=1, max_size=60), SHARES)
@settings(max_examples=60)
def test_a_mean_moves_by_its_share_at_most(profile: WorkloadProfile, seen: list[float], share: float) -> None:
    old = profile.env_s.mean
    new = refit_workload(profile, WorkloadSample(env_s=seen), share).profile.env_s.mean
    towards = math.fsum(seen) / len(seen) - old
    slack = 1e-6 * max(1.0, *seen, profile.env_s.largest)
    assert min(0.0, share * towards) - slack <= new - old <= max(0.0, share * towards) + slack or (
        # Outliers are cut down, so the sample may teach the other way than its own mean says.
        max(seen) > OUTLIER * profile.env_s.largest > 0
    )


@given(profiles(), st.floats(0, LARGEST), SHARES)
@settings(max_examples=60)
def test_one_outlier_moves_little(profile: WorkloadProfile, value: float, share: float) -> None:
    old = profile.env_s
    new = refit_workload(profile, WorkloadSample(env_s=[value]), share).profile.env_s
    if old.largest > 0:
        assert new.mean <= old.mean + share * OUTLIER * old.largest * (1 + 1e-6)
        assert new.largest <= OUTLIER * old.largest


@given(profiles(), st.lists(COUNTS, max_size=100), st.randoms(use_true_random=False), SHARES)
@settings(max_examples=60)
def test_order_is_of_no_account(
    profile: WorkloadProfile, seen: list[float], order: random.Random, share: float
) -> None:
    shuffled = list(seen)
    order.shuffle(shuffled)
    one = refit_workload(profile, WorkloadSample(new_tokens=seen), share)
    assert one == refit_workload(profile, WorkloadSample(new_tokens=shuffled), share)


@given(profiles(), st.lists(ANY, max_size=40))
@settings(max_examples=60)
def test_what_is_left_out_is_counted(profile: WorkloadProfile, seen: list[float]) -> None:
    useless = sum(math.isnan(value) or value < 0 or value > LARGEST for value in seen)
    assert refit_workload(profile, WorkloadSample(env_s=seen), 0.3).ignored == useless


@given(st.floats(0, 1e6, allow_subnormal=False), ANY, SHARES)
def test_a_cost_moves_by_its_share_of_a_bounded_surprise(had: float, seconds: float, share: float) -> None:
    found = refit_costs(TransitionCosts(start_s=had), {"start_s": seconds}, share).start_s
    assert math.isfinite(found)
    if had > 0:
        assert had * (1 - share) <= found * (1 + 1e-9)
        assert found <= had * (1 + share * (LARGEST_SURPRISE - 1)) * (1 + 1e-9)


def test_hundreds_of_steps_leave_no_dust() -> None:
    """An end of the distribution that is never seen again loses weight by halves: it must go before it underflows."""
    found = distribution_of([0.4, 5.0, 9.0])
    for step in range(900):
        found = found.mixed_with(distribution_of([float(n) for n in range(1, 60 + step % 7)]), 0.5)
    assert found.values[0] == 1.0
    assert min(found.weights) > 1e-10
