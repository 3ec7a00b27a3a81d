from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pearl.errors import RunFailed
from pearl.pipeline.agent_loop import AgentPorts
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.group import GroupRun
from pearl.pipeline.router import Router
from pearl.pipeline.tasks import TaskStream
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.journal import TrajectoryEntry
from pearl.records.trajectory import Group, GroupStatus, Task, TrajectoryStatus
from pearl.testing.codec import FakeCodec
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import AT_OPEN, AT_RESET, Behaviour, FakeEnvironment, FakeEnvironmentPool, Fault
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import fake_recipe

T = TypeVar("T")

OK = Behaviour(step_s=1, reward=1.0)
BAD = Behaviour(fault=Fault.RAISE, fault_turn=0)


@dataclass
class Stage:
    """A group of three, whose attempts behave as scripted in order of opening."""

    nursery: Nursery
    behaviours: list[Behaviour]
    rollout: dict[str, object]
    faults: Counter[TrajectoryStatus] = field(default_factory=Counter)
    freed: list[int] = field(default_factory=list)
    """Active members whenever one has finished."""
    pool: FakeEnvironmentPool = field(init=False)
    engine: FakeEngine = field(init=False)
    journal: ListSink = field(default_factory=ListSink)
    group: GroupRun = field(init=False)

    def __post_init__(self) -> None:
        router = Router(self.nursery, 3, lambda _worker, _detail: None)
        self.engine = FakeEngine(FakeEngineConfig(token_s=0.1, turn_tokens=5))
        router.admit(WorkerId(0), self.engine, WeightVersion(2))
        self.pool = FakeEnvironmentPool(9, lambda _task, attempt: self.behaviours[attempt])
        ports = AgentPorts(
            router=router,
            environments=self.pool,
            codec=FakeCodec(),
            journal=self.journal,
            limits=fake_recipe(rollout={"group_size": 3, "max_replacements": 2, **self.rollout}).rollout,
            max_new_tokens=10,
            temperature=1.0,
            start_s=0.0,
        )
        self.group = GroupRun(
            ports=ports,
            tasks=TaskStream(environment="fake", params={}, seed=3),
            index=5,
            admitted_version=WeightVersion(0),
            faults=self.faults,
            on_slot_free=lambda: self.freed.append(self.group.active),
        )

    def ends(self) -> list[tuple[str, str]]:
        return [(entry.trajectory, entry.status) for entry in self.journal.of(TrajectoryEntry)]


async def play(stage: Stage) -> tuple[Group, Stage]:
    group = await stage.group.run()
    await asyncio.sleep(1)
    check(group, stage)
    return group, stage


def check(group: Group, stage: Stage) -> None:
    """What holds of every end."""
    ends = stage.ends()
    assert len({name for name, _ in ends}) == len(ends) == stage.group.attempts
    assert stage.pool.open_now == 0
    assert stage.group.active == 0
    assert stage.freed == [2, 1, 0]
    assert not stage.engine.busy
    assert (group.id, group.index, group.admitted_version) == ("g5", 5, 0)
    assert all(one.status.trainable for one in group.trajectories)


def on_stage(test: Callable[[Stage], Awaitable[T]], behaviours: list[Behaviour], **rollout: object) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(Stage(nursery, behaviours, rollout))

    return run_virtual(work())


def test_a_group_is_its_trajectories_on_one_task_with_different_draws() -> None:
    group, stage = on_stage(play, [OK] * 3)
    assert group.status is GroupStatus.COMPLETED
    assert [one.id for one in group.trajectories] == ["g5.0", "g5.1", "g5.2"]
    assert all(one.task == group.task for one in group.trajectories)
    assert {call.text for call in stage.pool.calls if call.call == "reset"} == {str(group.task.seed)}
    drawn = {tuple(one.turns[0].completion.token_ids.tolist()) for one in group.trajectories}
    assert len(drawn) == 3
    assert stage.faults == {}


@pytest.mark.parametrize(
    "bad",
    [
        BAD,
        Behaviour(fault=Fault.LOST, fault_turn=AT_OPEN),
        Behaviour(fault=Fault.NONSENSE, fault_turn=AT_RESET),
        Behaviour(fault=Fault.HANG, fault_turn=0),
    ],
)
def test_a_fault_is_replaced_by_a_new_attempt_in_its_members_place(bad: Behaviour) -> None:
    group, stage = on_stage(play, [OK, bad, OK, OK])
    assert group.status is GroupStatus.COMPLETED
    assert [one.id for one in group.trajectories] == ["g5.0", "g5.3", "g5.2"]
    assert stage.group.attempts == 4
    assert sum(stage.faults.values()) == 1


def test_as_many_faults_as_allowed_are_replaced() -> None:
    group, stage = on_stage(play, [BAD, BAD, OK, OK, OK])
    assert group.status is GroupStatus.COMPLETED
    assert stage.faults == {TrajectoryStatus.ENV_RAISED: 2}
    assert len(group.trajectories) == 3
    assert len(set(stage.pool.actions(group.task.id))) == 5  # each attempt draws anew


def test_one_fault_more_fails_the_group_and_no_attempt_is_begun_for_it() -> None:
    slow = Behaviour(step_s=50)
    group, stage = on_stage(play, [slow, BAD, slow, BAD, BAD])
    assert group.status is GroupStatus.FAILED
    assert stage.group.attempts == 5
    assert stage.ends() == [
        ("g5.1", "env_raised"),
        ("g5.3", "env_raised"),
        ("g5.4", "env_raised"),
        ("g5.0", "cancelled"),
        ("g5.2", "cancelled"),
    ]
    assert stage.faults == {TrajectoryStatus.ENV_RAISED: 3}


def test_without_replacements_the_first_fault_fails_the_group() -> None:
    group, stage = on_stage(play, [OK, OK, BAD], max_replacements=0)
    assert group.status is GroupStatus.FAILED
    assert stage.group.attempts == 3


def test_faults_in_the_same_moment_begin_no_attempt_beyond_the_bound() -> None:
    group, stage = on_stage(play, [BAD] * 4, max_replacements=1)
    assert group.status is GroupStatus.FAILED
    # All three fail together: the first is replaced, the second passes the bound.
    assert stage.group.attempts == 4
    assert stage.faults[TrajectoryStatus.ENV_RAISED] == 3


def test_a_member_fifty_times_slower_than_the_rest_expires_the_group() -> None:
    slow = Behaviour(step_s=50, reward=1.0)
    group, stage = on_stage(play, [OK, slow, OK], straggler_timeout_s=20)
    assert group.status is GroupStatus.EXPIRED
    assert stage.ends() == [("g5.0", "done"), ("g5.2", "done"), ("g5.1", "expired")]
    assert [one.id for one in group.trajectories] == ["g5.0", "g5.2"]
    assert stage.faults == {TrajectoryStatus.EXPIRED: 1}


def test_a_slow_member_within_the_bound_is_waited_for() -> None:
    slow = Behaviour(step_s=50, reward=1.0)
    group, _ = on_stage(play, [OK, slow, OK], straggler_timeout_s=51)
    assert group.status is GroupStatus.COMPLETED
    assert len(group.trajectories) == 3


def test_the_time_of_a_group_includes_its_replacements() -> None:
    slow = Behaviour(step_s=15, fault=Fault.RAISE, fault_turn=0)
    group, _ = on_stage(play, [OK, slow, OK, slow, OK], straggler_timeout_s=20)
    assert group.status is GroupStatus.EXPIRED


def test_a_group_that_completes_in_the_moment_of_its_expiry_has_ended_one_way() -> None:
    exact = Behaviour(step_s=9.5, reward=1.0)  # and 0.5 s for the turn
    group, stage = on_stage(play, [exact] * 3, straggler_timeout_s=10)
    assert group.status in (GroupStatus.COMPLETED, GroupStatus.EXPIRED)
    assert (len(group.trajectories) == 3) == (group.status is GroupStatus.COMPLETED)
    assert len(stage.ends()) == 3


@pytest.mark.parametrize("at_s", [0.0, 0.2, 1.0, 5.0])
def test_a_cancelled_group_ends_all_that_it_began(at_s: float) -> None:
    async def test(stage: Stage) -> tuple[Group, Stage]:
        task = stage.nursery.spawn(stage.group.run(), name="group")
        await asyncio.sleep(at_s)
        task.cancel()
        group = await task
        await asyncio.sleep(1)
        assert stage.pool.open_now == 0
        assert len(stage.ends()) == stage.group.attempts
        return group, stage

    group, stage = on_stage(test, [Behaviour(step_s=50, open_s=0.5)] * 3)
    assert group.status is GroupStatus.CANCELLED
    assert {status for _, status in stage.ends()} <= {"cancelled"}
    assert stage.faults == {}  # the end of a run is no fault


def test_cancelled_members_keep_what_was_done_before() -> None:
    async def test(stage: Stage) -> Group:
        task = stage.nursery.spawn(stage.group.run(), name="group")
        await asyncio.sleep(5)
        task.cancel()
        return await task

    group = on_stage(test, [OK, OK, Behaviour(step_s=50)])
    assert [one.id for one in group.trajectories] == ["g5.0", "g5.1"]


def test_an_error_that_is_no_fault_comes_out_of_the_group_and_leaves_nothing_running() -> None:
    class Breaking(FakeEnvironmentPool):
        async def open(self, task: Task) -> FakeEnvironment:
            if self._opened == 2:
                raise RunFailed("no environment process is left")
            return await super().open(task)

    async def test(stage: Stage) -> Stage:
        stage.pool = Breaking(9)
        object.__setattr__(stage.group.ports, "environments", stage.pool)
        with pytest.raises(RunFailed, match="no environment process is left"):
            await stage.group.run()
        return stage

    stage = on_stage(test, [])
    assert stage.pool.open_now == 0
    assert len(stage.ends()) == 3
    assert stage.group.active == 0


def test_a_group_that_begins_again_in_a_resumed_run_has_the_same_task_and_other_trajectory_ids() -> None:
    group, _ = on_stage(play, [OK] * 3)

    async def again(stage: Stage) -> Group:
        stage.group.incarnation = 2
        return await stage.group.run()

    resumed = on_stage(again, [OK] * 3)
    assert resumed.id == group.id
    assert resumed.task == group.task
    assert [one.id for one in resumed.trajectories] == ["g5.0r2", "g5.1r2", "g5.2r2"]
    assert [one.turns[0].completion.token_ids for one in resumed.trajectories] == [
        one.turns[0].completion.token_ids for one in group.trajectories
    ]


def test_what_is_unfinished_counts_the_turns_of_each_member() -> None:
    """Members of 1, 2 and 3 turns, each turn 0.5 s to generate and 1 s to answer."""

    async def test(stage: Stage) -> list[tuple[int, ...]]:
        seen = [stage.group.unfinished]
        running = stage.nursery.spawn(play(stage), name="group")
        for at_s in (0.1, 1.0, 1.0, 1.5, 2.0):
            await asyncio.sleep(at_s)
            seen.append(stage.group.unfinished)
        await running
        return seen

    behaviours = [Behaviour(turns=turns, step_s=1, reward=1.0) for turns in (1, 2, 3)]
    seen = on_stage(test, behaviours)
    assert seen == [(0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 1), (2,), ()]
