import math

import pytest

from pearl.core.platform import TransitionCosts
from pearl.core.toggle import BETA, OUTLIER, PRIOR_STEPS, Average, ToggleEstimate, observe, toggle_prior, toggle_s
from pearl.errors import ProfileError

PRIOR = ToggleEstimate(prior_s=10.0)


def seen(estimate: ToggleEstimate, borrowed: bool, *overheads_s: float) -> ToggleEstimate:
    for overhead_s in overheads_s:
        estimate = observe(estimate, borrowed, overhead_s)
    return estimate


def test_constants_of_the_examples_below() -> None:
    assert (BETA, PRIOR_STEPS, OUTLIER) == (0.8, 2.0, 4.0)


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
    estimate = seen(PRIOR, True, *[16.0] * 8)
    got = []
    for _ in range(8):
        estimate = seen(estimate, False, 12.0)
        got.append(toggle_s(estimate, 1))
    assert got == pytest.approx([(n * 4 + 20) / (n + 2) for n in range(1, 9)])
    assert got[0] == pytest.approx(8.0)
    assert estimate.observations == 8
    # More of one kind alone says no more.
    assert seen(estimate, False, 12.0).observations == 8


def test_borrowing_that_costs_less_than_nothing_costs_nothing() -> None:
    # Two of each: half of it is the prior's 10 s.
    estimate = seen(seen(PRIOR, True, 8.0, 8.0), False, 12.0, 12.0)
    assert toggle_s(estimate, 2) == pytest.approx(5.0)


def test_workers_may_cost_each() -> None:
    estimate = ToggleEstimate(prior_s=10.0, per_worker_s=1.5)
    assert [toggle_s(estimate, workers) for workers in (-1, 0, 1, 2, 4)] == [0.0, 0.0, 11.5, 13.0, 16.0]
    # They are known beforehand and do not fade: (10 + 4) / 2 + 2 * 1.5.
    learned = seen(seen(estimate, True, 16.0, 16.0), False, 12.0, 12.0)
    assert toggle_s(learned, 2) == pytest.approx(10.0)


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


@pytest.mark.parametrize("first", [True, False])
def test_the_order_of_kinds_does_not_bias(first: bool) -> None:
    """60 s in every step, six times the prior: borrowing costs nothing, whichever was seen first."""
    estimate = observe(observe(PRIOR, first, 60.0), not first, 60.0)
    assert estimate.borrowing.mean_s == pytest.approx(60.0)
    assert estimate.resting.mean_s == pytest.approx(60.0)


def test_where_nothing_is_known_nothing_is_far() -> None:
    assert observe(ToggleEstimate(prior_s=0.0), True, 3600.0).borrowing.mean_s == pytest.approx(3600.0)
    # Not of the other kind either; a known quarter of a second bounds the next of its own: (0.04 + 0.2) / 0.36 s.
    known = observe(ToggleEstimate(prior_s=0.0), True, 0.25)
    assert observe(known, False, 3600.0).resting.mean_s == pytest.approx(3600.0)
    assert observe(known, True, 3600.0).borrowing.mean_s == pytest.approx(0.24 / 0.36)


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
    with pytest.raises(ProfileError, match=rf"^average: weighted_s: got {value}, want a finite number >= 0$"):
        Average(weighted_s=value)
    with pytest.raises(ProfileError, match=r"^average: observations: got -1, want"):
        Average(observations=-1)
