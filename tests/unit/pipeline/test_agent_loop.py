from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pearl.errors import RunFailed
from pearl.pipeline.agent_loop import CLOSE_TIMEOUT_S, AgentLoop, AgentPorts, Attempt
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.router import Router
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.journal import TrajectoryEntry, TurnEntry
from pearl.records.trajectory import Task, Trajectory, TrajectoryStatus
from pearl.records.turn import EndReason, TurnRequest
from pearl.testing.codec import FakeCodec
from pearl.testing.engine import FakeEngine, FakeEngineConfig, fake_token
from pearl.testing.environment import (
    AT_OPEN,
    AT_RESET,
    Behaviour,
    FakeEnvironment,
    FakeEnvironmentPool,
    Fault,
)
from pearl.testing.journal import ListSink
from pearl.testing.tokens import FAKE_STOP
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import fake_recipe, fake_task

T = TypeVar("T")

BEGAN_S = 1000.0
"""Loop time at which the run began, so that times since then are told from times of the loop."""


@dataclass
class Stage:
    """One agent loop's surroundings: an engine of 10 tokens a second and turns of 8 tokens."""

    nursery: Nursery
    behaviour: Behaviour
    rollout: dict[str, object]
    output_tokens: Callable[[TurnRequest], int] | None = None
    slots: int = 1
    journal: ListSink = field(default_factory=ListSink)
    engine: FakeEngine = field(init=False)
    pool: FakeEnvironmentPool = field(init=False)
    ports: AgentPorts = field(init=False)

    def __post_init__(self) -> None:
        router = Router(self.nursery, 3, lambda _worker, _detail: None)
        self.engine = FakeEngine(FakeEngineConfig(token_s=0.1, turn_tokens=8), output_tokens=self.output_tokens)
        router.admit(WorkerId(0), self.engine, WeightVersion(0))
        self.pool = FakeEnvironmentPool(self.slots, lambda _task, _attempt: self.behaviour)
        limits = {"turn_timeout_s": 40, "env_reset_timeout_s": 20, "env_step_timeout_s": 30, **self.rollout}
        self.ports = AgentPorts(
            router=router,
            environments=self.pool,
            codec=FakeCodec(),
            journal=self.journal,
            limits=fake_recipe(rollout=limits).rollout,
            max_new_tokens=10,
            temperature=1.0,
            start_s=-BEGAN_S,
        )

    def loop(self, name: str = "g0.0", task: Task | None = None) -> AgentLoop:
        attempt = Attempt(
            id=TrajectoryId(name),
            group=GroupId("g0"),
            task=task or fake_task(),
            sampling_seed=7,
            min_version=WeightVersion(0),
        )
        return AgentLoop(ports=self.ports, attempt=attempt)

    def check(self, trajectory: Trajectory) -> None:
        """What holds of every end: journalled once and alike, slot and prefix given back, nothing left running."""
        (entry,) = self.journal.of(TrajectoryEntry)
        assert entry.status == trajectory.status.value
        assert (entry.trajectory, entry.group) == (trajectory.id, trajectory.group)
        assert entry.turns == len(trajectory.turns) == len(self.journal.of(TurnEntry))
        assert entry.generated == trajectory.generated_tokens
        assert (entry.reward, entry.success) == (trajectory.reward, trajectory.success)
        assert (entry.started_s, entry.at_s) == (trajectory.started_s, trajectory.ended_s)
        assert self.pool.open_now == 0
        assert not self.engine.busy
        if not self.engine.gone:
            assert self.engine.kv.cached_tokens(trajectory.id) == 0


def on_stage(
    test: Callable[[Stage], Awaitable[T]],
    behaviour: Behaviour | None = None,
    *,
    output_tokens: Callable[[TurnRequest], int] | None = None,
    slots: int = 1,
    **rollout: object,
) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(Stage(nursery, behaviour or Behaviour(), rollout, output_tokens, slots))

    return run_virtual(work())


async def play(stage: Stage) -> Trajectory:
    trajectory = await stage.loop().run()
    await asyncio.sleep(1)  # for what was told to the engine to arrive
    stage.check(trajectory)
    return trajectory


# --- ends ------------------------------------------------------------------------------------------------------------


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


def test_an_environment_that_cannot_be_had_ends_with_the_trajectorys_time() -> None:
    # Waiting for a slot is no fault of an environment, so opening is bounded by the trajectory as a whole.
    trajectory = on_stage(play, Behaviour(fault=Fault.HANG, fault_turn=AT_OPEN), trajectory_timeout_s=500)
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert trajectory.ended_s - trajectory.started_s == 500


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


# --- closing ---------------------------------------------------------------------------------------------------------


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


# --- tokens ----------------------------------------------------------------------------------------------------------


def text_ids(text: str) -> list[int]:
    """Ids of the fake codec: space .. tilde are 1 .. 95, newline is 96."""
    return [96 if character == "\n" else ord(character) - 31 for character in text]


def test_every_token_of_the_context_is_accounted_for() -> None:
    async def test(stage: Stage) -> tuple[Trajectory, list[TurnRequest], list[str]]:
        requests: list[TurnRequest] = []
        submit = stage.engine.submit

        async def noted(batch: list[TurnRequest]) -> None:
            requests.extend(batch)
            await submit(batch)

        stage.engine.submit = noted  # type: ignore[method-assign,assignment]
        trajectory = await play(stage)
        return trajectory, requests, stage.pool.actions(fake_task().id)

    # Turns of 8 (closed), 12 (cut at 10, not closed), 3 (closed) tokens.
    trajectory, requests, actions = on_stage(test, Behaviour(turns=3), output_tokens=lambda r: [8, 12, 3][r.turn])
    context: list[int] = []
    for number, (turn, request) in enumerate(zip(trajectory.turns, requests, strict=True)):
        context += turn.prompt.tolist()
        assert request.context.tolist() == context
        assert request.turn == number
        drawn = [fake_token(7, len(context) + n) for n in range(len(turn.completion.token_ids))]
        if turn.completion.end is EndReason.STOP:
            drawn[-1] = FAKE_STOP
        assert turn.completion.token_ids.tolist() == drawn
        context += drawn
    assert [turn.completion.end.value for turn in trajectory.turns] == ["stop", "length", "stop"]
    assert trajectory.turns[0].prompt.tolist() == text_ids("obs 0>")
    assert trajectory.turns[1].prompt.tolist() == text_ids("\nobs 1>")
    assert trajectory.turns[2].prompt.tolist() == [FAKE_STOP, *text_ids("\nobs 2>")]  # the answer was not closed
    texts = [[t for t in turn.completion.token_ids.tolist() if t != FAKE_STOP] for turn in trajectory.turns]
    assert [text_ids(action) for action in actions] == texts


def test_turns_are_journalled_with_their_counts_times_and_workers() -> None:
    async def test(stage: Stage) -> list[TurnEntry]:
        await play(stage)
        return stage.journal.of(TurnEntry)

    entries = on_stage(test, Behaviour(turns=2, reset_s=1, step_s=3))
    assert [(e.trajectory, e.turn, e.prompt, e.generated, e.end) for e in entries] == [
        ("g0.0", 0, 6, 8, "stop"),
        ("g0.0", 1, 7, 8, "stop"),
    ]
    assert [e.computed for e in entries] == [6, 8]  # the prefix is cached but for its last token
    assert [(e.versions, e.workers) for e in entries] == [([[0, 8]], [0])] * 2
    assert [e.generate_s for e in entries] == [pytest.approx(0.8)] * 2
    assert [e.env_s for e in entries] == [pytest.approx(3)] * 2
    assert [e.at_s for e in entries] == [pytest.approx(BEGAN_S + 4.8), pytest.approx(BEGAN_S + 8.6)]


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


# --- what is nobody's fault ------------------------------------------------------------------------------------------


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
