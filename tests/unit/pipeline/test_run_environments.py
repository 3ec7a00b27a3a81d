"""Whole runs whose environments fail, and the bounds on that."""

from __future__ import annotations

import pytest

from pearl.errors import RunFailed
from pearl.records.journal import GroupEntry, JournalEntry
from pearl.records.trajectory import GroupStatus, Task, TrajectoryStatus
from pearl.testing.environment import AT_OPEN, AT_RESET, Behaviour, Fault
from pearl.testing.journal import ListSink
from pearl.testing.world import FakeWorld, fake_recipe
from tests.unit.pipeline._run import ENGINE, play, steps


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
