import math
from itertools import pairwise

import pytest

from pearl.core.survival import (
    MAX_LEASES,
    PRIOR_WEIGHT,
    LeaseHistory,
    LeaseSpan,
    Outlook,
    expected_use_s,
    outlook,
    with_lease,
)
from pearl.errors import ProfileError

NOTHING = LeaseHistory()
HALF_LIFE_100 = 100 / math.log(2)
"""Prior mean with which half of the pseudo-leases end every 100 s."""


def ended(*durations_s: float) -> LeaseHistory:
    return LeaseHistory(spans=tuple(LeaseSpan(duration_s=d, ended=True) for d in durations_s))


def history(text: str) -> LeaseHistory:
    """`6 6 9+`: seconds, + where it was censored."""
    parts = text.split()
    return LeaseHistory(spans=tuple(LeaseSpan(duration_s=float(p.rstrip("+")), ended=p[-1] != "+") for p in parts))


# Remission times of 21 patients under 6-MP, in weeks: Freireich et al., Blood 21, 1963; the survival is printed in textbooks
# (Klein and Moeschberger, Survival analysis, table 4.1).
REMISSION = history("6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+")


@pytest.mark.parametrize(
    ("week", "survival"),
    [
        (5.99, 1.0),
        (6, 0.857),
        (6.99, 0.857),
        (7, 0.807),
        (9.99, 0.807),
        (10, 0.753),
        (12.99, 0.753),
        (13, 0.690),
        (16, 0.627),
        (21.99, 0.627),
        (22, 0.538),
        (23, 0.448),
        (35, 0.448),
    ],
)
def test_without_a_prior_it_is_the_textbooks_estimate(week: float, survival: float) -> None:
    got = outlook(REMISSION, age_s=0, horizon_s=week, prior_mean_s=1e-3, prior_weight=0)
    assert got.survival == pytest.approx(survival, abs=5e-4)


def test_without_a_prior_the_expected_time_is_the_area_below_the_estimate() -> None:
    # 6 * 1 + 1 * 6/7 + 3 * 0.80672 + 3 * 0.75294 + 3 * 0.69020 + 6 * 0.62745 + 1 * 0.53782, to week 23.
    got = outlook(REMISSION, age_s=0, horizon_s=23, prior_mean_s=50, prior_weight=0)
    assert got.expected_s == pytest.approx(
        6 + 0.857143 + 2.420168 + 2.258824 + 2.070588 + 3.764706 + 0.537815, abs=1e-5
    )


def test_ends_at_one_time_count_together_and_what_is_censored_then_was_at_risk() -> None:
    # Four at risk at 10, two of them end: 1/2. One is censored at 10, so at 20 one is left, and ends.
    leases = history("10+ 10 20 10")
    got = [outlook(leases, age_s=0, horizon_s=h, prior_mean_s=5, prior_weight=0) for h in (9.5, 10, 19.5, 20, 25)]
    assert [one.survival for one in got] == pytest.approx([1, 0.5, 0.5, 0, 0])
    assert [one.expected_s for one in got] == pytest.approx([9.5, 10, 14.75, 15, 15])


@pytest.mark.parametrize("age_s", [0.0, 250.0, 1e9])
def test_without_data_the_prior_is_memoryless(age_s: float) -> None:
    # 100 (1 - 1/e) s and 1/e.
    got = outlook(NOTHING, age_s=age_s, horizon_s=100, prior_mean_s=100)
    assert got.survival == pytest.approx(0.36787944)
    assert got.expected_s == pytest.approx(63.2120559)


def test_two_leases_and_the_prior_by_hand() -> None:
    # At risk: 2 + 2 pseudo-leases; at 100 s one pseudo-lease is left: 3 of 4. One real one ends: 3/4 * 2/3 = 1/2. At 200 s
    # half a pseudo-lease is left beside the other: 1/2 * 1.5/2 = 3/8.
    # Areas: a pseudo-lease lasts 100 / ln 2 = 144.2695 s: (2 * 144.2695 / 2 + 2 * 100) / 4 = 86.0674, and
    # 1/2 * (144.2695 / 2 + 100) / 2 = 43.0337.
    assert PRIOR_WEIGHT == 2
    leases = ended(100, 300)
    before = outlook(leases, age_s=0, horizon_s=99.999, prior_mean_s=HALF_LIFE_100)
    assert before.survival == pytest.approx(0.75, abs=1e-5)
    at = outlook(leases, age_s=0, horizon_s=100, prior_mean_s=HALF_LIFE_100)
    assert at == Outlook(survival=pytest.approx(0.5), expected_s=pytest.approx(86.0674, abs=1e-4))
    after = outlook(leases, age_s=0, horizon_s=200, prior_mean_s=HALF_LIFE_100)
    assert after == Outlook(survival=pytest.approx(0.375), expected_s=pytest.approx(129.1011, abs=1e-4))


@pytest.mark.parametrize("first", ["100", "100+", "50"])
def test_a_lease_that_has_lasted_longer_is_compared_with_those_that_did(first: str) -> None:
    # At 100 s: one real lease beyond, one of two pseudo-leases; at 200 s 1.5 of these 2 are left.
    got = outlook(history(f"{first} 300"), age_s=100, horizon_s=100, prior_mean_s=HALF_LIFE_100)
    assert got.survival == pytest.approx(0.75)
    assert got.expected_s == pytest.approx(86.0674, abs=1e-4)


def test_a_lease_still_held_counts_as_long_as_it_was_seen() -> None:
    # As two leases and the prior above, only that none ends at 100: 3/4, then 3/4 * 1.5/2; the area beyond is 3/4 * 86.0674.
    got = outlook(history("100+ 300"), age_s=0, horizon_s=200, prior_mean_s=HALF_LIFE_100)
    assert got.survival == pytest.approx(0.5625)
    assert got.expected_s == pytest.approx(86.0674 * 1.75, abs=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_beyond_all_leases_the_prior_goes_on(weight: float) -> None:
    got = outlook(history("100+ 150"), age_s=150, horizon_s=100, prior_mean_s=HALF_LIFE_100, prior_weight=weight)
    assert got == Outlook(survival=pytest.approx(0.5), expected_s=pytest.approx(72.1348, abs=1e-4))


def test_the_estimate_is_that_of_real_leases_in_place_of_the_pseudo_ones() -> None:
    # Every real lease 400 times, and 800 leases at the quantiles of the exponential: then count, step by step.
    leases = history("30 80+ 80 140 200+ 500")
    durations = [(span.duration_s, span.ended) for span in leases.spans for _ in range(400)]
    durations += [(-120 * math.log(1 - (i + 0.5) / 800), True) for i in range(800)]
    survival, expected_s, at_s = 1.0, 0.0, 40.0
    for end_s in sorted({d for d, done in durations if done and 40 < d <= 340}):
        expected_s += survival * (end_s - at_s)
        at_risk = sum(d >= end_s for d, _ in durations)
        survival *= 1 - sum(d == end_s and done for d, done in durations) / at_risk
        at_s = end_s
    expected_s += survival * (340 - at_s)
    got = outlook(leases, age_s=40, horizon_s=300, prior_mean_s=120)
    assert got.survival == pytest.approx(survival, rel=5e-3)
    assert got.expected_s == pytest.approx(expected_s, rel=5e-3)


def test_it_moves_smoothly_to_the_data() -> None:
    # The prior says 100 s; leases last 1,000 s. Over 500 s: 99.3 without data, then nearer and nearer to 500.
    got = [expected_use_s(ended(*[1000.0] * n), 0, 500, 100) for n in range(65)]
    assert got[0] == pytest.approx(100 * (1 - math.exp(-5)))
    # n of n + 2 last throughout.
    assert got[1] == pytest.approx((2 * got[0] + 500) / 3)
    assert got[64] == pytest.approx((2 * got[0] + 64 * 500) / 66)
    assert all(a < b < 500 for a, b in pairwise(got))


@pytest.mark.parametrize(
    ("leaves_in_s", "seconds"), [(None, 200), (500.0, 200), (math.inf, 200), (100.0, 100), (0.0, 0), (-5.0, 0)]
)
def test_a_known_end_caps_the_horizon(leaves_in_s: float | None, seconds: float) -> None:
    expected = 100 * (1 - math.exp(-seconds / 100))
    assert expected_use_s(NOTHING, 7, 200, 100, leaves_in_s=leaves_in_s) == pytest.approx(expected)
    assert expected_use_s(NOTHING, 7, math.inf, 100, leaves_in_s=80.0) == pytest.approx(100 * (1 - math.exp(-0.8)))


@pytest.mark.parametrize(
    ("age_s", "horizon_s", "prior_mean_s"),
    [
        (math.nan, 10, 10),
        (-1, 10, 10),
        (math.inf, 10, 10),
        (1, math.nan, 10),
        (1, -1, 10),
        (1, math.inf, 10),
        (1, 10, math.nan),
        (1, 10, -1),
        (1, 10, math.inf),
        (1, 10, 0),
    ],
)
def test_nonsense_gives_no_number(age_s: float, horizon_s: float, prior_mean_s: float) -> None:
    got = outlook(ended(5), age_s=age_s, horizon_s=horizon_s, prior_mean_s=prior_mean_s)
    assert math.isnan(got.survival)
    assert math.isnan(got.expected_s)
    assert math.isnan(expected_use_s(ended(5), age_s, horizon_s, prior_mean_s))


def test_a_cap_that_is_no_number_gives_none() -> None:
    assert math.isnan(expected_use_s(NOTHING, 1, 10, 10, leaves_in_s=math.nan))
    assert math.isnan(expected_use_s(NOTHING, 1, math.nan, 10, leaves_in_s=5))
    assert math.isnan(expected_use_s(NOTHING, 1, -1, 10, leaves_in_s=5))


@pytest.mark.parametrize("weight", [math.nan, -0.5, math.inf])
def test_the_weight_of_the_prior_is_a_number(weight: float) -> None:
    assert math.isnan(outlook(NOTHING, age_s=0, horizon_s=1, prior_mean_s=1, prior_weight=weight).survival)


def test_over_no_time_a_lease_lasts() -> None:
    assert outlook(ended(5, 9), age_s=5, horizon_s=0, prior_mean_s=3) == Outlook(survival=1.0, expected_s=0.0)


def test_a_history_takes_leases_up_to_its_bound() -> None:
    leases = NOTHING
    for seconds in range(MAX_LEASES + 2):
        leases = with_lease(leases, float(seconds), ended=seconds % 2 == 0)
    assert len(leases.spans) == MAX_LEASES == 256
    assert leases.spans[0] == LeaseSpan(duration_s=2.0, ended=True)
    assert leases.spans[-1] == LeaseSpan(duration_s=257.0, ended=False)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_what_is_no_duration_teaches_nothing(seconds: float) -> None:
    assert with_lease(ended(5), seconds, ended=True) == ended(5)
    assert with_lease(ended(5), 0.0, ended=True) == ended(5, 0)


def test_a_history_that_cannot_be_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"^lease history: duration_s: got nan, want a finite number >= 0$"):
        LeaseSpan(duration_s=math.nan, ended=True)
    with pytest.raises(ProfileError, match="got inf"):
        LeaseSpan(duration_s=math.inf, ended=False)
    with pytest.raises(ProfileError, match="got -1"):
        LeaseSpan(duration_s=-1.0, ended=True)
    with pytest.raises(ProfileError, match=r"^lease history: spans: got 257, want at most 256$"):
        ended(*[1.0] * 257)
    assert len(ended(*[1.0] * 256).spans) == 256
