"""Gates under any numbers.

Invariants: no switching back and forth under noise below the thresholds, and none right after a switch; a switch wins more
than it costs; borrowing never takes longer than not to borrow, by the numbers that it was given; what is worth a long lease is
worth a longer one; returning is due no later the less is known; no verdict passes on a number that is none. What borrowing costs
lies between the prior and what was seen; while steps of one kind only are seen it goes to the prior, at a pace that no history
delays, and means stay within what was seen.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pearl.core.gate import (
    BorrowOption,
    ChangeKind,
    GateReason,
    Thresholds,
    borrow,
    change_kind,
    expansion,
    hysteresis,
    return_by_s,
    return_due,
)
from pearl.core.shape import Pool, Shape
from pearl.core.state import Role
from pearl.core.survival import LeaseHistory, LeaseSpan, expected_use_s, outlook
from pearl.core.toggle import HALF_LIFE_STEPS, MOST_STEPS, PRIOR_STEPS, ToggleEstimate, observe, toggle_s

KINDS = st.sampled_from([ChangeKind.RATIO, ChangeKind.MODE, ChangeKind.TP])
SECONDS = st.floats(0, 1e5)
ANY = st.one_of(st.floats(), SECONDS)
SHARES = st.floats(0, 1)


@given(kind=KINDS, true_s=st.floats(1e-3, 1e6), noise=st.lists(st.tuples(SHARES, SHARES), min_size=2, max_size=30))
def test_two_equal_shapes_are_never_exchanged_by_noise_below_the_threshold(
    kind: ChangeKind, true_s: float, noise: list[tuple[float, float]]
) -> None:
    # Predictions of both within [(1 - threshold) T, T]: moving costs nothing, so that noise alone could do it.
    width = Thresholds().of(kind) * (1 - 1e-9)
    for one, other in noise:
        old_s, new_s = true_s * (1 - width * one), true_s * (1 - width * other)
        verdict = hysteresis(kind, old_s=old_s, new_s=new_s, cost_s=0.0)
        assert verdict.reason is GateReason.BELOW_THRESHOLD


@given(
    kind=KINDS,
    first_s=st.floats(1, 1e4),
    second_s=st.floats(1, 1e4),
    noise=st.lists(st.tuples(SHARES, SHARES), max_size=40),
)
def test_of_two_shapes_that_differ_one_is_kept(
    kind: ChangeKind, first_s: float, second_s: float, noise: list[tuple[float, float]]
) -> None:
    # Both predictions up to half the threshold too low: they move against each other by less than the threshold, so there
    # is one switch at most, and never one to what is really slower.
    width = Thresholds().of(kind) / 2
    times, current, switches = (first_s, second_s), 0, 0
    for shares in noise:
        seen = [time_s * (1 - width * share) for time_s, share in zip(times, shares, strict=True)]
        if hysteresis(kind, old_s=seen[current], new_s=seen[1 - current], cost_s=0.0).passed:
            assert times[1 - current] < times[current]
            current, switches = 1 - current, switches + 1
    assert switches <= 1


@given(kind=st.sampled_from(ChangeKind), old_s=ANY, new_s=ANY, cost_s=ANY)
def test_a_switch_wins_more_than_it_costs(kind: ChangeKind, old_s: float, new_s: float, cost_s: float) -> None:
    verdict = hysteresis(kind, old_s=old_s, new_s=new_s, cost_s=cost_s)
    if verdict.passed:
        assert old_s - new_s > cost_s >= 0
        assert new_s < old_s * (1 - Thresholds().of(kind)) * (1 + 1e-9) or old_s == math.inf
        back = hysteresis(kind, old_s=new_s, new_s=old_s, cost_s=0.0)
        assert not back.passed


@given(closes=st.lists(st.tuples(ANY, ANY), min_size=1, max_size=6))
def test_borrowing_takes_no_longer(closes: list[tuple[float, float]]) -> None:
    options = [BorrowOption(workers=m, close_s=c, toggle_s=t if m else 0.0) for m, (c, t) in enumerate(closes)]
    verdict = borrow(options)
    totals = [option.close_s + option.toggle_s for option in options]
    if verdict.reason is GateReason.BAD_NUMBER:
        assert any(not option.close_s >= 0 or not 0 <= option.toggle_s < math.inf for option in options)
    else:
        assert verdict.workers == totals.index(min(totals))
        assert verdict.passed == (verdict.workers > 0)


@given(
    use_s=SECONDS, more_s=SECONDS, start_s=SECONDS, old_s=SECONDS, new_s=st.floats(1, 1e5), cost_s=SECONDS, less=SHARES
)
def test_what_is_worth_a_lease_is_worth_a_longer_one(
    use_s: float, more_s: float, start_s: float, old_s: float, new_s: float, cost_s: float, less: float
) -> None:
    def verdict(expected: float, cost: float) -> bool:
        return expansion(expected_use_s=expected, start_s=start_s, old_s=old_s, new_s=new_s, finalise_s=cost).passed

    if verdict(use_s, cost_s):
        assert verdict(use_s + more_s, cost_s)
        assert verdict(use_s, cost_s * less)
        assert use_s > start_s
        assert new_s < old_s


@given(now_s=ANY, close_s=ANY, error_s=ANY, return_s=ANY, less=SHARES)
def test_the_less_is_known_the_earlier_gpus_go_back(
    now_s: float, close_s: float, error_s: float, return_s: float, less: float
) -> None:
    by_s = return_by_s(now_s, close_s, error_s, return_s)
    verdict = return_due(now_s=now_s, close_s=close_s, error_s=error_s, return_s=return_s)
    if math.isnan(by_s):
        assert verdict.reason is GateReason.BAD_NUMBER
    else:
        assert now_s <= by_s <= now_s + close_s
        assert verdict.passed == (by_s == now_s)
        assert by_s <= return_by_s(now_s, close_s, error_s * less, return_s)


POOLS = st.lists(
    st.builds(
        Pool,
        role=st.sampled_from([Role.PREFILL, Role.DECODE, Role.COLOCATED]),
        workers=st.integers(1, 3),
        tp=st.sampled_from([1, 2]),
    ),
    max_size=3,
    unique_by=lambda pool: pool.role,
)


@given(pools=POOLS, others=POOLS)
def test_kinds_are_none_for_equal_shapes_alone_and_the_same_both_ways(pools: list[Pool], others: list[Pool]) -> None:
    old, new = Shape(tuple(pools)), Shape(tuple(others))
    kind, back = change_kind(old, new), change_kind(new, old)
    assert (kind is ChangeKind.NONE) == (set(pools) == set(others))
    assert back is kind


SPANS = st.lists(st.builds(LeaseSpan, duration_s=st.integers(0, 50).map(float), ended=st.booleans()), max_size=12)


@given(spans=SPANS, age_s=st.integers(0, 50), horizon_s=st.floats(0, 100), prior_s=st.floats(0.5, 1e3), data=st.data())
def test_an_outlook_is_a_falling_survival_and_its_area(
    spans: list[LeaseSpan], age_s: int, horizon_s: float, prior_s: float, data: st.DataObject
) -> None:
    history = LeaseHistory(spans=tuple(spans))
    shuffled = LeaseHistory(spans=tuple(data.draw(st.permutations(spans))))
    got = outlook(history, age_s=age_s, horizon_s=horizon_s, prior_mean_s=prior_s)
    half = outlook(history, age_s=age_s, horizon_s=horizon_s / 2, prior_mean_s=prior_s)
    assert got == outlook(shuffled, age_s=age_s, horizon_s=horizon_s, prior_mean_s=prior_s)
    assert 0 <= got.survival <= half.survival <= 1
    # Between the area of a curve that falls at once to where it ends, and of one that falls only then.
    rest_s = horizon_s / 2
    assert half.expected_s + got.survival * rest_s <= got.expected_s + 1e-9
    assert got.expected_s <= half.expected_s + half.survival * rest_s + 1e-9
    assert expected_use_s(history, age_s, horizon_s, prior_s, leaves_in_s=horizon_s / 2) == half.expected_s


STEPS_SEEN = st.lists(st.tuples(st.booleans(), ANY), max_size=80)


def toggled(prior_s: float, seen: list[tuple[bool, float]]) -> ToggleEstimate:
    estimate = ToggleEstimate(prior_s=prior_s)
    for borrowed, overhead_s in seen:
        estimate = observe(estimate, borrowed, overhead_s)
    return estimate


@given(prior_s=SECONDS, seen=STEPS_SEEN)
def test_an_estimate_lies_between_what_was_seen_and_the_prior(prior_s: float, seen: list[tuple[bool, float]]) -> None:
    estimate = toggled(prior_s, [step for step in seen if not step[1] > 1e300])
    most_s: float = prior_s
    for borrowed, average in ((True, estimate.borrowing), (False, estimate.resting)):
        taught = [value for kind, value in seen if kind is borrowed and 0 <= value <= 1e300]
        assert 0 <= average.observations <= min(len(taught), MOST_STEPS)
        assert average.mean_s <= max(taught, default=0.0) * (1 + 1e-9)
        most_s = max(most_s, average.mean_s)
    assert 0 <= toggle_s(estimate, 1) <= most_s * (1 + 1e-9)


@given(prior_s=SECONDS, seen=STEPS_SEEN, borrowed=st.booleans(), steps=st.integers(1, 400), overhead_s=SECONDS)
def test_while_one_kind_is_seen_the_estimate_goes_to_the_prior(
    prior_s: float, seen: list[tuple[bool, float]], borrowed: bool, steps: int, overhead_s: float
) -> None:
    before = toggled(prior_s, [(kind, value) for kind, value in seen if value <= 1e5])
    after = before
    for _ in range(steps):
        after = observe(after, borrowed, overhead_s)
    other, was = (after.resting, before.resting) if borrowed else (after.borrowing, before.borrowing)
    assert other.mean_s == was.mean_s
    left = MOST_STEPS * 2 ** (-steps / HALF_LIFE_STEPS)
    assert after.observations <= left * (1 + 1e-9)
    learned_s = max(0.0, after.borrowing.mean_s - after.resting.mean_s)
    share = left / (left + PRIOR_STEPS) * (1 + 1e-9)
    assert abs(toggle_s(after, 1) - prior_s) <= share * abs(learned_s - prior_s) + 1e-9 * prior_s


ODD = st.floats(0, 1e300)
LEFT = st.integers(0, 400)


def share_after(steps: int) -> float:
    """What one step with borrowing counts as after so many without: 2^(-steps / 30) of one, beside a prior of two."""
    left = 2 ** (-steps / 30)
    return left / (left + 2) * (1 + 1e-9)


@given(prior_s=st.floats(1e-3, 1e5), rest=st.floats(0, 4), before=st.integers(0, 50), odd_s=ODD, steps=LEFT)
def test_whatever_one_step_with_borrowing_took_the_estimate_goes_back_to_the_prior(
    prior_s: float, rest: float, before: int, odd_s: float, steps: int
) -> None:
    # Steps without it take up to four priors: known exactly. So the odd one counts as 4 (r + prior) at most.
    rest_s = rest * prior_s
    estimate = toggled(prior_s, [(False, rest_s)] * before + [(True, odd_s)] + [(False, rest_s)] * steps)
    assert abs(toggle_s(estimate, 1) - prior_s) <= share_after(steps) * 3 * (prior_s + rest_s) + 1e-9 * prior_s


@given(prior_s=st.floats(1e-3, 1e5), rest=st.floats(0, 4), first=st.booleans(), odd_s=ODD, too_s=ODD, steps=LEFT)
def test_so_it_does_where_the_first_steps_of_both_kinds_were_odd(
    prior_s: float, rest: float, first: bool, odd_s: float, too_s: float, steps: int
) -> None:
    # The first counts as 4 priors at most, the other as 4 (4 + 1).
    estimate = toggled(prior_s, [(first, odd_s), (not first, too_s)] + [(False, rest * prior_s)] * steps)
    distance = abs(toggle_s(estimate, 1) - prior_s) / prior_s
    assert distance <= share_after(steps) * 19 + 1e-9
    if steps >= 100:
        assert distance < 1  # at most twice what it was thought to cost


@given(
    kinds=st.lists(st.booleans(), max_size=80), overhead_s=st.floats(1e-3, 1e5), cost_s=SECONDS, times=st.floats(1, 9)
)
def test_means_are_unbiased_in_whatever_order_kinds_come(
    kinds: list[bool], overhead_s: float, cost_s: float, times: float
) -> None:
    # Of a prior not below a quarter of what is seen; a lower one bounds the first step.
    prior_s = times * (overhead_s + cost_s) / 4
    estimate = toggled(prior_s, [(kind, overhead_s + cost_s if kind else overhead_s) for kind in kinds])
    if estimate.borrowing.observations:
        assert math.isclose(estimate.borrowing.mean_s, overhead_s + cost_s, rel_tol=1e-9)
    if estimate.resting.observations:
        assert math.isclose(estimate.resting.mean_s, overhead_s, rel_tol=1e-9)
