"""Closed forms of iteration times, against `IterationTimes.seconds` summed one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.profile import IterationTimes
from pearl.sim.iterations import DecodeCurve, IterationCosts

RELATIVE = 1e-9


@st.composite
def tables(draw: st.DrawFn) -> IterationTimes:
    """Tables of any shape, falling and level stretches included."""

    def axis(first: int, points: int) -> tuple[int, ...]:
        steps = draw(st.lists(st.integers(1, 40), min_size=points, max_size=points))
        values = [first]
        for step in steps:
            values.append(values[-1] + step)
        return tuple(values)

    prefill, decoding = axis(0, 1), axis(0, draw(st.integers(1, 3)))
    context = axis(draw(st.integers(1, 9)), draw(st.integers(0, 4)))
    times = st.floats(0.001, 1.0)
    cells = draw(
        st.lists(
            times,
            min_size=len(prefill) * len(decoding) * len(context),
            max_size=len(prefill) * len(decoding) * len(context),
        )
    )
    values = iter(cells)
    grid = tuple(tuple(tuple(next(values) for _ in context) for _ in decoding) for _ in prefill)
    return IterationTimes(prefill_tokens=prefill, decoding=decoding, context_tokens=context, cells_s=grid)


@given(tables(), st.integers(1, 150), st.floats(0.5, 200), st.integers(0, 120))
def test_a_run_of_iterations_takes_what_they_take_one_by_one(
    times: IterationTimes, decoding: int, context: float, iterations: int
) -> None:
    curve = IterationCosts(times).curve(decoding)
    each = [times.seconds(0, decoding, context + n) for n in range(iterations)]
    assert [curve.seconds(context + n) for n in range(iterations)] == pytest.approx(each, rel=RELATIVE)
    assert curve.span_s(context, iterations) == pytest.approx(sum(each), rel=RELATIVE)


@given(tables(), st.integers(1, 150), st.floats(0.5, 200), st.integers(1, 120), st.floats(0, 1.2))
def test_what_is_over_by_a_time_is_counted(
    times: IterationTimes, decoding: int, context: float, iterations: int, part: float
) -> None:
    curve = IterationCosts(times).curve(decoding)
    budget_s = part * curve.span_s(context, iterations)
    ends, now_s = [], 0.0
    for n in range(iterations):
        now_s += times.seconds(0, decoding, context + n)
        ends.append(now_s)
    over = curve.within(context, iterations, budget_s)
    slack_s = RELATIVE * now_s
    assert sum(end <= budget_s - slack_s for end in ends) <= over <= sum(end <= budget_s + slack_s for end in ends)


def test_by_hand() -> None:
    # 10 ms at context 100, 30 ms at 300, as steep beyond, level before.
    curve = DecodeCurve([100.0, 300.0], [0.010, 0.030], 0.0001)
    assert curve.seconds(50) == 0.010
    assert curve.seconds(400) == pytest.approx(0.040)
    # Contexts 98 .. 102: 10, 10, 10, 10.1, 10.2 ms.
    assert curve.span_s(98, 5) == pytest.approx(0.0503)
    assert [curve.within(98, 5, ms / 1000) for ms in (0, 9.9, 10.1, 40.0, 40.2, 50.2, 50.4, 1000)] == [
        0, 0, 1, 3, 4, 4, 5, 5,
    ]  # fmt: skip
    assert curve.within(98, 0, 1.0) == 0
    assert curve.within(98, 5, -1.0) == 0


def test_iterations_that_take_no_time_are_over_at_once() -> None:
    curve = DecodeCurve([1.0], [0.0], 0.0)
    assert (curve.span_s(5, 10**9), curve.within(5, 10**9, 0.0)) == (0.0, 10**9)


def test_curves_are_made_once() -> None:
    times = IterationTimes(prefill_tokens=(0, 1), decoding=(0, 1), context_tokens=(1,), cells_s=(((0.1,), (0.2,)),) * 2)
    costs = IterationCosts(times)
    assert costs.curve(3) is costs.curve(3)
    # The slope from 0 to 1 sequences goes on: 0.1 + 3 * 0.1.
    assert costs.curve(3).seconds(7) == pytest.approx(0.4)
    assert costs.seconds(1, 1, 7) == times.seconds(1, 1, 7)
