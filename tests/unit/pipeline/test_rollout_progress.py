"""How far the batch is that closes next; stages as `test_rollout` has them."""

from __future__ import annotations

import asyncio

from pearl.core.progress import Progress, fresh_batch
from pearl.records.ids import WeightVersion
from pearl.records.trajectory import Task
from pearl.testing.environment import Behaviour
from tests.unit.pipeline.test_rollout import Stage, number, on_stage

ZERO = WeightVersion(0)


def slow(task: Task) -> Behaviour:
    """Group n: n + 1 turns of 1 s to generate and 1 s to answer."""
    return Behaviour(turns=number(task) + 1, step_s=1.0, reward=1.0)


def test_before_any_group_has_begun_all_of_what_will() -> None:
    async def test(stage: Stage) -> None:
        assert stage.rollout.batch_progress() == fresh_batch(2, 2, batches=2)

    on_stage(test)


def test_progress_by_hand() -> None:
    async def test(stage: Stage) -> None:
        stage.rollout.serve(ZERO)
        assert stage.rollout.batch_progress() == fresh_batch(2, 2, batches=2)
        await asyncio.sleep(2.5)
        # Group 0 is complete; of groups 1, 2, 3 each member has done one turn. One more group closes the batch.
        assert stage.rollout.batch_progress() == Progress(
            batch_trajectories=4, unfinished=2, live_groups=3, needed_groups=1, running={1: 6}
        )
        await asyncio.sleep(2)
        # Groups 0 and 1 are complete: the batch could close.
        assert stage.rollout.batch_progress() == Progress(
            batch_trajectories=4, unfinished=0, live_groups=2, needed_groups=0, running={2: 4}
        )
        await stage.rollout.next_batch(ZERO)
        assert stage.rollout.batch_progress() == Progress(
            batch_trajectories=4,
            unfinished=4,
            live_groups=2,
            needed_groups=2,
            running={2: 4},
            due_groups=2,  # admitted under version 0: the step that begins at version 1 must have them
            due={2: 4},
            coming=4,
        )

    on_stage(test, behaviour=slow)


def test_fewer_live_groups_than_a_batch_needs_are_all_needed() -> None:
    async def test(stage: Stage) -> None:
        stage.rollout.serve(ZERO)
        await asyncio.sleep(0.1)
        found = stage.rollout.batch_progress()
        assert (found.live_groups, found.needed_groups, found.unfinished) == (1, 1, 2)

    on_stage(test, behaviour=slow, max_groups=1)
