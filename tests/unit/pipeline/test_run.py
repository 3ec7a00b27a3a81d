"""Whole runs on fakes and virtual time: failures and their bounds, resumption, what the journal holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    Role,
    StateEvent,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.errors import EngineError, RunFailed, TrainingError, WeightsError
from pearl.pipeline.run import RunResult
from pearl.records.ids import GpuId, NodeId, WeightVersion, WorkerId
from pearl.records.journal import GroupEntry, JournalEntry, StateEntry, StepEntry, TrajectoryEntry, TurnEntry
from pearl.records.trajectory import GroupStatus, Task, TrajectoryStatus
from pearl.records.turn import TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import AT_OPEN, AT_RESET, Behaviour, Fault
from pearl.testing.fleet import FakeFleet
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_recipe

ENGINE = FakeEngineConfig(token_s=0.125, turn_tokens=8)
"""A turn takes 1 s."""


def quick(_task: Task, _attempt: int) -> Behaviour:
    """A trajectory takes 4 s."""
    return Behaviour(step_s=3, reward=1.0)


def play(world: FakeWorld, *faults: tuple[float, Callable[[], None]]) -> RunResult:
    """Run to the end, with faults at times."""

    async def work() -> RunResult:
        for at_s, fault in faults:
            asyncio.get_running_loop().call_at(at_s, fault)
        return await world.run()

    try:
        return run_virtual(work())
    finally:
        world.check_ledger()


def steps(world: FakeWorld) -> list[int]:
    return [entry.version for entry in world.journal.of(StepEntry)]


def test_the_same_code_runs_on_a_real_clock() -> None:
    world = FakeWorld(fake_recipe(), script=lambda _t, _a: Behaviour(turns=2, reward=1.0))
    result = asyncio.run(world.run())
    world.check_ledger()
    assert (result.version, result.turns) == (4, 32)


# --- environments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [AT_OPEN, AT_RESET, 0])
@pytest.mark.parametrize("fault", list(Fault))
def test_environments_that_all_fail_end_the_run_instead_of_going_on_forever(fault: Fault, turn: int) -> None:
    recipe = fake_recipe(rollout={"max_failed_groups": 5, "trajectory_timeout_s": 500})
    world = FakeWorld(recipe, engine=ENGINE, script=lambda _t, _a: Behaviour(fault=fault, fault_turn=turn))
    with pytest.raises(RunFailed) as failed:
        play(world)
    status = {Fault.RAISE: "env_raised", Fault.HANG: "env_hung", Fault.LOST: "env_lost", Fault.NONSENSE: "env_nonsense"}
    expected = "timed_out" if (fault, turn) == (Fault.HANG, AT_OPEN) else status[fault]
    text = str(failed.value)
    assert text.startswith("rollout: 6 groups in a row ended without a result")
    assert f" {expected}" in text
    assert "rollout.max_failed_groups = 5" in text
    assert steps(world) == []
    # A group of two is given up after 4 replacements: never more than 2 + 4 attempts each.
    assert max(entry.attempts for entry in world.journal.of(GroupEntry)) <= 6


def test_groups_that_fail_now_and_then_are_replaced_and_counted() -> None:
    def script(task: Task, _attempt: int) -> Behaviour:
        bad = int(task.id.removeprefix("fake#")) % 3 == 0
        return Behaviour(step_s=3, reward=1.0, fault=Fault.RAISE if bad else None)

    world = FakeWorld(
        fake_recipe(rollout={"max_failed_groups": 3, "max_replacements": 1}), engine=ENGINE, script=script
    )
    result = play(world)
    trained = [group for batch in world.trainer.batches for group in batch.groups]
    assert trained == ["g1", "g2", "g4", "g5", "g7", "g8", "g10", "g11"]
    assert result.group_ends[GroupStatus.FAILED] == 4
    assert result.faults[TrajectoryStatus.ENV_RAISED] >= 8


def test_groups_in_a_row_are_counted_from_the_last_that_completed() -> None:
    def script(task: Task, _attempt: int) -> Behaviour:
        bad = int(task.id.removeprefix("fake#")) >= 4
        return Behaviour(step_s=3, fault=Fault.RAISE if bad else None)

    recipe = fake_recipe(rollout={"max_failed_groups": 2, "max_replacements": 0, "max_staleness": 0})
    world = FakeWorld(recipe, engine=ENGINE, script=script)
    with pytest.raises(RunFailed, match="3 groups in a row"):
        play(world)
    assert steps(world) == [1, 2]


def test_no_group_begins_once_the_run_has_failed() -> None:
    def opened() -> int:
        return sum(call.call == "open" for call in world.environments.calls)

    class Noting(ListSink):
        at_failure = 0

        def write(self, entry: JournalEntry) -> None:
            if isinstance(entry, GroupEntry) and entry.status == "failed":
                self.at_failure = opened()
            super().write(entry)

    # At 2 s group 1 fails, while the engines work for group 2 and group 0 is about to end and give its slots back.
    behaviours = {
        "fake#0": Behaviour(step_s=3),
        "fake#1": Behaviour(step_s=1, fault=Fault.RAISE),
        "fake#2": Behaviour(turns=2, step_s=0.5),
    }

    def script(task: Task, _attempt: int) -> Behaviour:
        return behaviours.get(task.id, Behaviour(step_s=30))

    recipe = fake_recipe(
        environment={"kind": "fake", "slots": 8},
        rollout={"max_failed_groups": 0, "max_replacements": 0, "groups_per_batch": 8},
    )
    world = FakeWorld(recipe, engine=ENGINE, script=script)
    world.journal = journal = Noting()
    with pytest.raises(RunFailed):
        play(world)
    assert opened() == journal.at_failure > 0


# --- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_workers_that_die_at_any_time_cost_nothing_but_time(seed: int) -> None:
    rng = random.Random(seed)
    undisturbed = FakeWorld(fake_recipe(run={"steps": 6}), engine=ENGINE, script=quick, train_s=5)
    play(undisturbed)
    recipe = fake_recipe(run={"steps": 6}, cluster={"max_worker_restarts": 4})
    world = FakeWorld(recipe, engine=ENGINE, script=quick, train_s=5, start_s=2)
    kills = [(rng.uniform(2.1, 35), rng.randrange(2)) for _ in range(4)]

    def kill(worker: int) -> None:
        if WorkerId(worker) in world.fleet.engines:
            world.fleet.kill(WorkerId(worker))

    result = play(world, *((at_s, lambda worker=worker: kill(worker)) for at_s, worker in kills))
    assert result.version == 6
    assert result.worker_restarts == result.worker_losses <= 4
    assert result.faults == {}
    # What was trained on is, token for token, what it would have been.
    assert _trained(world) == _trained(undisturbed)


def _trained(world: FakeWorld) -> dict[str, list[int]]:
    return {s.trajectory: s.token_ids.tolist() for batch in world.trainer.batches for s in batch.samples}


def test_a_worker_that_dies_beyond_the_bound_on_restarts_fails_the_run() -> None:
    world = FakeWorld(fake_recipe(cluster={"max_worker_restarts": 1}), engine=ENGINE, script=quick, train_s=10)
    with pytest.raises(RunFailed, match=r"rollout worker 1: lost .*all cluster\.max_worker_restarts = 1 are used up"):
        play(world, *((at_s, lambda: world.fleet.kill(WorkerId(1))) for at_s in (2, 16)))
    assert steps(world) == [1]


@pytest.mark.parametrize("unwell", [True, False])
@pytest.mark.parametrize("mute", [True, False])
def test_a_worker_that_hangs_is_replaced_and_the_run_goes_on(mute: bool, unwell: bool) -> None:
    recipe = fake_recipe(rollout={"turn_timeout_s": 100}, cluster={"max_worker_restarts": 1})
    world = FakeWorld(recipe, engine=ENGINE, script=quick, train_s=10)

    def hang() -> None:
        world.fleet.engines[WorkerId(1)].hang(mute=mute)
        if unwell:
            world.fleet.report_unwell(WorkerId(1))

    result = play(world, (0.5, hang))
    assert result.version == 4
    assert result.worker_restarts == 1
    # Found at once, which costs the one token that it had not told yet; or when its turns give up and begin again.
    assert world.steps[0].at_s == pytest.approx(14.125 if unwell else 114)
    assert result.faults == ({} if unwell else {TrajectoryStatus.ENGINE_FAILED: 4})


def test_a_worker_that_fails_every_request_does_not_starve_the_run() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, train_s=10)
    result = play(world, (0, lambda: world.fleet.engines[WorkerId(0)].fail_next(10**6)))
    assert result.version == 4
    assert result.faults == {}


def test_workers_that_do_not_start_fail_the_run_at_once() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, start_s=5)
    world.fleet.fail_next_start(WorkerId(1), "CUDA out of memory")
    with pytest.raises(RunFailed, match=r"rollout workers: .*CUDA out of memory; none was started"):
        play(world)
    assert world.journal.of(TrajectoryEntry) == []


def test_workers_that_take_too_long_to_start_fail_the_run() -> None:
    world = FakeWorld(fake_recipe(cluster={"start_timeout_s": 30}), engine=ENGINE, script=quick, start_s=31)
    with pytest.raises(RunFailed, match="not up within 30 s"):
        play(world)


def test_weights_that_one_worker_cannot_load_cost_that_worker_only() -> None:
    world = FakeWorld(fake_recipe(), engine=replace(ENGINE, load_s=2), script=quick, train_s=10)

    def kill_while_loading() -> None:
        assert world.weights.published == [0, 1]
        world.fleet.kill(WorkerId(0))

    # Loading 2 s, rollout 4, training 10: version 1 is loaded from 16 to 18 s.
    result = play(world, (17, kill_while_loading))
    assert result.version == 4
    assert result.worker_restarts == 1
    assert [engine.version for engine in world.fleet.past_engines] == [0, 4, 4]


def test_a_store_that_cannot_publish_fails_the_run() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick)
    world.weights._budget_bytes = 1
    with pytest.raises(WeightsError, match=r"weights\.host_budget_gib"):
        play(world)


# --- the journal -----------------------------------------------------------------------------------------------------


def test_a_run_whose_journal_cannot_be_flushed_fails_in_the_end() -> None:
    class Stuck(ListSink):
        async def flush(self) -> None:
            await asyncio.sleep(1e9)

    world = FakeWorld(fake_recipe(run={"steps": 1}), engine=ENGINE, script=quick)
    world.journal = Stuck()
    with pytest.raises(RunFailed, match="journal flush: no answer within 30 s"):
        play(world)
    assert steps(world) == [1]


def test_a_journal_that_cannot_be_flushed_does_not_hide_why_a_run_failed() -> None:
    class Broken(ListSink):
        async def flush(self) -> None:
            raise RunFailed("the disk is full")

    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick)
    world.journal = Broken()
    world.trainer.fail_next(TrainingError("loss is nan"))
    with pytest.raises(TrainingError, match="loss is nan"):
        play(world)


def test_the_journal_holds_everything_that_happened() -> None:
    def script(_task: Task, attempt: int) -> Behaviour:
        return Behaviour(turns=2, step_s=3, reward=1.0, fault=Fault.RAISE if attempt == 1 else None, fault_turn=1)

    world = FakeWorld(fake_recipe(), engine=ENGINE, script=script, train_s=10)
    result = play(world)
    groups = world.journal.of(GroupEntry)
    assert {entry.status for entry in groups} == {"completed"}
    assert [entry.attempts for entry in groups] == [3] * 8
    assert [entry.task for entry in sorted(groups, key=lambda e: e.group)] == [f"fake#{n}" for n in range(8)]
    ends = world.journal.of(TrajectoryEntry)
    assert Counter(entry.status for entry in ends) == {"done": 16, "env_raised": 8}
    assert len(world.journal.of(TurnEntry)) == 16 * 2 + 8
    assert sum(entry.generated for entry in ends) == 8 * (16 * 2 + 8)
    assert result.turns == 16 * 2 + 8 * 2  # the turn that the environment did not answer is no turn of a trajectory
    assert steps(world) == [1, 2, 3, 4]
    assert [step.groups for step in world.journal.of(StepEntry)] == [list(b.groups) for b in world.trainer.batches]
    times = [entry.at_s for entry in world.journal.entries]
    assert times == sorted(times)
    assert world.journal.flushes == 1


def test_the_fleet_state_can_be_folded_again_from_the_journal() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, train_s=10, start_s=3)
    play(world, (5, lambda: world.fleet.kill(WorkerId(0))), (20, lambda: world.fleet.report_unwell(WorkerId(1))))
    state = FleetState()
    entries = world.journal.of(StateEntry)
    for entry in entries:
        folded = fold(state, _event(entry))
        assert isinstance(folded, FleetState)
        state = folded
        assert (state.version, state.hash) == (entry.state_version, entry.state_hash)
    assert len(entries) == 1 + 4 + 2 * 3 + 2
    assert state.workers == {}


def _event(entry: StateEntry) -> StateEvent:
    inputs: dict[str, object] = dict(entry.inputs)
    worker = WorkerId(int(str(inputs.get("worker", 0))))
    match entry.event:
        case "GpusJoined":
            gpus = inputs["gpus"]
            assert isinstance(gpus, list)
            return GpusJoined(
                gpus=tuple(
                    Gpu(id=GpuId(gpu["id"]), node=NodeId(gpu["node"]), owner=GpuOwner(gpu["owner"])) for gpu in gpus
                )
            )
        case "WorkerAdded":
            ids = inputs["gpus"]
            assert isinstance(ids, list)
            return WorkerAdded(worker=worker, gpus=tuple(map(GpuId, ids)), role=Role(inputs["role"]))
        case "WorkerRemoved":
            return WorkerRemoved(worker=worker)
        case "ActivityChanged":
            return ActivityChanged(worker=worker, activity=Activity(inputs["activity"]))
    raise AssertionError(f"unexpected event {entry.event}")


# --- resumption ------------------------------------------------------------------------------------------------------


def interrupted(version: int, **rollout: object) -> FakeWorld:
    """A run of 6 steps that fails in the step after `version`; saved every 2."""

    class Fail:
        async def training_begin(self, at: WeightVersion) -> None:
            if at == version:
                world.trainer.fail_next(TrainingError("made to fail"))

        async def training_finished(self, at: WeightVersion) -> None: ...

    recipe = fake_recipe(run={"steps": 6}, checkpoint={"every_steps": 2}, rollout=dict(rollout))
    world = FakeWorld(recipe, engine=ENGINE, script=quick, train_s=10, hooks=Fail())
    with pytest.raises(TrainingError):
        play(world)
    return world


def resumed(world: FakeWorld) -> FakeWorld:
    again = FakeWorld(world.recipe, engine=ENGINE, script=quick, train_s=10, start=world.resumed_start())
    play(again)
    return again


def test_a_resumed_run_begins_unfinished_groups_again_and_consumes_nothing_twice() -> None:
    world = interrupted(5)
    again = resumed(world)
    progress = again.start.progress
    assert (again.start.version, again.start.incarnation) == (4, 1)
    assert progress.consumed == 8
    assert len(progress.unfinished) == progress.cursor - progress.consumed > 0
    before = [group for batch in world.trainer.batches[:4] for group in batch.groups]
    after = [group for batch in again.trainer.batches for group in batch.groups]
    assert [batch.version for batch in again.trainer.batches] == [4, 5]
    assert len(set(before) | set(after)) == 12
    assert set(after) == {f"g{index}" for index in progress.unfinished}


def test_unfinished_groups_are_journalled_as_restarted_and_have_the_same_task_and_new_trajectories() -> None:
    world = interrupted(5)
    again = resumed(world)
    restarted = [entry for entry in again.journal.of(GroupEntry) if entry.status == "restarted"]
    assert [entry.group for entry in restarted] == [f"g{index}" for index in again.start.progress.unfinished]
    tasks = {entry.group: (entry.task, entry.seed) for entry in world.journal.of(GroupEntry)}
    for entry in again.journal.of(GroupEntry):
        assert tasks.get(entry.group, (entry.task, entry.seed)) == (entry.task, entry.seed)
    first = {entry.trajectory for entry in world.journal.of(TrajectoryEntry)}
    second = {entry.trajectory for entry in again.journal.of(TrajectoryEntry)}
    assert not first & second
    assert all(name.endswith("r1") for name in second)


def test_a_run_can_be_resumed_more_than_once() -> None:
    world = interrupted(3)
    once = FakeWorld(world.recipe, engine=ENGINE, script=quick, train_s=10, start=world.resumed_start())
    once.trainer.fail_next(TrainingError("again"))
    with pytest.raises(TrainingError):
        play(once)
    twice = FakeWorld(
        world.recipe, engine=ENGINE, script=quick, train_s=10, start=replace(world.resumed_start(), incarnation=2)
    )
    assert play(twice).version == 6
    names = [entry.trajectory for one in (world, once, twice) for entry in one.journal.of(TrajectoryEntry)]
    assert len(names) == len(set(names))


def test_a_resumed_run_trains_on_weights_of_its_own_version() -> None:
    again = resumed(interrupted(5))
    assert again.weights.published == [4, 5, 6]
    assert min(v for batch in again.trainer.batches for s in batch.samples for v, _ in _runs(s.versions)) >= 4


def _runs(versions: object) -> list[tuple[int, int]]:
    return [(run.version, run.tokens) for run in versions.runs]  # type: ignore[attr-defined]


def test_a_run_that_had_ended_has_nothing_left_to_do() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick)
    play(world)
    again = resumed(world)
    assert again.trainer.batches == []
    assert again.journal.of(TrajectoryEntry) == []


def test_a_request_that_an_engine_refuses_is_tried_again_and_the_engine_kept() -> None:
    class Refusing(FakeEngine):
        refusals = 3

        async def submit(self, requests: Sequence[TurnRequest]) -> None:
            if Refusing.refusals:
                Refusing.refusals -= 1
                raise EngineError("not now")
            await super().submit(requests)

    world = FakeWorld(fake_recipe())
    world.fleet = FakeFleet(lambda spec: Refusing(worker=spec.worker))
    result = run_virtual(world.run())
    assert Refusing.refusals == 0
    assert result.version == world.recipe.run.steps
    assert result.worker_losses == 0
    world.check_ledger()
