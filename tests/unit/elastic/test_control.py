"""The fleet of a run from its beginning to its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pearl.core.state import Role
from pearl.errors import RunFailed
from pearl.ports import Offered
from pearl.records.ids import LeaseId, WorkerId
from pearl.records.journal import ChangeEntry, ChoiceEntry, StateEntry
from pearl.testing.virtual_time import run_virtual
from tests.elastic_runs import Run, make, small_recipe
from tests.unit.elastic._stage import EXTERNAL


def fleet(reserved: int, training: int, **more: object) -> dict[str, object]:
    return {"reserved_gpus": reserved, "training_gpus": training, **more}


def state_events(run: Run) -> list[tuple[str, object]]:
    return [(entry.event, entry.inputs.get("worker")) for entry in run.world.journal.of(StateEntry)]


def _sleeps(entry: StateEntry) -> bool:
    return (
        entry.event == "ActivityChanged"
        and entry.inputs["activity"] == "inactive"
        and int(str(entry.inputs["worker"])) > 1
    )


def test_training_workers_have_the_first_slots_and_overlap_workers_sleep_behind_them() -> None:
    run = make(small_recipe(fleet=fleet(2, 8, tp=[2], overlap_tp=2)), script=None)
    run.play()
    added = [entry.inputs for entry in run.world.journal.of(StateEntry) if entry.event == "WorkerAdded"]
    # Nodes of four GPUs each.
    assert [(e["worker"], e["gpus"], e["role"]) for e in added[:6]] == [
        (0, ["t0", "t1", "t2", "t3"], "training"),
        (1, ["t4", "t5", "t6", "t7"], "training"),
        (2, ["t0", "t1"], "colocated"),
        (3, ["t2", "t3"], "colocated"),
        (4, ["t4", "t5"], "colocated"),
        (5, ["t6", "t7"], "colocated"),
    ]
    first = run.world.journal.of(ChoiceEntry)[0]
    assert (first.moment, first.at_s) == ("started", 0.0)  # dedicated workers start meanwhile
    asleep = [(entry.inputs["worker"], entry.at_s) for entry in run.world.journal.of(StateEntry) if _sleeps(entry)]
    assert sorted(asleep)[:4] == [(worker, 1.0 + 20.0 + 2.0) for worker in (2, 3, 4, 5)]  # lent, started, put to sleep
    assert run.trainer.loans[:2] == [(what, tuple(f"t{n}" for n in range(8))) for what in ("lend", "reclaim")]


def test_a_policy_that_never_borrows_starts_nothing_on_training_gpus() -> None:
    run = make(small_recipe("rlboost_plus", fleet=fleet(2, 2)), script=None)
    run.play()
    assert run.trainer.loans == []
    assert run.world.journal.of(ChoiceEntry)[0].at_s == 0.0


def test_a_worker_on_training_gpus_that_does_not_start_ends_the_run_with_a_reason() -> None:
    run = make(small_recipe(fleet=fleet(2, 2)), script=None)
    run.world.fleet.fail_next_start(WorkerId(1), "out of memory")
    with pytest.raises(RunFailed, match=r"rollout workers on training GPUs: worker 1: worker 1: out of memory"):
        run.play()
    run.check()


def test_one_that_dies_as_it_falls_asleep_costs_no_more_than_itself() -> None:
    run = make(small_recipe(fleet=fleet(2, 2)), script=None)
    run.faults.append((21.5, "kill", lambda: run.world.fleet.kill(WorkerId(1))))
    run.play()
    assert ("WorkerRemoved", 1) in state_events(run)


def test_without_any_gpus_the_run_ends_with_the_reason() -> None:
    run = make(small_recipe(fleet=fleet(0, 2)), script=(), first_worker_s=500.0)
    # No GPU of its own, and none from outside: with the trainer's alone nothing is lent before the first batch begins.
    run.control.options = type(run.control.options)(
        policy=run.control.options.policy,
        situation=run.control.options.situation,
        reserved=(),
        training=(),
        overlap_tp=1,
        refit_share=0.3,
        first_worker_s=500.0,
    )
    with pytest.raises(
        RunFailed,
        match=r"no rollout worker serves within 500 s: there are 0 GPUs for rollout and 0 of the trainer under policy pearl; "
        r"decision 0 \(started\): nothing_fits",
    ):
        run.play()
    run.check()


def test_a_first_worker_that_never_comes_up_is_named() -> None:
    run = make(small_recipe("rlboost_plus", fleet=fleet(1, 0)), script=None, first_worker_s=300.0)
    for _ in range(20):
        run.world.fleet.fail_next_start(WorkerId(0), "no driver")
    with pytest.raises(
        RunFailed, match=r"no rollout worker serves within 300 s: there are 1 GPUs .*worker 0: no driver"
    ):
        run.play()
    run.check()


def test_a_run_without_gpus_of_its_own_begins_with_the_first_offer() -> None:
    script = [(100.0, Offered(lease=LeaseId("L"), gpus=EXTERNAL, end_s=None))]
    run = make(small_recipe("rlboost_plus", fleet=fleet(0, 1)), script=script)
    run.play()
    serving = [e.at_s for e in run.world.journal.of(StateEntry) if e.inputs.get("activity") == "active"]
    assert min(serving) == pytest.approx(100.0 + 20.0 + 1.0)


def test_a_run_that_ends_while_a_plan_is_under_way_leaves_nothing() -> None:
    script = [(25.0, Offered(lease=LeaseId("L"), gpus=EXTERNAL, end_s=None))]
    run = make(small_recipe("rlboost_plus", fleet=fleet(2, 0)), script=script, start_s=20.0)
    for slot in (2, 3):
        run.world.fleet.delay_next_start(WorkerId(slot), 99.0)
    run.play()
    choices = [e for e in run.world.journal.of(ChoiceEntry) if e.plan]
    assert len(choices) == 2
    assert [e.number for e in run.world.journal.of(ChangeEntry)] == [0]
    assert not run.world.fleet._starting


def test_a_run_that_fails_stops_too() -> None:
    run = make(small_recipe(fleet=fleet(2, 2)), script=None)
    run.trainer.fail_next()
    with pytest.raises(Exception, match="made to fail"):
        run.play()
    run.world.check_ledger()


def test_stopping_what_never_began_is_nothing() -> None:
    run = make(small_recipe(), script=None)
    run_virtual(run.control.stop())


def test_all_gpus_of_the_trainer_are_back_when_training_begins() -> None:
    run = make(
        small_recipe("borrow_all", fleet=fleet(2, 4), platform={"start_s": 1, "activate_s": 0.1, "return_s": 0.1})
    )
    run.play()  # the trainer itself looks
    assert run.trainer.wrong == []
    assert run.world.workers is not None
    roles = {each.role for each in run.world.workers.state.snapshot.workers.values()}
    assert roles == {Role.TRAINING}


def test_the_journal_of_the_run_goes_through_the_tracker() -> None:
    run = make(small_recipe(), script=None)
    before = run.control.options.situation.profile
    run.play()
    after = run.control.scheduler.tracker.profile
    assert after.workload.turns.mean != before.workload.turns.mean


@pytest.mark.parametrize("fails", [False, True])
def test_at_the_end_gpus_go_back_to_whom_they_belong(fails: bool) -> None:
    """Those from outside to their source, those that are lent to the trainer; also where the run fails."""
    script = [(5.0, Offered(lease=LeaseId("L"), gpus=EXTERNAL, end_s=None))]
    recipe = small_recipe("borrow_all", fleet=fleet(2, 2), run={"steps": 2})
    run = make(recipe, script=script, start_s=2.0, train_s=10.0)
    if fails:
        run.trainer.fail_next()
        with pytest.raises(Exception, match="made to fail"):
            run.play()
    else:
        run.play()
    ids = [gpu.id for gpu in EXTERNAL]
    assert run.source.accepted == [(LeaseId("L"), tuple(ids))]
    assert run.source.given_back == ids
    assert not run.trainer.lent
    workers = run.world.workers
    assert workers is not None
    assert not set(ids) & set(workers.state.snapshot.gpus)


def test_an_offer_at_the_end_is_not_taken() -> None:
    """The source goes on while workers end; what was taken then would be kept for ever."""
    run = make(small_recipe("rlboost_plus", fleet=fleet(2, 0)), script=())
    stop = run.control.stop

    async def stop_late() -> None:
        await stop()
        run.source.push(Offered(lease=LeaseId("L"), gpus=EXTERNAL, end_s=None))
        await asyncio.sleep(1.0)

    run.world.control = SimpleNamespace(
        journal=run.control.journal,
        start=run.control.start,
        training_begin=run.control.training_begin,
        training_finished=run.control.training_finished,
        stop=stop_late,
        leave=run.control.leave,
    )
    run.play()
    assert run.source.accepted == []
