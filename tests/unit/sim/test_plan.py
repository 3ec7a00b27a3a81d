"""Plans of iterations by hand: iterations of 10 ms from 1 s on."""

from __future__ import annotations

import pytest

from pearl.sim.iterations import DecodeCurve
from pearl.sim.plan import History, Plan, slack_s

LEVEL = DecodeCurve([1.0], [0.010], 0.0)


def run(count: int = 5, scale: float = 1.0) -> Plan:
    return Plan.run(1.0, LEVEL, scale, 7.0, count)


def test_iterations_are_over_one_by_one() -> None:
    plan = run()
    assert plan.end_s == pytest.approx(1.05)
    assert [plan.done_by(at_s) for at_s in (0.5, 1.0, 1.009, 1.010, 1.049, 1.05, 9.0)] == [0, 0, 0, 1, 4, 5, 5]
    assert run(scale=2.0).done_by(1.05) == 2


@pytest.mark.parametrize(
    ("at_s", "count", "end_s"), [(1.0, 0, None), (1.001, 1, 1.01), (1.02, 2, 1.02), (1.049, 5, 1.05)]
)
def test_a_cut_leaves_what_has_begun(at_s: float, count: int, end_s: float | None) -> None:
    plan = run()
    plan.cut(at_s)
    assert plan.count == count
    if end_s is not None:
        assert plan.end_s == pytest.approx(end_s)
        assert plan.is_cut
        plan.cut(at_s + 0.001)
        assert plan.count == count


def test_a_prompt_is_computed_whole_or_not_at_all() -> None:
    plan = Plan(1.0, [], seconds=0.1, decodes=False)
    plan.cut(1.05)
    assert (plan.count, plan.is_cut, plan.done_by(1.05), plan.done_by(1.1), plan.steps_by(1.1)) == (1, True, 0, 1, 0)
    plan.stop(1.06)
    assert (plan.count, plan.end_s) == (0, 1.06)


def test_a_run_that_is_stopped_keeps_what_is_over() -> None:
    plan = run()
    plan.stop(1.027)
    assert plan.count == 2


def test_a_run_can_be_split_and_the_rest_shifted() -> None:
    plan = run()
    rest = plan.split(2)
    rest.shift(10.0)
    assert (plan.count, plan.end_s, rest.count) == (2, pytest.approx(1.02), 3)
    assert (rest.from_s, rest.end_s) == (pytest.approx(11.02), pytest.approx(11.05))
    assert rest.done_by(11.031) == 1


def test_history_tells_the_count_of_tokens_as_long_ago_as_asked_for() -> None:
    history = History(0.5)
    assert history.steps_at(1.0) == 0
    history.add(run(), 100)
    history.add(Plan(1.05, [], seconds=0.1, decodes=False), 105)
    assert [history.steps_at(at_s) for at_s in (0.5, 1.0, 1.031, 1.05, 1.2)] == [100, 100, 103, 105, 105]
    history.add(Plan(2.0, [], seconds=0.1), 105)
    # The first ones are too long ago.
    assert [history.steps_at(at_s) for at_s in (1.0, 2.05, 2.1)] == [105, 105, 106]


def test_the_slack_grows_with_the_clock() -> None:
    assert (slack_s(5.0), slack_s(1e9)) == (1e-9, pytest.approx(4.8e-7, rel=0.01))
