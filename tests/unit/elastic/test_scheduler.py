"""The scheduler between moments and plans, and as the training loop's hooks; times as `_stage` has them."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from pearl.core.decision import Moment
from pearl.core.policy import Borrow
from pearl.core.state import NoticeGiven
from pearl.elastic.scheduler import LONGEST_RETRY_S, RETRY_S
from pearl.errors import RunFailed
from pearl.records.ids import WeightVersion
from pearl.records.journal import ChangeEntry
from tests.unit.elastic._scheduling import RETURN_S, TWO, Scheduling, scheduling
from tests.unit.elastic._stage import LEND_S, LOAD_S, SLEEP_S, START_S, g, now_s, w

UP_S = START_S + LOAD_S
FOUR = {"1C": 4000.0, "2C": 2000.0, "3C": 1500.0, "4C": 1000.0}
"""With both overlap workers it is worth the while."""
ZERO = WeightVersion(0)


def overlap(one: Scheduling) -> list[str]:
    activity = one.stage.activity()
    return [activity.get(slot, "gone") for slot in (1, 2)]


def test_it_begins_with_what_the_policy_wants_and_is_then_content() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        assert (one.stage.workers.router.workers, now_s()) == ((3, 4), UP_S + 1)
        assert one.reasons() == [("started", "forced"), ("workers_changed", "best")]
        assert one.changes() == [(0, True)]
        assert one.choices()[0].plan[0][0] == "expand"
        assert [entry.number for entry in one.choices()] == [0, 1]

    scheduling(test)


def test_a_moment_that_waits_to_be_decided_is_not_told_twice_and_training_comes_first() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        before = len(one.choices())
        for moment in (Moment.GPUS_CHANGED, Moment.TICK, Moment.GPUS_CHANGED, Moment.TRAINING_BEGAN, Moment.TICK):
            one.scheduler.tell(moment)
        await asyncio.sleep(1)
        assert one.moments()[before:] == ["training_began", "gpus_changed", "tick"]

    scheduling(test)


def test_moments_at_the_same_time_do_not_plan_the_same_thing_twice() -> None:
    async def test(one: Scheduling) -> None:
        one.scheduler.tell(Moment.GPUS_CHANGED)
        one.scheduler.tell(Moment.WORKERS_CHANGED)
        await one.begin()
        first = one.choices()[:3]
        assert [bool(entry.plan) for entry in first] == [True, False, False]
        assert [entry.inputs["ahead"] for entry in first] == [[], [3, 4], [3, 4]]
        assert len(one.stage.fleet.starts) == 2 + 2

    scheduling(test)


def test_borrowed_gpus_come_back_before_training_and_are_lent_again_after_it() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        await asyncio.sleep(20)
        assert overlap(one) == ["active", "active"]
        assert one.stage.trainer.lent == {"t0", "t1"}
        began_s = now_s()
        await one.scheduler.training_begin(ZERO)
        assert now_s() == began_s + SLEEP_S + LEND_S
        assert (overlap(one), one.stage.trainer.lent) == (["inactive", "inactive"], set())
        assert one.stage.workers.state.snapshot.workers[w(0)].activity.value == "active"
        await asyncio.sleep(30)
        assert overlap(one) == ["inactive", "inactive"]
        await one.scheduler.training_finished()
        assert one.stage.workers.state.snapshot.workers[w(0)].activity.value == "inactive"
        assert one.scheduler.toggle.borrowing.mean_s == SLEEP_S + LEND_S
        await asyncio.sleep(30)
        assert overlap(one) == ["active", "active"]

    scheduling(test, FOUR, Borrow.ALWAYS)


@pytest.mark.parametrize("at_s", [0.0, 0.5, 2.0, 4.5, 6.0])
def test_training_that_begins_while_workers_wake_has_its_gpus_at_once(at_s: float) -> None:
    async def test(one: Scheduling) -> None:
        one.scheduler.begin()
        for _ in range(10):
            if "Wake 1" in str(one.choices()[-1:]):
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("nobody wakes")
        if at_s:
            await asyncio.sleep(at_s)
        began_s = now_s()
        await one.scheduler.training_begin(ZERO)
        # At the longest: a loan under way, a role taken back, sleeping, and the return of the loan.
        assert now_s() - began_s <= LEND_S + 1.0 + SLEEP_S + LEND_S
        assert (overlap(one), one.stage.trainer.lent) == (["inactive", "inactive"], set())
        await asyncio.sleep(60)
        assert one.stage.trainer.lent == set()
        assert one.stage.workers.router.workers == (3, 4)  # what else was under way went on

    scheduling(test, FOUR, Borrow.ALWAYS)


def test_training_does_not_wait_for_workers_elsewhere() -> None:
    async def test(one: Scheduling) -> None:
        one.stage.fleet.delay_next_start(w(3), 90.0)
        one.scheduler.begin()
        await asyncio.sleep(5)
        await one.scheduler.training_begin(ZERO)
        assert now_s() == 5
        await asyncio.sleep(90)
        assert one.stage.workers.router.workers == (3, 4)

    scheduling(test)


def test_gpus_that_do_not_come_back_end_the_run() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        await asyncio.sleep(20)

        async def hang(*_: object) -> None:
            await asyncio.get_running_loop().create_future()

        one.stage.trainer.reclaim_gpus = hang  # type: ignore[method-assign,assignment]
        began_s = now_s()
        with pytest.raises(RunFailed, match="training step 1: borrowed GPUs"):
            await one.scheduler.training_begin(ZERO)
        assert now_s() - began_s <= RETURN_S

    scheduling(test, FOUR, Borrow.ALWAYS)


def test_training_waits_for_the_end_of_a_process_on_its_gpus() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        await asyncio.sleep(20)
        stop = one.stage.fleet.stop

        async def slow(workers: tuple[int, ...], grace_s: float) -> None:
            await asyncio.sleep(9)
            await stop([w(slot) for slot in workers], grace_s)

        one.stage.fleet.stop = slow  # type: ignore[method-assign,assignment]
        one.stage.workers.lost(w(1), "unwell")
        began_s = now_s()
        await one.scheduler.training_begin(ZERO)
        assert now_s() == began_s + 9 + LEND_S
        assert one.stage.trainer.lent == set()

    scheduling(test, FOUR, Borrow.ALWAYS)


def test_a_plan_that_fails_is_tried_again_later_and_later() -> None:
    async def test(one: Scheduling) -> None:
        for _ in range(4):
            one.stage.fleet.fail_next_start(w(3))
        one.scheduler.begin()
        await asyncio.sleep(200)
        tried_s = one.planned_s()[:5]
        waits_s = [after - before - START_S for before, after in pairwise(tried_s)]
        assert waits_s == pytest.approx([RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S])
        await asyncio.sleep(200)
        assert one.stage.workers.router.workers == (3, 4)
        assert [done for _, done in one.changes()] == [False] * 4 + [True]
        assert one.scheduler._failures == 0

    assert LONGEST_RETRY_S > 8 * RETRY_S
    scheduling(test)


def test_a_lost_worker_is_ended_and_started_again_within_the_bound() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        for restarts in (1, 2):
            one.stage.fleet.kill(w(3))
            await asyncio.sleep(UP_S + 1)
            assert (one.stage.workers.router.workers, one.stage.workers.restarts) == ((3, 4), restarts)
        one.stage.fleet.kill(w(3))
        await asyncio.sleep(UP_S)

    with pytest.raises(RunFailed, match=r"cluster\.max_worker_restarts = 2"):
        scheduling(test)


def test_a_worker_that_dies_as_it_comes_takes_its_group_back_at_once() -> None:
    async def test(one: Scheduling) -> None:
        one.scheduler.begin()
        await asyncio.sleep(START_S + 1)
        one.stage.fleet.kill(w(3))
        await asyncio.sleep(0.5)
        assert one.changes() == [(0, False)]
        await asyncio.sleep(60)
        assert one.stage.workers.router.workers == (3, 4)

    scheduling(test)


def test_a_plan_of_which_a_part_failed_and_another_was_called_off_is_tried_again() -> None:
    """Borrowed workers wake in a group of their own; training begins meanwhile; then the start of the others fails."""

    async def test(one: Scheduling) -> None:
        one.stage.fleet.fail_next_start(w(3))
        one.scheduler.begin()
        await asyncio.sleep(2)
        assert "Wake 1" in str(one.choices()[0].plan)
        await one.scheduler.training_begin(ZERO)
        await asyncio.sleep(START_S + RETRY_S + UP_S)
        groups = one.stage.journal.of(ChangeEntry)[0].groups
        assert sorted(str(why_not) for _, _, why_not in groups) == ["called off", "worker 3: worker 3: made to fail"]
        assert one.stage.workers.router.workers == (3, 4)

    scheduling(test, FOUR, Borrow.ALWAYS)


def test_two_lost_at_once() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        one.stage.fleet.kill(w(3))
        one.stage.fleet.kill(w(4))
        await asyncio.sleep(UP_S + 1)
        assert one.stage.workers.router.workers == (3, 4)

    scheduling(test)


def test_the_bound_of_append_prefill_comes_with_the_shape() -> None:
    async def test(one: Scheduling) -> None:
        one.stage.workers.router.append_tokens = 7
        one.scheduler.begin()
        await asyncio.sleep(UP_S - 1)
        assert one.stage.workers.router.append_tokens == 7
        await asyncio.sleep(2)
        assert one.stage.workers.router.append_tokens == 256
        assert sorted(one.stage.workers.router.workers) == [3, 4]

    scheduling(test, {"1P1D append<=256": 500.0, "1P1D": 600.0, "2C": 2000.0})


def test_workers_leave_gpus_before_their_notice_falls_due() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        served = one.stage.workers.router.workers
        assert len(served) == 4
        due_s = now_s() + 100.0
        one.stage.submit(NoticeGiven(gpus=g("e0"), deadline_s=due_s, at_s=now_s()))
        one.scheduler.tell(Moment.GPUS_CHANGED)
        await asyncio.sleep(90)
        assert len(one.stage.workers.router.workers) == 4
        await asyncio.sleep(9)
        assert len(one.stage.workers.router.workers) == 3
        assert "e0" not in one.stage.workers.state.snapshot.gpus
        assert "e1" in one.stage.workers.state.snapshot.gpus

    scheduling(test, FOUR, external=True)


def test_a_notice_during_a_start_on_its_gpus_calls_it_off() -> None:
    async def test(one: Scheduling) -> None:
        one.scheduler.begin()
        await asyncio.sleep(2)
        one.stage.submit(NoticeGiven(gpus=g("e0"), deadline_s=5.0, at_s=2.0))
        one.scheduler.tell(Moment.GPUS_CHANGED)
        await asyncio.sleep(1)
        assert one.changes() == [(0, False)]
        await asyncio.sleep(40)
        on = {gpu for each in one.stage.workers.state.snapshot.active() for gpu in each.gpus}
        assert on == {"r0", "r1", "e1"}

    scheduling(test, FOUR, external=True)


def test_the_profile_and_the_cost_of_borrowing_follow_a_step() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        assert one.scheduler.situation().since_training_s is None
        await one.scheduler.training_begin(ZERO)
        assert one.scheduler.situation().training
        await asyncio.sleep(5)
        await one.scheduler.training_finished()
        await asyncio.sleep(3)
        situation = one.scheduler.situation()
        assert (situation.training, situation.since_training_s) == (False, 3.0)
        assert (situation.toggle.resting.observations, situation.toggle.borrowing.observations) == (1, 0)

    scheduling(test)


def test_it_looks_again_when_something_falls_due_but_not_all_the_time() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        before = len(one.choices())
        one.scheduler._look_again(now_s() - 5)  # overdue
        one.scheduler._look_again(now_s() + 50)  # later than the other
        await asyncio.sleep(1)
        assert len(one.choices()) == before
        await asyncio.sleep(1.5)
        assert one.moments()[before:] == ["tick"]

    scheduling(test)


def test_stopped_it_decides_nothing_more() -> None:
    async def test(one: Scheduling) -> None:
        one.scheduler.begin()
        await asyncio.sleep(5)
        one.scheduler._look_again(now_s() + 1)
        await one.scheduler.stop()
        decided = len(one.choices())
        one.scheduler.tell(Moment.TRAINING_BEGAN)
        one.scheduler._look_again(now_s() + 1)
        await asyncio.sleep(500)
        assert len(one.choices()) == decided
        assert one.changes() == []
        assert not one.stage.executor.busy

    scheduling(test, TWO)


def test_a_stop_waits_for_processes_that_end() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        stop = one.stage.fleet.stop

        async def slow(workers: tuple[int, ...], grace_s: float) -> None:
            await asyncio.sleep(9)
            await stop([w(slot) for slot in workers], grace_s)

        one.stage.fleet.stop = slow  # type: ignore[method-assign,assignment]
        one.stage.workers.lost(w(3), "unwell")
        began_s = now_s()
        await one.scheduler.stop()
        assert now_s() == began_s + 9
        assert 3 not in one.stage.fleet.engines

    scheduling(test)
