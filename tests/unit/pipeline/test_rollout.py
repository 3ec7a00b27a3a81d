from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pearl.errors import RunFailed
from pearl.pipeline.agent_loop import AgentPorts
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.rollout import Rollout, RolloutProgress
from pearl.pipeline.router import Router
from pearl.pipeline.tasks import TaskStream
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.journal import GroupEntry
from pearl.records.trajectory import Group, GroupStatus, Task, TrajectoryStatus
from pearl.testing.codec import FakeCodec
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import Behaviour, FakeEnvironmentPool, Fault
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import fake_recipe

T = TypeVar("T")

NEW = RolloutProgress(cursor=0, consumed=0, unfinished=())


def number(task: Task) -> int:
    return int(task.id.removeprefix("fake#"))


@dataclass
class Stage:
    """Batches of two groups of two, bound 1; the trajectories of group n take 2 + n s."""

    nursery: Nursery
    slots: int = 64
    max_groups: int = 100
    progress: RolloutProgress = NEW
    limits: dict[str, object] = field(default_factory=dict)
    behaviour: Callable[[Task], Behaviour] = lambda task: Behaviour(step_s=1 + number(task), reward=1.0)
    journal: ListSink = field(default_factory=ListSink)
    engine: FakeEngine = field(init=False)
    pool: FakeEnvironmentPool = field(init=False)
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        router = Router(self.nursery, 3, lambda _worker, _detail: None)
        self.engine = FakeEngine(FakeEngineConfig(token_s=0.125, turn_tokens=8, version=100))
        router.admit(WorkerId(0), self.engine, WeightVersion(100))
        self.pool = FakeEnvironmentPool(self.slots, lambda task, _attempt: self.behaviour(task))
        ports = AgentPorts(
            router=router,
            environments=self.pool,
            codec=FakeCodec(),
            journal=self.journal,
            limits=fake_recipe(rollout={"max_staleness": 1, **self.limits}).rollout,
            max_new_tokens=10,
            temperature=1.0,
            start_s=0.0,
        )
        self.rollout = Rollout(
            ports=ports,
            tasks=TaskStream(environment="fake", params={}, seed=0),
            nursery=self.nursery,
            progress=self.progress,
            max_groups=self.max_groups,
        )

    def opened(self) -> list[str]:
        """Tasks in the order in which their first environment was opened."""
        return list(dict.fromkeys(call.task for call in self.pool.calls if call.call == "open"))

    def ends(self) -> list[tuple[str, str]]:
        return [(entry.group, entry.status) for entry in self.journal.of(GroupEntry)]


def on_stage(test: Callable[[Stage], Awaitable[T]], **options: object) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(Stage(nursery, **options))  # type: ignore[arg-type]

    return run_virtual(work())


def ids(groups: list[Group]) -> list[str]:
    return [group.id for group in groups]


def test_nothing_begins_before_weights_are_served() -> None:
    async def test(stage: Stage) -> None:
        await asyncio.sleep(100)
        assert stage.opened() == []
        stage.rollout.serve(WeightVersion(0))
        await asyncio.sleep(0.5)
        assert len(stage.opened()) == 4

    on_stage(test)


def test_batches_are_handed_over_in_admission_order_and_make_room_for_the_next() -> None:
    async def test(stage: Stage) -> None:
        stage.behaviour = lambda task: Behaviour(step_s=10 - number(task), reward=1.0)  # the last is the first
        stage.rollout.serve(WeightVersion(0))
        assert ids(await stage.rollout.next_batch(WeightVersion(0))) == ["g2", "g3"]
        assert asyncio.get_running_loop().time() == 9
        assert stage.opened() == ["fake#0", "fake#1", "fake#2", "fake#3"]  # two batches in flight until it is trained
        stage.rollout.serve(WeightVersion(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stage.opened()[4:] == ["fake#4", "fake#5"]
        assert ids(await stage.rollout.next_batch(WeightVersion(1))) == ["g0", "g1"]

    on_stage(test)


def test_a_pool_too_small_for_one_group_is_an_error_and_not_a_wait_without_end() -> None:
    async def test(stage: Stage) -> None:
        with pytest.raises(RunFailed, match=r"got 1 slots over all processes, want >= rollout\.group_size = 2"):
            stage.rollout.serve(WeightVersion(0))

    on_stage(test, slots=1)


def test_a_batch_waits_for_the_group_that_is_due_and_takes_it() -> None:
    async def test(stage: Stage) -> None:
        stage.behaviour = lambda task: Behaviour(step_s=50 if number(task) == 1 else 1, reward=1.0)
        stage.rollout.serve(WeightVersion(0))
        assert ids(await stage.rollout.next_batch(WeightVersion(0))) == ["g0", "g2"]
        stage.rollout.serve(WeightVersion(1))
        assert ids(await stage.rollout.next_batch(WeightVersion(1))) == ["g1", "g3"]
        assert asyncio.get_running_loop().time() == 51

    on_stage(test)


@pytest.mark.parametrize(("slots", "together"), [(2, 1), (3, 1), (4, 2), (7, 3), (64, 4)])
def test_groups_begin_only_where_all_their_trajectories_have_slots(slots: int, together: int) -> None:
    async def test(stage: Stage) -> None:
        stage.rollout.serve(WeightVersion(0))
        await asyncio.sleep(0.5)
        assert len(stage.opened()) == together
        assert stage.rollout.active_trajectories == 2 * together
        for version in range(3):
            await stage.rollout.next_batch(WeightVersion(version))
            stage.rollout.serve(WeightVersion(version + 1))
        assert stage.pool.open_max <= slots

    on_stage(test, slots=slots)


def test_a_trajectory_that_ends_makes_room_before_its_group_does() -> None:
    async def test(stage: Stage) -> None:
        times = {"fake#0": [1.0, 30.0], "fake#1": [1.0, 30.0]}
        stage.behaviour = lambda task: Behaviour(step_s=times[task.id].pop() if task.id in times else 1.0)
        stage.rollout.serve(WeightVersion(0))
        await asyncio.sleep(1.5)
        assert stage.opened() == ["fake#0", "fake#1"]
        await asyncio.sleep(2)  # one of each has ended: two slots are free
        assert stage.opened() == ["fake#0", "fake#1", "fake#2"]

    on_stage(test, slots=4)


def test_no_group_begins_that_no_step_would_train_on() -> None:
    async def test(stage: Stage) -> None:
        stage.rollout.serve(WeightVersion(0))
        await stage.rollout.next_batch(WeightVersion(0))
        stage.rollout.serve(WeightVersion(1))
        await asyncio.sleep(100)
        assert stage.opened() == ["fake#0", "fake#1", "fake#2"]

    on_stage(test, max_groups=3)


def test_unfinished_groups_of_a_resumed_run_begin_first_and_are_remembered_until_they_do() -> None:
    progress = RolloutProgress(cursor=9, consumed=4, unfinished=(3, 6, 8))

    async def test(stage: Stage) -> None:
        assert stage.rollout.snapshot() == progress
        stage.rollout.serve(WeightVersion(2))
        await asyncio.sleep(0.5)
        assert stage.opened() == ["fake#3", "fake#6"]
        assert stage.rollout.snapshot() == progress
        await stage.rollout.next_batch(WeightVersion(2))
        stage.rollout.serve(WeightVersion(3))
        await asyncio.sleep(0.5)
        assert stage.opened()[2:] == ["fake#8", "fake#9"]
        assert stage.rollout.snapshot() == RolloutProgress(cursor=10, consumed=6, unfinished=(8, 9))
        assert [group for group, status in stage.ends() if status == "restarted"] == ["g3", "g6", "g8"]

    on_stage(test, progress=progress, slots=4)


def test_a_group_that_expires_is_replaced_and_the_batch_goes_on_without_it() -> None:
    async def test(stage: Stage) -> None:
        stage.behaviour = lambda task: Behaviour(step_s=50 if number(task) == 0 else 1, reward=1.0)
        stage.rollout.serve(WeightVersion(0))
        await stage.rollout.next_batch(WeightVersion(0))
        stage.rollout.serve(WeightVersion(1))
        assert ids(await stage.rollout.next_batch(WeightVersion(1))) == ["g3", "g4"]
        assert asyncio.get_running_loop().time() == 20
        assert stage.rollout.group_ends[GroupStatus.EXPIRED] == 1
        assert stage.rollout.faults == {TrajectoryStatus.EXPIRED: 2}
        await asyncio.sleep(0.5)
        assert "fake#6" in stage.opened()

    on_stage(test, limits={"straggler_timeout_s": 20})


def test_too_many_groups_in_a_row_without_a_result_fail_the_run_and_it_is_told_why() -> None:
    async def test(stage: Stage) -> None:
        stage.behaviour = lambda task: Behaviour(step_s=1, fault=Fault.NONSENSE)
        stage.rollout.serve(WeightVersion(0))
        await stage.rollout.next_batch(WeightVersion(0))

    with pytest.raises(RunFailed) as failed:
        on_stage(test, limits={"max_failed_groups": 1, "max_replacements": 0})
    assert "2 groups in a row ended without a result" in str(failed.value)
    assert "env_nonsense" in str(failed.value)
    assert "rollout.max_failed_groups = 1" in str(failed.value)


def test_stopping_ends_what_runs_as_cancelled_and_nothing_begins_any_more() -> None:
    async def test(stage: Stage) -> None:
        stage.rollout.serve(WeightVersion(0))
        await asyncio.sleep(2.5)  # group 0 has completed
        await stage.rollout.stop()
        await stage.rollout.stop()
        stage.rollout.serve(WeightVersion(1))
        await asyncio.sleep(100)
        assert stage.ends() == [("g0", "completed"), ("g1", "cancelled"), ("g2", "cancelled"), ("g3", "cancelled")]
        assert stage.pool.open_now == 0
        assert len(stage.opened()) == 4
        # What was not consumed is still there to begin again.
        assert stage.rollout.snapshot() == RolloutProgress(cursor=4, consumed=0, unfinished=(0, 1, 2, 3))

    on_stage(test)
