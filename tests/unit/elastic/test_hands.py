"""Each action against fakes, and what the state says of it; times as `_stage` has them."""

from __future__ import annotations

import asyncio

import pytest

from pearl.core.actions import Admit, Drain, GiveBack, LoadWeights, SetRole, Sleep, Stop, Wake
from pearl.core.state import Activity, GpuOwner, GpusLeft, Role, WorkerRemoved
from pearl.elastic.hands import START_MARGIN_S, ActionFailed, NothingDone
from pearl.errors import RunFailed
from pearl.records.ids import GpuId
from tests.unit.elastic._stage import (
    LEND_S,
    LOAD_S,
    ROLE_S,
    SLEEP_S,
    START_S,
    TIMEOUT_S,
    WAKE_S,
    D,
    P,
    Stage,
    g,
    now_s,
    on_stage,
    start,
    w,
)


def test_a_worker_starts_loads_and_serves() -> None:
    async def test(stage: Stage) -> None:
        began = asyncio.ensure_future(stage.do(start(3, "r0", role=D)))
        await asyncio.sleep(1)
        assert stage.activity()[3] == "transitioning"
        await began
        assert (now_s(), stage.workers.router.workers) == (START_S, ())
        await stage.do(LoadWeights(worker=w(3)), Admit(workers=(w(3),)))
        assert now_s() == START_S + LOAD_S  # admission finds the newest weights there
        assert (stage.activity()[3], stage.workers.router.role(w(3))) == ("active", D)

    on_stage(test)


def test_workers_are_admitted_with_the_newest_weights_all_or_none() -> None:
    async def test(stage: Stage) -> None:
        await asyncio.gather(stage.do(start(3, "r0")), stage.do(start(4, "r1")))
        await stage.do(LoadWeights(worker=w(3)))
        stage.fleet.kill(w(4))
        with pytest.raises(ActionFailed, match="got worker 4, want one of"):
            await stage.do(Admit(workers=(w(3), w(4))))
        assert stage.workers.router.workers == ()
        assert stage.activity()[3] == "transitioning"

    on_stage(test)


def test_one_that_the_state_lost_while_it_loaded_takes_the_others_out_again() -> None:
    async def test(stage: Stage) -> None:
        await asyncio.gather(stage.do(start(3, "r0")), stage.do(start(4, "r1")))
        admitting = asyncio.ensure_future(stage.do(Admit(workers=(w(3), w(4)))))
        await asyncio.sleep(LOAD_S / 2)
        stage.submit(WorkerRemoved(worker=w(4)))
        with pytest.raises(ActionFailed, match="worker 4: lost before it served"):
            await admitting
        assert stage.workers.router.workers == ()

    on_stage(test)


def test_a_start_that_fails_is_to_be_taken_back() -> None:
    async def test(stage: Stage) -> None:
        stage.fleet.fail_next_start(w(3), "no driver")
        with pytest.raises(ActionFailed, match="worker 3: no driver"):
            await stage.do(start(3, "r0"))
        assert stage.activity()[3] == "transitioning"
        await stage.do(Stop(worker=w(3)))
        assert 3 not in stage.activity()

    on_stage(test)


def test_a_fleet_that_never_answers_a_start_is_not_waited_for() -> None:
    async def test(stage: Stage) -> None:
        async def hang(*_: object) -> None:
            await asyncio.get_running_loop().create_future()

        stage.fleet.start = hang  # type: ignore[method-assign,assignment]
        with pytest.raises(ActionFailed, match="worker 3: start: no answer"):
            await stage.do(start(3, "r0"))
        assert now_s() == 100.0 + START_MARGIN_S

    on_stage(test)


@pytest.mark.parametrize("slot_gpu", [(1, "t0"), (3, "gone")])
def test_a_slot_that_is_taken_or_has_no_gpus_cannot_be_started(slot_gpu: tuple[int, str]) -> None:
    async def test(stage: Stage) -> None:
        with pytest.raises(NothingDone):
            await stage.do(start(*slot_gpu))
        assert len(stage.fleet.starts) == 2  # the two overlap workers

    on_stage(test)


def test_a_start_waits_for_what_ends_on_its_gpus() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        stage.submit(WorkerRemoved(worker=w(3)))
        stop = stage.fleet.stop

        async def slow(*args: object) -> None:
            await asyncio.sleep(7)
            await stop([w(3)], 0.0)

        stage.fleet.stop = slow  # type: ignore[method-assign,assignment]
        stage.hands.end(w(3))
        assert stage.hands.end(w(3)) is stage.hands.end(w(3))
        assert stage.hands.is_ending(g("r0", "r1"))
        assert not stage.hands.is_ending(g("t0"))
        began_s = now_s()
        await stage.do(start(4, "r0"))
        assert now_s() == began_s + 7 + START_S

    on_stage(test)


def test_what_was_lost_is_restarted_so_many_times() -> None:
    async def test(stage: Stage) -> None:
        for restarts in (1, 2):
            stage.hands.lost[w(3)] = None
            await stage.serve(3, "r0")
            assert (stage.workers.restarts, stage.hands.lost) == (restarts, {})
            await stage.do(Drain(worker=w(3)), Stop(worker=w(3)))
        await stage.serve(3, "r0")  # not lost: no restart
        await stage.do(Drain(worker=w(3)), Stop(worker=w(3)))
        stage.hands.lost[w(3)] = None
        with pytest.raises(RunFailed, match=r"worker 3: lost, and all cluster\.max_worker_restarts = 2 are used up"):
            await stage.do(start(3, "r0"))

    on_stage(test)


def test_a_worker_drains_and_ends() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")
        await stage.do(Drain(worker=w(3)))
        assert (stage.activity()[3], stage.workers.router.workers) == ("transitioning", (w(3),))
        await stage.do(Stop(worker=w(3)))
        assert 3 not in stage.activity()
        assert stage.workers.router.workers == ()
        assert w(3) not in stage.fleet.engines
        assert stage.workers.router.counts.worker_losses == 0

    on_stage(test)


def test_who_is_gone_needs_nothing_to_leave() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Drain(worker=w(7)), Stop(worker=w(7)), Sleep(worker=w(7)))
        for action in (SetRole(worker=w(7), role=D), Wake(worker=w(7), role=D), LoadWeights(worker=w(7))):
            with pytest.raises(NothingDone, match="worker 7: it is gone"):
                await stage.do(action)
        with pytest.raises(NothingDone):
            await stage.do(Admit(workers=(w(7),)))

    on_stage(test)


def test_one_that_does_not_end_is_not_waited_for() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0")

        async def hang(*_: object) -> None:
            await asyncio.get_running_loop().create_future()

        stage.fleet.stop = hang  # type: ignore[method-assign,assignment]
        began_s = now_s()
        await stage.do(Drain(worker=w(3)), Stop(worker=w(3)))
        assert now_s() == began_s + TIMEOUT_S
        assert 3 not in stage.activity()

    on_stage(test)


def test_an_overlap_worker_wakes_on_lent_gpus_and_sleeps_again() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Wake(worker=w(1), role=P))
        assert now_s() == LEND_S + WAKE_S + ROLE_S
        assert (stage.activity()[1], stage.trainer.lent, list(stage.loans.lent)) == ("transitioning", {"t0"}, ["t0"])
        await stage.do(LoadWeights(worker=w(1)), Admit(workers=(w(1),)))
        assert stage.workers.router.role(w(1)) is P
        await stage.do(Drain(worker=w(1)), Sleep(worker=w(1)), GiveBack(gpus=g("t0"), to=GpuOwner.TRAINING))
        assert (stage.activity()[1], stage.trainer.lent) == ("inactive", set())
        assert now_s() == LEND_S + WAKE_S + ROLE_S + LOAD_S + SLEEP_S + LEND_S

    on_stage(test)


def test_nobody_wakes_twice_or_while_training() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Wake(worker=w(1), role=P))
        with pytest.raises(NothingDone, match="worker 1: it is transitioning, want it asleep"):
            await stage.do(Wake(worker=w(1), role=P))
        stage.loans.is_open = False
        with pytest.raises(ActionFailed, match="training needs its GPUs"):
            await stage.do(Wake(worker=w(2), role=P))
        await stage.do(Sleep(worker=w(2)))  # as taking back would
        assert stage.activity() == {1: "transitioning", 2: "inactive"}

    on_stage(test)


@pytest.mark.parametrize("action", [Wake(worker=w(1), role=D), SetRole(worker=w(1), role=D)])
def test_a_worker_that_does_not_answer_is_lost(action: Wake | SetRole) -> None:
    async def test(stage: Stage) -> None:
        stage.fleet.hang_next(w(1))
        with pytest.raises(ActionFailed, match=f"worker 1: .*no answer within {TIMEOUT_S:g} s"):
            await stage.do(action)
        assert stage.lost == [1]

    on_stage(test)


def test_one_that_does_not_fall_asleep_is_ended() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Wake(worker=w(1), role=D))
        stage.fleet.hang_next(w(1))
        await stage.do(Sleep(worker=w(1)))
        assert stage.activity() == {2: "inactive"}
        assert w(1) not in stage.fleet.engines
        assert await stage.hands.reclaim() is None
        assert stage.trainer.lent == set()

    on_stage(test)


def test_a_role_that_is_refused_stays() -> None:
    async def test(stage: Stage) -> None:
        await stage.serve(3, "r0", P)
        stage.fleet.fail_next_role(w(3), "no graphs")
        await stage.do(Drain(worker=w(3)))
        with pytest.raises(ActionFailed, match="no graphs"):
            await stage.do(SetRole(worker=w(3), role=D))
        await stage.do(Admit(workers=(w(3),)))
        assert (stage.workers.router.role(w(3)), stage.activity()[3], stage.lost) == (P, "active", [])
        await stage.do(Drain(worker=w(3)), SetRole(worker=w(3), role=D), Admit(workers=(w(3),)))
        assert stage.workers.router.role(w(3)) is D
        assert len(stage.fleet.past_engines) == 3  # the process is the same

    on_stage(test)


def test_external_gpus_go_back_to_their_source_and_out_of_the_state() -> None:
    async def test(stage: Stage) -> None:
        given: list[tuple[GpuId, ...]] = []

        async def note(gpus: tuple[GpuId, ...]) -> None:
            given.append(gpus)

        stage.source.give_back = note  # type: ignore[method-assign,assignment]
        stage.submit(GpusLeft(gpus=g("e1")))
        await stage.do(GiveBack(gpus=g("e0", "e1"), to=GpuOwner.EXTERNAL))
        await stage.do(GiveBack(gpus=g("e0", "e1"), to=GpuOwner.EXTERNAL))
        assert given == [("e0",)]
        assert not [gpu for gpu in stage.workers.state.snapshot.gpus if gpu.startswith("e")]

    on_stage(test)


def test_only_what_nobody_uses_is_reclaimed() -> None:
    async def test(stage: Stage) -> None:
        await stage.do(Wake(worker=w(1), role=D), Wake(worker=w(2), role=D), Sleep(worker=w(2)))
        assert await stage.hands.reclaim() is None
        assert stage.trainer.lent == {"t0"}
        assert stage.workers.state.snapshot.workers[w(1)].activity is Activity.TRANSITIONING

    on_stage(test)


def test_a_worker_on_training_gpus_starts_on_a_loan() -> None:
    async def test(stage: Stage) -> None:
        stage.submit(WorkerRemoved(worker=w(1)))
        await stage.fleet.stop([w(1)], 0.0)
        await stage.do(start(1, "t0", role=Role.COLOCATED))
        assert stage.trainer.lent == {"t0"}

    on_stage(test)


def test_what_is_being_lent_is_reclaimed_too() -> None:
    """A wake that is given up in the middle of its loan, and the worker back asleep at once."""

    async def test(stage: Stage) -> None:
        waking = asyncio.ensure_future(stage.do(Wake(worker=w(1), role=D)))
        await asyncio.sleep(LEND_S / 2)
        waking.cancel()
        stage.fleet.sleep_s = 0.0
        await stage.do(Sleep(worker=w(1)))
        assert await stage.hands.reclaim() is None
        assert now_s() == 2 * LEND_S
        assert (stage.trainer.lent, stage.loans.lent) == (set(), {})

    on_stage(test)
