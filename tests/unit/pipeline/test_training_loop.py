from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pearl.errors import PearlError, RunFailed, TrainingError
from pearl.pipeline.rollout import RolloutProgress
from pearl.pipeline.run import RunResult
from pearl.ports import EngineStats
from pearl.records.ids import WeightVersion
from pearl.records.journal import GroupEntry, StepEntry
from pearl.records.training import Manifest, TrainingBatch, TrainReport
from pearl.records.trajectory import Task, TrajectoryStatus
from pearl.testing.engine import FakeEngineConfig
from pearl.testing.environment import Behaviour
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, ListCheckpointer, fake_recipe

ENGINE = FakeEngineConfig(token_s=0.125, turn_tokens=8)
"""A turn takes 1 s."""


def quick(_task: Task, _attempt: int) -> Behaviour:
    """A trajectory takes 4 s: one turn, and 3 s of the environment."""
    return Behaviour(step_s=3, reward=1.0)


def first_is_slow(task: Task, attempt: int) -> Behaviour:
    """The first trajectory of the run takes 50 times as long as the others' environments: 151 s."""
    return Behaviour(step_s=150 if (task.id, attempt) == ("fake#0", 0) else 3, reward=1.0)


def play(world: FakeWorld) -> RunResult:
    result = run_virtual(world.run())
    world.check_ledger()
    return result


def step_ends(world: FakeWorld) -> list[float]:
    return [entry.at_s for entry in world.journal.of(StepEntry)]


# --- staleness and time ----------------------------------------------------------------------------------------------


def test_without_staleness_rollout_and_training_take_turns() -> None:
    world = FakeWorld(fake_recipe(rollout={"max_staleness": 0}), engine=ENGINE, script=quick, train_s=10)
    play(world)
    assert step_ends(world) == [pytest.approx(14 * n) for n in (1, 2, 3, 4)]
    assert [batch.staleness_tokens for batch in world.trainer.batches] == [{0: 32}] * 4
    assert [step.wait_s for step in world.steps] == [pytest.approx(4)] * 4


def test_with_staleness_one_rollout_hides_behind_training() -> None:
    world = FakeWorld(fake_recipe(rollout={"max_staleness": 1}), engine=ENGINE, script=quick, train_s=10)
    play(world)
    # The first batch takes 4 s; from then on the trainer never waits.
    assert step_ends(world) == [pytest.approx(4 + 10 * n) for n in (1, 2, 3, 4)]
    assert [batch.staleness_tokens for batch in world.trainer.batches] == [{0: 32}, {1: 32}, {1: 32}, {1: 32}]


def test_with_staleness_one_training_hides_behind_rollout_of_the_same_length() -> None:
    world = FakeWorld(fake_recipe(rollout={"max_staleness": 1}), engine=ENGINE, script=quick, train_s=4)
    play(world)
    assert step_ends(world) == [pytest.approx(4 + 4 * n) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("staleness", "ends"),
    [
        # The slow group is needed by the first, second, third step; everything else goes on before and after.
        (0, [161, 175, 189, 203]),
        (1, [14, 161, 171, 181]),
        (2, [14, 24, 161, 171]),
        (3, [14, 24, 34, 161]),
    ],
)
def test_a_step_waits_for_a_slow_trajectory_only_when_it_is_due(staleness: int, ends: list[float]) -> None:
    world = FakeWorld(
        fake_recipe(rollout={"max_staleness": staleness, "env_step_timeout_s": 1000}),
        engine=ENGINE,
        script=first_is_slow,
        train_s=10,
    )
    play(world)
    assert step_ends(world) == [pytest.approx(end) for end in ends]
    assert ["g0" in batch.groups for batch in world.trainer.batches].index(True) == staleness
    assert max(batch.staleness_max for batch in world.trainer.batches) == staleness


def test_a_straggler_that_expires_is_replaced_by_another_group() -> None:
    recipe = fake_recipe(run={"steps": 1}, rollout={"max_staleness": 0, "straggler_timeout_s": 50})
    world = FakeWorld(recipe, engine=ENGINE, script=first_is_slow, train_s=10)
    result = play(world)
    assert step_ends(world) == [pytest.approx(50 + 4 + 10)]
    assert world.trainer.batches[0].groups == ("g1", "g2")
    assert result.faults == {TrajectoryStatus.EXPIRED: 1}


def test_weights_that_take_time_to_load_hold_up_what_needs_them() -> None:
    slow_loading = FakeEngineConfig(token_s=0.125, turn_tokens=8, load_s=5)
    world = FakeWorld(fake_recipe(rollout={"max_staleness": 0}), engine=slow_loading, script=quick, train_s=10)
    play(world)
    assert step_ends(world) == [pytest.approx(5 + 19 * n) for n in (1, 2, 3, 4)]
    assert [step.publish_s for step in world.steps] == [pytest.approx(5)] * 4


# --- the order of a step ---------------------------------------------------------------------------------------------


class Diary:
    """Hooks that note what happens in a world, and when."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.world: FakeWorld | None = None
        self.at_begin: Callable[[WeightVersion], None] = lambda _: None

    async def training_begin(self, version: WeightVersion) -> None:
        self.notes.append(f"begin {version}")
        self.at_begin(version)
        await asyncio.sleep(1)

    async def training_finished(self, version: WeightVersion) -> None:
        assert self.world is not None
        serving = sorted({int(engine.version) for engine in self.world.fleet.engines.values()})
        self.notes.append(f"finished {version}, serving {serving}")
        await asyncio.sleep(2)

    def follow(self, world: FakeWorld) -> None:
        self.world = world
        train, publish = world.trainer.train, world.weights.publish

        async def noted_train(batch: TrainingBatch) -> TrainReport:
            self.notes.append(f"train {batch.version}")
            return await train(batch)

        async def noted_publish(version: WeightVersion) -> Manifest:
            self.notes.append(f"publish {version}")
            return await publish(version)

        world.trainer.train = noted_train  # type: ignore[method-assign]
        world.weights.publish = noted_publish  # type: ignore[method-assign]


def test_a_step_is_begin_train_publish_finished() -> None:
    diary = Diary()
    world = FakeWorld(fake_recipe(run={"steps": 2}), engine=ENGINE, script=quick, train_s=10, hooks=diary)
    diary.follow(world)
    play(world)
    assert diary.notes == [
        "publish 0",
        "begin 0",
        "train 0",
        "publish 1",
        "finished 1, serving [1]",
        "begin 1",
        "train 1",
        "publish 2",
        "finished 2, serving [2]",
    ]
    # 4 s of rollout, 1 s at the beginning, 10 s of training, 2 s at the end; the next batch is there by then.
    assert step_ends(world) == [pytest.approx(17), pytest.approx(30)]


def test_each_step_is_journalled_with_what_it_consumed() -> None:
    def script(task: Task, attempt: int) -> Behaviour:
        return Behaviour(step_s=3, reward=0.25 * (attempt + 1), success=attempt == 1)

    world = FakeWorld(fake_recipe(run={"steps": 2}), engine=ENGINE, script=script, train_s=10)
    play(world)
    first, second = world.journal.of(StepEntry)
    assert (first.version, first.groups, first.samples, first.trained_tokens) == (1, ["g0", "g1"], 4, 32)
    assert (second.version, second.groups, second.staleness_tokens) == (2, ["g2", "g3"], {"1": 32})
    assert first.staleness_tokens == {"0": 32}
    assert (first.reward_mean, first.success_mean) == (pytest.approx(0.375), 0.5)
    assert (first.wait_s, first.train_s) == (pytest.approx(4), 10)
    assert first.metrics.keys() == {"loss", "reward"}
    assert [step.report.version for step in world.steps] == [1, 2]
    assert world.steps[0].rollout_busy_s.keys() == {0, 1}
    assert world.steps[0].rollout_busy_s[0] == pytest.approx(1)  # 4 trajectories side by side
    assert world.steps[0].rollout_iterations.keys() == {0, 1}
    iterations, late = world.steps[0].rollout_iterations[0]
    assert iterations > 0
    assert late == 0


def test_counts_that_an_observer_keeps_stay_as_they_were() -> None:
    world = FakeWorld(fake_recipe(run={"steps": 3}), engine=ENGINE, script=quick, train_s=10)
    play(world)
    # Two batches at the start, and the last one during the second step.
    assert [step.router.turns for step in world.steps] == [8, 12, 12]
    assert [step.active_trajectories for step in world.steps] == [4, 0, 0]


def test_success_counts_truncated_trajectories_as_not_solved_where_the_environment_tells() -> None:
    def script(_task: Task, attempt: int) -> Behaviour:
        return Behaviour(turns=1 if attempt == 0 else 9, reward=1.0)

    world = FakeWorld(fake_recipe(run={"steps": 1}, rollout={"max_turns": 2}), script=script)
    play(world)
    assert world.steps[0].success_mean == 0.5


def test_success_is_unknown_where_the_environment_never_tells() -> None:
    world = FakeWorld(fake_recipe(run={"steps": 1}, rollout={"max_turns": 1}), script=lambda _t, _a: Behaviour(turns=9))
    play(world)
    assert world.steps[0].success_mean is None
    assert world.journal.of(StepEntry)[0].success_mean is None


# --- the end ---------------------------------------------------------------------------------------------------------


def test_training_stops_once_the_mean_success_of_five_steps_is_reached() -> None:
    def script(task: Task, _attempt: int) -> Behaviour:
        # Two groups per batch: the first three batches fail, the others succeed.
        return Behaviour(step_s=3, reward=float(int(task.id.removeprefix("fake#")) >= 6))

    recipe = fake_recipe(run={"steps": 50, "stop_at_success": 0.8}, rollout={"max_staleness": 0})
    world = FakeWorld(recipe, script=script)
    result = play(world)
    # Steps 4 .. 7 succeed: steps 3 .. 7 are the first five with a mean of 0.8.
    assert result.version == 7
    assert world.checkpointer.saved[-1][0] == 7


def test_a_run_that_stops_early_ends_what_still_runs_as_cancelled() -> None:
    def script(task: Task, _attempt: int) -> Behaviour:
        return Behaviour(step_s=1000 if int(task.id.removeprefix("fake#")) >= 10 else 3, reward=1.0)

    recipe = fake_recipe(run={"steps": 50, "stop_at_success": 1.0})
    world = FakeWorld(recipe, engine=ENGINE, script=script, train_s=1)
    result = play(world)
    assert result.version == 5
    assert result.wall_s < 100
    assert result.faults == {}  # the end of a run is no fault
    assert {status.value: count for status, count in result.group_ends.items()} == {"completed": 10, "cancelled": 4}
    # Also the two that were admitted in the very moment of the end have one.
    ended = {entry.group for entry in world.journal.of(GroupEntry)}
    assert ended == {f"g{n}" for n in range(world.checkpointer.saved[-1][1].cursor)}


@pytest.mark.parametrize(("every", "want"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_checkpoints_are_saved_every_so_many_steps_and_at_the_end(every: int, want: list[int]) -> None:
    world = FakeWorld(fake_recipe(run={"steps": 5}, checkpoint={"every_steps": every}), script=quick, engine=ENGINE)
    play(world)
    assert [version for version, _ in world.checkpointer.saved] == want


def test_a_checkpoint_says_what_was_consumed_and_what_is_unfinished() -> None:
    world = FakeWorld(
        fake_recipe(run={"steps": 3}, rollout={"max_staleness": 1}, checkpoint={"every_steps": 1}),
        engine=ENGINE,
        script=quick,
        train_s=10,
    )
    play(world)
    assert [progress for _, progress in world.checkpointer.saved] == [
        RolloutProgress(cursor=6, consumed=2, unfinished=(2, 3, 4, 5)),
        RolloutProgress(cursor=6, consumed=4, unfinished=(4, 5)),
        RolloutProgress(cursor=6, consumed=6, unfinished=()),  # nothing is begun that no step would train on
    ]


def test_a_recipe_of_no_steps_trains_nothing_and_saves_what_there_is() -> None:
    world = FakeWorld(fake_recipe(run={"steps": 0}))
    result = play(world)
    assert (result.version, result.turns) == (0, 0)
    assert [version for version, _ in world.checkpointer.saved] == [0]


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_trainer_that_fails_ends_the_run_with_its_error() -> None:
    diary = Diary()
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, train_s=10, hooks=diary)
    diary.world = world
    diary.at_begin = lambda version: world.trainer.fail_next(TrainingError("loss is nan")) if version == 2 else None
    with pytest.raises(TrainingError, match="loss is nan"):
        run_virtual(world.run())
    world.check_ledger()
    assert len(world.journal.of(StepEntry)) == 2


def test_a_training_step_without_end_fails_the_run() -> None:
    world = FakeWorld(fake_recipe(train={"step_timeout_s": 100}), engine=ENGINE, script=quick, train_s=1e9)
    with pytest.raises(RunFailed, match=r"training step 1: no answer within 100 s \(train\.step_timeout_s\)"):
        run_virtual(world.run())
    world.check_ledger()


@pytest.mark.parametrize(("version", "what"), [(0, "weights 0"), (1, "weights 1")])
def test_weights_that_are_never_published_fail_the_run(version: int, what: str) -> None:
    world = FakeWorld(fake_recipe(weights={"timeout_s": 70}), engine=ENGINE, script=quick)
    publish = world.weights.publish

    async def stuck(asked: WeightVersion) -> Manifest:
        if asked == version:
            await asyncio.sleep(1e9)
        return await publish(asked)

    world.weights.publish = stuck  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=rf"publication of {what}: no answer within 70 s \(weights\.timeout_s\)"):
        run_virtual(world.run())
    world.check_ledger()


def test_a_checkpoint_without_end_fails_the_run() -> None:
    class Stuck(ListCheckpointer):
        async def save(self, version: WeightVersion, progress: RolloutProgress) -> None:
            await asyncio.sleep(1e9)

    world = FakeWorld(fake_recipe(run={"steps": 1}, train={"step_timeout_s": 100}), engine=ENGINE, script=quick)
    world.checkpointer = Stuck()
    with pytest.raises(RunFailed, match="checkpoint of version 1: no answer within 100 s"):
        run_virtual(world.run())
    world.check_ledger()


def test_a_batch_without_a_generated_token_fails_the_run() -> None:
    # The first prompt, "obs 0>", fills the context.
    world = FakeWorld(fake_recipe(rollout={"max_context_tokens": 6}), script=quick)
    with pytest.raises(RunFailed, match="training step 1: no trajectory of the batch has a generated token"):
        run_virtual(world.run())
    world.check_ledger()


def test_a_hook_that_fails_ends_the_run_with_its_error() -> None:
    diary = Diary()
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, hooks=diary)

    def fail(version: WeightVersion) -> None:
        raise PearlError("no GPU to train on")

    diary.at_begin = fail
    with pytest.raises(PearlError, match="no GPU to train on"):
        run_virtual(world.run())
    world.check_ledger()


def test_an_observer_hears_of_late_iterations() -> None:
    world = FakeWorld(fake_recipe(run={"steps": 1}), engine=ENGINE, script=quick)

    async def late_at_the_end() -> RunResult:
        def change() -> None:
            engine = world.fleet.engines[1]
            real = engine.stats

            async def stats() -> EngineStats:
                return replace(await real(), iterations=12, late_iterations=5)

            engine.stats = stats  # type: ignore[method-assign]

        asyncio.get_running_loop().call_at(1.0, change)
        return await world.run()

    run_virtual(late_at_the_end())
    assert world.steps[0].rollout_iterations[1] == (12, 5)
    assert world.steps[0].rollout_iterations[0][1] == 0


def test_a_worker_that_does_not_tell_its_statistics_costs_a_number_and_little_time() -> None:
    world = FakeWorld(fake_recipe(run={"steps": 1}), engine=ENGINE, script=quick)

    async def hang_at_the_end() -> RunResult:
        loop = asyncio.get_running_loop()
        loop.call_at(3.5, lambda: world.fleet.engines[1].hang())  # after its only turn
        return await world.run()

    run_virtual(hang_at_the_end())
    assert world.steps[0].rollout_busy_s.keys() == {0}
    assert world.steps[0].rollout_iterations.keys() == {0}
