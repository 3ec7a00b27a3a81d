"""Whole runs: on a real clock, and what the journal holds."""

from __future__ import annotations

import asyncio
from collections import Counter

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
from pearl.errors import RunFailed, TrainingError
from pearl.records.ids import GpuId, NodeId, WorkerId
from pearl.records.journal import GroupEntry, StateEntry, StepEntry, TrajectoryEntry, TurnEntry
from pearl.records.trajectory import Task
from pearl.testing.environment import Behaviour, Fault
from pearl.testing.journal import ListSink
from pearl.testing.world import FakeWorld, fake_recipe
from tests.unit.pipeline._run import ENGINE, play, quick, steps


def test_the_same_code_runs_on_a_real_clock() -> None:
    world = FakeWorld(fake_recipe(), script=lambda _t, _a: Behaviour(turns=2, reward=1.0))
    result = asyncio.run(world.run())
    world.check_ledger()
    assert (result.version, result.turns) == (4, 32)


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
