"""Runs that fail and are resumed from what they saved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pearl.errors import TrainingError
from pearl.records.ids import WeightVersion
from pearl.records.journal import GroupEntry, TrajectoryEntry
from pearl.testing.world import FakeWorld, fake_recipe
from tests.unit.pipeline._run import ENGINE, play, quick


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
