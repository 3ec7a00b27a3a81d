"""Plans: order, side by side, all or nothing, called off, and what others see of them; times as `_stage` has them."""

from __future__ import annotations

import asyncio

import pytest

from pearl.core.actions import Admit, Drain, GiveBack, GroupKind, LoadWeights, SetRole, Sleep, Stop, Wake
from pearl.core.state import Activity, GpuOwner, Role, WorkerRemoved
from pearl.errors import RunFailed
from tests.unit.elastic._stage import (
    LEND_S,
    LOAD_S,
    ROLE_S,
    SLEEP_S,
    START_S,
    TIMEOUT_S,
    WAKE_S,
    C,
    D,
    P,
    Stage,
    expand,
    g,
    now_s,
    on_stage,
    start,
    turn,
    w,
)

UP_S = START_S + LOAD_S


def test_steps_that_need_not_wait_for_each_other_do_not() -> None:
    async def test(stage: Stage) -> None:
        stage.fleet.delay_next_start(w(4), 15.0)
        stage.carry_out(expand(0, [start(3, "r0"), start(4, "r1")]))
        assert stage.executor.busy
        await asyncio.sleep(15.0 + LOAD_S - 0.5)
        assert stage.workers.router.workers == ()  # all at once
        await asyncio.sleep(1.0)
        assert stage.workers.router.workers == (3, 4)
        assert stage.ends() == [(15.0 + LOAD_S, [("expand", True, False)])]
        assert not stage.executor.busy
        assert stage.outcomes[0][1].done

    on_stage(test)


def test_a_group_waits_for_the_steps_of_others_that_it_names() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        began_s = now_s()
        stage.carry_out(
            (GroupKind.CLEAR, [(Drain(worker=w(3)), ()), (Stop(worker=w(3)), (0,))]),
            (
                GroupKind.EXPAND,
                [
                    (start(4, "r0", "r1"), (1,)),
                    (LoadWeights(worker=w(4)), (2,)),
                    (Admit(workers=(w(4),)), (3,)),
                ],
            ),
        )
        await asyncio.sleep(60)
        assert stage.ends() == [(began_s + UP_S, [("clear", True, False), ("expand", True, False)])]
        assert stage.activity() == {1: "inactive", 2: "inactive", 4: "active"}

    on_stage(test)


def test_the_first_failure_ends_a_group_that_brings_workers_and_takes_it_back() -> None:
    async def test(stage: Stage) -> None:
        stage.fleet.fail_next_start(w(3), "no driver")
        stage.fleet.delay_next_start(w(4), 90.0)
        stage.carry_out(expand(0, [start(3, "r0"), start(4, "r1")]))
        await asyncio.sleep(30)
        assert stage.ends() == [(START_S, [("expand", False, False)])]
        assert stage.outcomes[0][1].groups[0].why_not == "worker 3: worker 3: no driver"
        assert stage.activity() == {1: "inactive", 2: "inactive"}
        await asyncio.sleep(100)
        assert sorted(stage.fleet.engines) == [1, 2]

    on_stage(test)


def test_a_wake_is_taken_back_to_sleep() -> None:
    async def test(stage: Stage) -> None:
        stage.fleet.fail_next_start(w(3))
        stage.carry_out(expand(0, [Wake(worker=w(1), role=P), start(3, "r0")]))
        await asyncio.sleep(60)
        # Its role is changed back, then it sleeps.
        assert stage.ends() == [(START_S + ROLE_S + SLEEP_S, [("expand", False, False)])]
        assert stage.activity() == {1: "inactive", 2: "inactive"}
        assert stage.workers.state.snapshot.workers[w(1)].role is C
        assert await stage.hands.reclaim() is None
        assert stage.trainer.lent == set()

    on_stage(test)


def test_a_refused_role_is_taken_back_and_the_worker_serves_on() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0", P)
        stage.fleet.fail_next_role(w(3))
        stage.carry_out(turn(0, 3, D))
        await asyncio.sleep(30)
        assert [groups for _, groups in stage.ends()] == [[("roles", False, False)]]
        assert (stage.activity()[3], stage.workers.router.role(w(3))) == ("active", P)

    on_stage(test)


def test_one_group_does_not_wait_for_another_to_be_taken_back() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0", P)
        stage.fleet.fail_next_role(w(3))
        stage.fleet.delay_next_start(w(4), 80.0)
        stage.carry_out(expand(0, [start(4, "r1")]), turn(3, 3, D))
        await asyncio.sleep(10)
        assert stage.activity()[3] == "active"
        assert stage.executor.busy

    on_stage(test)


def test_what_is_to_leave_is_seen_off_whatever_fails() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Wake(worker=w(1), role=C), LoadWeights(worker=w(1)), Admit(workers=(w(1),)))
        await stage.do(Wake(worker=w(2), role=C), LoadWeights(worker=w(2)), Admit(workers=(w(2),)))
        stage.fleet.hang_next(w(1))
        began_s = now_s()
        stage.carry_out(
            (
                GroupKind.RETURN,
                [
                    (Drain(worker=w(1)), ()),
                    (Drain(worker=w(2)), ()),
                    (Sleep(worker=w(1)), (0,)),
                    (Sleep(worker=w(2)), (1,)),
                    (GiveBack(gpus=g("t0", "t1"), to=GpuOwner.TRAINING), (2, 3)),
                ],
            )
        )
        await asyncio.sleep(200)
        assert stage.ends() == [(began_s + TIMEOUT_S + LEND_S, [("return", True, False)])]
        assert stage.activity() == {2: "inactive"}  # the one that hung was ended
        assert stage.trainer.lent == set()

    on_stage(test)


def test_a_group_that_waits_for_what_failed_does_nothing() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        stage.fleet.fail_next_start(w(4))
        stage.carry_out(
            expand(0, [start(4, "r1")]), (GroupKind.SURPLUS, [(Drain(worker=w(3)), (2,)), (Stop(worker=w(3)), (3,))])
        )
        await asyncio.sleep(60)
        assert [groups for _, groups in stage.ends()] == [[("expand", False, False), ("surplus", False, False)]]
        assert stage.outcomes[0][1].groups[1].why_not == ""
        assert stage.activity()[3] == "active"

    on_stage(test)


@pytest.mark.parametrize("at_s", [0.0, 0.5, 2.0, 4.5, 6.0])
def test_a_wake_that_is_called_off_at_any_time_is_taken_back(at_s: float) -> None:
    """Not begun, while its GPUs are lent, while it wakes, while it takes its role, while it loads."""

    async def test(stage: Stage) -> None:
        stage.carry_out(expand(0, [Wake(worker=w(1), role=P)]))
        if at_s:
            await asyncio.sleep(at_s)
        stage.executor.call_off([w(1)])
        await asyncio.sleep(60)
        assert [groups for _, groups in stage.ends()] == [[("expand", False, True)]]
        assert stage.outcomes[0][1].called_off
        assert stage.activity() == {1: "inactive", 2: "inactive"}
        assert await stage.hands.reclaim() is None
        assert stage.trainer.lent == set()
        assert stage.workers.router.workers == ()

    assert LEND_S + WAKE_S + ROLE_S + LOAD_S > 6.0
    on_stage(test)


@pytest.mark.parametrize("at_s", [0.0, 5.0, START_S, START_S + 2])
def test_a_start_that_is_called_off_at_any_time_leaves_no_process(at_s: float) -> None:
    async def test(stage: Stage) -> None:
        stage.carry_out(expand(0, [start(3, "r0"), start(4, "r1")]))
        if at_s:
            await asyncio.sleep(at_s)
        stage.executor.call_off([w(3)])
        await asyncio.sleep(60)
        assert stage.activity() == {1: "inactive", 2: "inactive"}
        assert sorted(stage.fleet.engines) == [1, 2]

    on_stage(test)


def test_a_return_is_never_called_off_and_others_go_on() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Wake(worker=w(1), role=C), LoadWeights(worker=w(1)), Admit(workers=(w(1),)))
        stage.carry_out((GroupKind.RETURN, [(Drain(worker=w(1)), ()), (Sleep(worker=w(1)), (0,))]))
        stage.carry_out(expand(0, [start(3, "r0")]))
        stage.executor.call_off([w(1), w(2)])
        await asyncio.sleep(60)
        assert [groups for _, groups in stage.ends()] == [[("return", True, False)], [("expand", True, False)]]

    on_stage(test)


def test_a_departure_for_others_sake_is_called_off_before_it_begins_only() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        surplus = (GroupKind.SURPLUS, [(Drain(worker=w(3)), (2,)), (Stop(worker=w(3)), (3,))])
        stage.carry_out(expand(0, [start(4, "r1")]), surplus)
        await asyncio.sleep(5)
        stage.executor.call_off([w(3)])
        await asyncio.sleep(60)
        assert [groups for _, groups in stage.ends()] == [[("expand", True, False), ("surplus", False, True)]]
        assert stage.activity() == {1: "inactive", 2: "inactive", 3: "active", 4: "active"}

    on_stage(test)


def test_what_a_plan_has_yet_to_do_is_in_transition_for_others() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        state = stage.workers.state.snapshot
        assert stage.executor.ahead(state) is state
        surplus = (GroupKind.SURPLUS, [(Drain(worker=w(3)), (4,)), (Stop(worker=w(3)), (5,))])
        stage.carry_out(expand(0, [start(4, "r1"), Wake(worker=w(1), role=D)]), surplus)
        assert stage.workers.state.snapshot is state  # nothing has begun
        ahead = stage.executor.ahead(state)
        assert {slot: worker.activity for slot, worker in ahead.workers.items()} == {
            0: Activity.INACTIVE,
            1: Activity.TRANSITIONING,
            2: Activity.INACTIVE,
            3: Activity.TRANSITIONING,
            4: Activity.TRANSITIONING,
        }
        assert (ahead.workers[w(4)].gpus, ahead.workers[w(4)].role) == (("r1",), C)
        await asyncio.sleep(60)
        state = stage.workers.state.snapshot
        assert stage.executor.ahead(state) is state
        assert stage.activity() == {1: "active", 2: "inactive", 4: "active"}

    on_stage(test)


def test_a_lost_worker_calls_off_what_brings_it_and_its_successor_is_left_alone() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0", P)
        await stage.serve(4, "r1", P)
        stage.fleet.role_s = 20.0
        stage.carry_out(turn(0, 3, D), turn(3, 4, D))
        await asyncio.sleep(1)
        # As the scheduler does it.
        stage.submit(WorkerRemoved(worker=w(3)))
        await stage.hands.end(w(3))
        stage.workers.router.leave(w(3))
        stage.executor.forget([w(3)])
        stage.carry_out(expand(0, [start(3, "r0", role=C)]))
        await asyncio.sleep(200)
        assert sorted(groups[0] for _, groups in stage.ends()) == [("expand", True, False), ("roles", False, True)]
        assert (stage.activity()[3], stage.workers.router.role(w(3))) == ("active", C)
        assert stage.workers.router.role(w(4)) is D

    on_stage(test)


def test_who_is_lost_on_the_way_out_has_left() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        stage.carry_out(
            expand(0, [start(4, "r1")]), (GroupKind.SURPLUS, [(Drain(worker=w(3)), (2,)), (Stop(worker=w(3)), (3,))])
        )
        stage.fleet.kill(w(3))
        stage.workers.router.leave(w(3))
        stage.submit(WorkerRemoved(worker=w(3)))
        # Not called off: that would be for the sake of others.
        for running in stage.executor._groups:
            running.gone[w(3)] = None
        await asyncio.sleep(60)
        assert [groups for _, groups in stage.ends()] == [[("expand", True, False), ("surplus", True, False)]]

    on_stage(test)


def test_stopped_in_the_middle_it_does_nothing_more() -> None:
    async def test(stage: Stage) -> None:
        stage.carry_out(expand(0, [start(3, "r0")]))
        await asyncio.sleep(5)
        await stage.executor.stop()
        assert now_s() == 5
        stage.carry_out(expand(0, [start(4, "r1")]))
        await asyncio.sleep(60)
        assert (stage.ends(), sorted(stage.fleet.engines), stage.executor.busy) == ([], [1, 2], False)
        assert stage.activity() == {1: "inactive", 2: "inactive", 3: "transitioning"}  # for `Workers.stop` to end

    on_stage(test)


def test_a_run_that_cannot_go_on_ends() -> None:
    async def test(stage: Stage) -> None:
        stage.workers.max_restarts = 0
        stage.hands.lost[w(3)] = None
        stage.carry_out(expand(0, [start(3, "r0")]))
        await asyncio.sleep(60)

    with pytest.raises(RunFailed, match=r"cluster\.max_worker_restarts = 0"):
        on_stage(test)


def test_roles_change_one_after_the_other_where_they_must() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0", P)
        await stage.serve(4, "r1", D)
        began_s = now_s()
        second = [
            (Drain(worker=w(4)), (2,)),
            (SetRole(worker=w(4), role=P), (3,)),
            (Admit(workers=(w(4),)), (4,)),
        ]
        stage.carry_out(turn(0, 3, D), (GroupKind.ROLES, second))
        await asyncio.sleep(60)
        assert stage.ends()[0][0] == began_s + 2 * ROLE_S
        roles = {slot: stage.workers.router.role(slot) for slot in stage.workers.router.workers}
        assert roles == {3: Role.DECODE, 4: Role.PREFILL}

    on_stage(test)
