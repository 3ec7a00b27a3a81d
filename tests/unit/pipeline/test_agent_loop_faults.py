"""Faults of environments and engines, and errors that are nobody's fault."""

from __future__ import annotations

import pytest

from pearl.errors import RunFailed
from pearl.records.ids import WorkerId
from pearl.records.journal import TrajectoryEntry
from pearl.records.trajectory import Task, Trajectory, TrajectoryStatus
from pearl.testing.environment import AT_OPEN, AT_RESET, Behaviour, FakeEnvironment, FakeEnvironmentPool, Fault
from tests.unit.pipeline._agent_loop import Stage, on_stage, play

FAULTS = {
    Fault.RAISE: (TrajectoryStatus.ENV_RAISED, "made to fail"),
    Fault.LOST: (TrajectoryStatus.ENV_LOST, "its process died"),
    Fault.NONSENSE: (TrajectoryStatus.ENV_NONSENSE, "want a finite number"),
}


@pytest.mark.parametrize("turn", [AT_OPEN, AT_RESET, 0, 2])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_an_environment_that_fails_is_a_typed_end(fault: Fault, turn: int) -> None:
    trajectory = on_stage(play, Behaviour(turns=5, reward=1.0, fault=fault, fault_turn=turn))
    status, detail = FAULTS[fault]
    assert trajectory.status is status
    assert detail in trajectory.detail
    assert len(trajectory.turns) == max(turn, 0)  # the turn that failed is no turn
    assert not trajectory.status.trainable


@pytest.mark.parametrize(("turn", "waited_s"), [(AT_RESET, 20), (0, 0.8 + 30), (2, 3 * 0.8 + 30)])
def test_an_environment_that_does_not_answer_is_hung(turn: int, waited_s: float) -> None:
    trajectory = on_stage(play, Behaviour(turns=5, fault=Fault.HANG, fault_turn=turn))
    assert trajectory.status is TrajectoryStatus.ENV_HUNG
    assert trajectory.ended_s - trajectory.started_s == pytest.approx(waited_s)
    what = "reset" if turn == AT_RESET else f"step {turn}"
    assert trajectory.detail.startswith(f"environment {what} of g0.0: no answer within")


def test_a_turn_that_no_engine_could_serve_is_engine_failed() -> None:
    async def test(stage: Stage) -> Trajectory:
        stage.engine.fail_next(3)
        return await play(stage)

    trajectory = on_stage(test)
    assert trajectory.status is TrajectoryStatus.ENGINE_FAILED
    assert "given up after 3 attempts" in trajectory.detail


def test_a_turn_that_takes_too_long_is_engine_failed() -> None:
    trajectory = on_stage(play, output_tokens=lambda _: 10, turn_timeout_s=0.55)
    assert trajectory.status is TrajectoryStatus.ENGINE_FAILED
    assert trajectory.detail == "turn 0 of g0.0: no answer within 0.55 s"
    assert trajectory.turns == ()


def test_a_turn_without_any_worker_is_engine_failed_in_the_end() -> None:
    async def test(stage: Stage) -> Trajectory:
        stage.ports.router.retire(WorkerId(0), "gone")
        return await play(stage)

    assert on_stage(test).status is TrajectoryStatus.ENGINE_FAILED


def test_a_long_detail_is_cut_in_the_journal_only() -> None:
    class Wordy(FakeEnvironmentPool):
        async def open(self, task: Task) -> FakeEnvironment:
            try:
                return await super().open(task)
            except Exception as error:
                error.args = ("x" * 1000,)
                raise

    async def test(stage: Stage) -> tuple[Trajectory, Stage]:
        pool = Wordy(1, lambda _task, _attempt: Behaviour(fault=Fault.RAISE, fault_turn=AT_OPEN))
        object.__setattr__(stage.ports, "environments", pool)
        return await play(stage), stage

    trajectory, stage = on_stage(test)
    assert len(trajectory.detail) == 1000
    assert len(stage.journal.of(TrajectoryEntry)[0].detail) == 200


def test_an_unexpected_error_ends_the_run_and_the_journal_says_in_which_trajectory() -> None:
    class Broken(FakeEnvironmentPool):
        async def open(self, task: Task) -> FakeEnvironment:
            raise RunFailed("environment processes: all restarts are used up")

    async def test(stage: Stage) -> TrajectoryEntry:
        object.__setattr__(stage.ports, "environments", Broken(1))
        with pytest.raises(RunFailed):
            await stage.loop().run()
        (entry,) = stage.journal.of(TrajectoryEntry)
        return entry

    entry = on_stage(test)
    assert entry.status == "cancelled"
    assert entry.detail == "RunFailed: environment processes: all restarts are used up"
