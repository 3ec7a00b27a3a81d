"""How a trajectory ends that no fault ends: done, truncated, timed out, cancelled; and its closing."""

from __future__ import annotations

import asyncio

import pytest

from pearl.pipeline.agent_loop import CLOSE_TIMEOUT_S
from pearl.records.trajectory import Task, Trajectory, TrajectoryStatus
from pearl.records.turn import EndReason
from pearl.testing.environment import AT_OPEN, Behaviour, FakeEnvironment, FakeEnvironmentPool, Fault
from tests.unit.pipeline._agent_loop import BEGAN_S, Stage, on_stage, play


def test_done_is_what_the_environment_says() -> None:
    behaviour = Behaviour(turns=3, reward=0.5, reset_s=1, step_s=2, open_s=0.5)
    trajectory = on_stage(play, behaviour)
    assert trajectory.status is TrajectoryStatus.DONE
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 0.5]
    assert trajectory.reward == 0.5
    assert trajectory.success is True
    assert trajectory.detail == ""
    assert [turn.env_s for turn in trajectory.turns] == [pytest.approx(2)] * 3
    # open 0.5 + reset 1 + 3 turns of 0.8 s and 2 s, counted from the run's beginning
    assert trajectory.started_s == BEGAN_S
    assert trajectory.ended_s == pytest.approx(BEGAN_S + 0.5 + 1 + 3 * 2.8)


@pytest.mark.parametrize(("success", "want"), [(None, False), (True, True)])
def test_success_is_the_environments_word(success: bool | None, want: bool) -> None:
    assert on_stage(play, Behaviour(reward=0.0, success=success)).success is want


def test_truncated_by_a_limit_of_the_environment_keeps_its_reward_and_success() -> None:
    trajectory = on_stage(play, Behaviour(turns=2, reward=0.5, success=False, truncated=True))
    assert trajectory.status is TrajectoryStatus.TRUNCATED_ENVIRONMENT
    assert len(trajectory.turns) == 2
    assert (trajectory.reward, trajectory.success) == (0.5, False)


def test_truncated_after_the_allowed_turns() -> None:
    trajectory = on_stage(play, Behaviour(turns=9, reward=1.0), max_turns=2)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TURNS
    assert len(trajectory.turns) == 2
    assert trajectory.reward == 0
    assert trajectory.success is None


def test_truncated_at_the_allowed_context_to_the_token() -> None:
    # "obs 0>" is 6 tokens; 8 are generated, the last closes; "\nobs 1>" is 7: 21. 3 of 24 are left for the second turn.
    trajectory = on_stage(play, Behaviour(turns=9), max_context_tokens=24)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TOKENS
    assert [len(turn.prompt) for turn in trajectory.turns] == [6, 7]
    assert [len(turn.completion.token_ids) for turn in trajectory.turns] == [8, 3]
    assert trajectory.turns[-1].completion.end is EndReason.LENGTH


@pytest.mark.parametrize(("room", "turns"), [(6, 0), (7, 1)])
def test_a_first_prompt_that_fills_the_context_is_a_trajectory_without_a_turn(room: int, turns: int) -> None:
    trajectory = on_stage(play, max_context_tokens=room)
    assert len(trajectory.turns) == turns
    assert trajectory.status is (TrajectoryStatus.DONE if turns else TrajectoryStatus.TRUNCATED_TOKENS)
    assert trajectory.generated_tokens == turns


def test_timed_out_as_a_whole_although_every_step_is_in_time() -> None:
    trajectory = on_stage(play, Behaviour(turns=50, step_s=10), max_turns=50, trajectory_timeout_s=35)
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert len(trajectory.turns) == 3  # 10.8 s each
    assert trajectory.ended_s - trajectory.started_s == 35
    assert trajectory.detail == "trajectory g0.0: no answer within 35 s"


def test_an_environment_that_cannot_be_had_ends_with_the_trajectorys_time() -> None:
    # Waiting for a slot is no fault of an environment, so opening is bounded by the trajectory as a whole.
    trajectory = on_stage(play, Behaviour(fault=Fault.HANG, fault_turn=AT_OPEN), trajectory_timeout_s=500)
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert trajectory.ended_s - trajectory.started_s == 500


@pytest.mark.parametrize("status", [TrajectoryStatus.CANCELLED, TrajectoryStatus.EXPIRED])
@pytest.mark.parametrize("at_s", [0.2, 0.7, 1.2, 2.0], ids=["open", "reset", "generate", "step"])
def test_a_cancellation_is_an_end_with_the_status_that_it_means(status: TrajectoryStatus, at_s: float) -> None:
    async def test(stage: Stage) -> Trajectory:
        loop = stage.loop()
        task = stage.nursery.spawn(loop.run(), name="agent")
        await asyncio.sleep(at_s)
        loop.cancel_status = status
        task.cancel()
        trajectory = await task
        await asyncio.sleep(1)
        stage.check(trajectory)
        return trajectory

    # open until 0.5, reset until 1.0, the turn until 1.8, the step until 2.8
    trajectory = on_stage(test, Behaviour(open_s=0.5, reset_s=0.5, step_s=1))
    assert trajectory.status is status
    assert trajectory.ended_s - trajectory.started_s == pytest.approx(at_s)


def test_a_cancellation_while_waiting_for_a_slot_takes_none() -> None:
    async def test(stage: Stage) -> list[Trajectory]:
        first = stage.nursery.spawn(stage.loop("g0.0").run(), name="first")
        await asyncio.sleep(0)
        second = stage.nursery.spawn(stage.loop("g0.1").run(), name="second")
        third = stage.nursery.spawn(stage.loop("g0.2").run(), name="third")
        await asyncio.sleep(1)
        second.cancel()
        ended = [await first, await second, await third]
        assert stage.pool.open_now == 0
        assert stage.pool.open_max == 1
        return ended

    ended = on_stage(test, Behaviour(step_s=5))
    assert [one.status.value for one in ended] == ["done", "cancelled", "done"]


class SlowToClose(FakeEnvironmentPool):
    """Its environments take so long to close."""

    close_s = 0.0

    async def open(self, task: Task) -> FakeEnvironment:
        environment = await super().open(task)
        close, close_s = environment.close, self.close_s

        async def slow_close() -> None:
            try:
                await asyncio.sleep(close_s)
            finally:
                await close()

        environment.close = slow_close  # type: ignore[method-assign]
        return environment


def on_slow_stage(close_s: float, **rollout: object) -> Trajectory:
    async def test(stage: Stage) -> Trajectory:
        pool = SlowToClose(1, lambda _task, _attempt: stage.behaviour)
        pool.close_s = close_s
        object.__setattr__(stage.ports, "environments", pool)
        stage.pool = pool
        return await play(stage)

    return on_stage(test, **rollout)


def test_an_environment_that_does_not_close_holds_the_end_up_for_a_bounded_time() -> None:
    trajectory = on_slow_stage(1e6)
    assert trajectory.status is TrajectoryStatus.DONE
    assert trajectory.ended_s - trajectory.started_s == pytest.approx(0.8 + CLOSE_TIMEOUT_S)


def test_a_trajectory_that_is_done_in_time_is_not_timed_out_by_its_closing() -> None:
    assert on_slow_stage(9, trajectory_timeout_s=5).status is TrajectoryStatus.DONE
