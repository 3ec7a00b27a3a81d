import math

import pytest

from pearl.core.platform import TransitionCosts
from pearl.core.toggle import (
    BETA,
    HALF_LIFE_STEPS,
    MOST_STEPS,
    OUTLIER,
    PRIOR_STEPS,
    Average,
    ToggleEstimate,
    observe,
    toggle_prior,
    toggle_s,
)
from pearl.errors import ProfileError

PRIOR = ToggleEstimate(prior_s=10.0)


def seen(estimate: ToggleEstimate, borrowed: bool, *overheads_s: float) -> ToggleEstimate:
    for overhead_s in overheads_s:
        estimate = observe(estimate, borrowed, overhead_s)
    return estimate


def test_constants_of_the_examples_below() -> None:
    assert (BETA, PRIOR_STEPS, OUTLIER) == (0.8, 2.0, 4.0)
    assert (HALF_LIFE_STEPS, MOST_STEPS) == (30.0, 40.0)


def test_the_prior_is_waking_and_giving_back() -> None:
    costs = TransitionCosts(activate_s=6.0, return_s=3.0, start_s=1000.0, finalise_s=1000.0)
    assert toggle_prior(costs) == ToggleEstimate(prior_s=9.0)
    assert toggle_prior(costs, per_worker_s=0.25) == ToggleEstimate(prior_s=9.0, per_worker_s=0.25)


def test_an_average_is_unbiased_from_the_first_value() -> None:
    one = Average().with_value(7.0)
    assert (one.observations, one.mean_s) == (1, pytest.approx(7.0))
    # (0.8 * 7 + 12) / 1.8.
    assert one.with_value(12.0).mean_s == pytest.approx(17.6 / 1.8)
    # (0.64 * 7 + 0.8 * 12 + 2) / 2.44.
    assert one.with_value(12.0).with_value(2.0).mean_s == pytest.approx(16.08 / 2.44)
    assert Average().mean_s == 0.0


def test_before_both_kinds_of_steps_are_known_the_prior_alone_counts() -> None:
    assert toggle_s(PRIOR, 4) == 10.0
    assert toggle_s(seen(PRIOR, True, 30, 30, 30), 4) == 10.0
    assert toggle_s(seen(PRIOR, False, 30, 30, 30), 4) == 10.0


def test_the_difference_takes_over_from_the_prior() -> None:
    # Steps take 16 s with and 12 s without borrowing: 4 s. n of the rarer kind: (n * 4 + 2 * 10) / (n + 2).
    estimate = seen(PRIOR, True, *[16.0] * 20)
    got = []
    for _ in range(8):
        estimate = seen(estimate, False, 12.0)
        got.append(toggle_s(estimate, 1))
    assert got == pytest.approx([(n * 4 + 20) / (n + 2) for n in range(1, 9)])
    assert got[0] == pytest.approx(8.0)
    assert estimate.observations == 8


def test_borrowing_that_costs_less_than_nothing_costs_nothing() -> None:
    # Two without and one with it; the two have faded by 2^(-1/30), so the one counts 1 / 3 and the prior's 10 s the rest.
    estimate = seen(seen(PRIOR, False, 12.0, 12.0), True, 8.0)
    assert toggle_s(estimate, 2) == pytest.approx(20 / 3)


def test_workers_may_cost_each() -> None:
    estimate = ToggleEstimate(prior_s=10.0, per_worker_s=1.5)
    assert [toggle_s(estimate, workers) for workers in (-1, 0, 1, 2, 4)] == [0.0, 0.0, 11.5, 13.0, 16.0]
    # They are known beforehand and do not fade: (4 + 2 * 10) / 3 + 2 * 1.5.
    learned = seen(seen(estimate, False, 12.0, 12.0), True, 16.0)
    assert toggle_s(learned, 2) == pytest.approx(11.0)


def test_what_is_not_seen_for_long_fades_and_its_mean_does_not() -> None:
    # Four steps with it count as two after 30 without, as one after 60; less than as many without throughout.
    estimate = seen(PRIOR, True, *[16.0] * 4)
    for left in (2.0, 1.0, 0.5):
        estimate = seen(estimate, False, *[12.0] * 30)
        assert estimate.borrowing.observations == estimate.observations == pytest.approx(left)
        assert estimate.borrowing.mean_s == pytest.approx(16.0)
        assert toggle_s(estimate, 1) == pytest.approx((left * 4 + 20) / (left + 2))
    # And the other way round: 40 without count as 20 after 30 with it.
    estimate = seen(estimate, True, *[16.0] * 30)
    assert estimate.resting.observations == pytest.approx(20.0)
    assert estimate.resting.mean_s == pytest.approx(12.0)
    # A single step takes a thirtieth of a halving.
    assert seen(estimate, True, 16.0).resting.observations == pytest.approx(20.0 / 2 ** (1 / 30))


def test_no_kind_counts_as_more_than_forty_steps() -> None:
    assert seen(PRIOR, True, *[16.0] * 39).borrowing.observations == 39
    for steps in (40, 41, 1000):
        assert seen(PRIOR, True, *[16.0] * steps).borrowing.observations == 40
    # So after 130 steps (40 halved 4 1/3 times: 1.984) the prior counts more than half, however long it was so before.
    estimate = seen(seen(PRIOR, True, *[16.0] * 1000), False, *[12.0] * 130)
    assert estimate.observations == pytest.approx(40 / 2 ** (13 / 3))
    assert toggle_s(estimate, 1) == pytest.approx((1.98425 * 4 + 20) / 3.98425, rel=1e-5)


def test_a_new_observation_outweighs_what_has_faded() -> None:
    # Two of 40 s, which count as one after 30 steps without: the next, of 10 s, weighs 0.2 to 0.8 * 0.2.
    faded = seen(seen(PRIOR, True, 40.0, 40.0), False, *[12.0] * 30)
    again = seen(faded, True, 10.0).borrowing
    assert again.mean_s == pytest.approx((0.16 * 40 + 0.2 * 10) / 0.36)
    assert again.observations == pytest.approx(2.0)
    # Not faded it would weigh 0.2 to 0.8 * 0.36.
    assert seen(PRIOR, True, 40.0, 40.0, 10.0).borrowing.mean_s == pytest.approx((0.288 * 40 + 0.2 * 10) / 0.488)
    # What has faded altogether weighs nothing.
    gone = seen(seen(PRIOR, True, 40.0), False, *[12.0] * 3000)
    assert (gone.borrowing.mean_s, gone.borrowing.observations) == (pytest.approx(40.0), pytest.approx(0.0))
    first = seen(gone, True, 10.0).borrowing
    assert (first.mean_s, first.observations) == (pytest.approx(10.0), pytest.approx(1.0))


def test_borrowing_is_tried_again_after_a_bad_estimate() -> None:
    """One hung step stops borrowing, which would win 20 s and really costs 8; nothing but time can tell."""
    estimate = seen(PRIOR, False, *[12.0] * 10)
    estimate = seen(estimate, True, 600.0)
    # It counts as 4 (12 + 10) = 88 s: a third of 76 s, two thirds of the prior's 10 s.
    assert toggle_s(estimate, 1) == pytest.approx(32.0)
    rests = 0
    while toggle_s(estimate, 1) >= 20.0:
        estimate = seen(estimate, False, 12.0)
        rests += 1
    # 20 = 10 + 66 n / (n + 2): n = 20 / 56, which is 1 halved 1.485 times, 44.6 steps.
    assert rests == 45
    # The next step that borrows takes 20 s, 8 s more than without. The hung one counts as 1 / 2^1.5 = 0.35355 and weighs
    # 0.8 (1 - 0.8^0.35355) = 0.06069 to 0.2: 35.83 s; 1.35355 / 3.35355 of 23.83 s, and the rest of 10 s.
    estimate = seen(estimate, True, 20.0)
    assert estimate.borrowing.mean_s == pytest.approx(35.83, abs=0.01)
    assert toggle_s(estimate, 1) == pytest.approx(15.58, abs=0.005)


def test_the_kind_of_step_says_which_average() -> None:
    with_it = observe(PRIOR, True, 5.0)
    assert (with_it.borrowing.observations, with_it.resting.observations) == (1, 0)
    without = observe(PRIOR, False, 5.0)
    assert (without.borrowing.observations, without.resting.observations) == (0, 1)
    assert without.resting.mean_s == pytest.approx(5.0)
    assert (without.prior_s, without.per_worker_s) == (10.0, 0.0)


def test_one_hung_step_counts_as_four_times_what_is_known() -> None:
    # 10 s, then 40 s at most: (0.8 * 2 + 0.2 * 40) / 0.36 = 26.67 s, of either kind.
    for borrowed in (False, True):
        known = observe(PRIOR, borrowed, 10.0)
        found = observe(known, borrowed, 3600.0)
        assert (found.borrowing if borrowed else found.resting).mean_s == pytest.approx(9.6 / 0.36)
        assert observe(known, borrowed, 40.0) == found
        less = observe(known, borrowed, 39.0)
        assert (less.borrowing if borrowed else less.resting).mean_s == pytest.approx(9.4 / 0.36)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_first_step_counts_as_four_times_the_prior_and_what_is_known_of_the_other_kind(borrowed: bool) -> None:
    def mean_s(estimate: ToggleEstimate) -> float:
        return (estimate.borrowing if borrowed else estimate.resting).mean_s

    for overhead_s, taught_s in ((39.0, 39.0), (40.0, 40.0), (41.0, 40.0), (600.0, 40.0)):
        assert mean_s(observe(PRIOR, borrowed, overhead_s)) == pytest.approx(taught_s)
    known = observe(PRIOR, not borrowed, 12.0)
    for overhead_s, taught_s in ((87.0, 87.0), (88.0, 88.0), (89.0, 88.0), (600.0, 88.0)):
        assert mean_s(observe(known, borrowed, overhead_s)) == pytest.approx(taught_s)
    # Both: 40 s, then 4 (40 + 10) s.
    assert mean_s(seen(observe(PRIOR, not borrowed, 1e9), borrowed, 1e9)) == pytest.approx(200.0)


def test_what_cold_caches_cost_once_is_soon_forgotten() -> None:
    """Two observations, one odd: 76 s too many count a third at first, a ninth after 60 steps, a 33rd after 120."""
    estimate = seen(PRIOR, False, 12.0)
    estimate = seen(estimate, True, 600.0)
    for halvings, share in ((2, 1 / 9), (4, 1 / 33)):
        later = seen(estimate, False, *[12.0] * (30 * halvings))
        assert toggle_s(later, 1) == pytest.approx(10 + share * 66)


@pytest.mark.parametrize("first", [True, False])
def test_the_order_of_kinds_does_not_bias(first: bool) -> None:
    """40 s in every step, four times the prior: borrowing costs nothing, whichever was seen first."""
    estimate = observe(observe(PRIOR, first, 40.0), not first, 40.0)
    assert estimate.borrowing.mean_s == pytest.approx(40.0)
    assert estimate.resting.mean_s == pytest.approx(40.0)


def test_where_nothing_is_known_nothing_is_far() -> None:
    nothing = ToggleEstimate(prior_s=0.0)
    for borrowed in (True, False):
        known = observe(nothing, borrowed, 3600.0)
        assert (known.borrowing if borrowed else known.resting).mean_s == pytest.approx(3600.0)
    # A known quarter of a second bounds the next of its own, (0.04 + 0.2) / 0.36 s, and the first of the other kind.
    known = observe(nothing, True, 0.25)
    assert observe(known, True, 3600.0).borrowing.mean_s == pytest.approx(0.24 / 0.36)
    assert observe(known, False, 3600.0).resting.mean_s == pytest.approx(1.0)


def test_an_average_of_nothing_bounds_nothing_the_prior_does() -> None:
    # 0 s, then 40 s at most: 0.2 * 40 / 0.36.
    assert seen(PRIOR, True, 0.0, 3600.0).borrowing.mean_s == pytest.approx(8 / 0.36)


@pytest.mark.parametrize("overhead_s", [math.nan, math.inf, -math.inf, -0.1])
def test_nonsense_teaches_nothing(overhead_s: float) -> None:
    estimate = seen(PRIOR, True, 5.0)
    assert observe(estimate, True, overhead_s) == estimate
    assert observe(estimate, False, overhead_s) == estimate
    assert observe(estimate, False, 0.0).resting.observations == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_an_estimate_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ProfileError, match=rf"^toggle: prior_s: got {value}, want a finite number >= 0$"):
        ToggleEstimate(prior_s=value)
    with pytest.raises(ProfileError, match=rf"^toggle: per_worker_s: got {value}, want"):
        ToggleEstimate(prior_s=1.0, per_worker_s=value)
    with pytest.raises(ProfileError, match=rf"^average: mean_s: got {value}, want a finite number >= 0$"):
        Average(mean_s=value)
    with pytest.raises(ProfileError, match=r"^average: observations: got -1, want"):
        Average(observations=-1)
