from __future__ import annotations

import pytest

from pearl.pipeline import evaluation
from pearl.pipeline.evaluation import EvaluationResult
from pearl.pipeline.run import RunResult, RunStart
from pearl.records.ids import GroupId, TaskId, TrajectoryId, WeightVersion
from pearl.records.journal import TrajectoryEntry, TurnEntry
from pearl.records.trajectory import Task, Trajectory, TrajectoryStatus
from pearl.testing.engine import FakeEngineConfig
from pearl.testing.environment import Behaviour, Fault
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_gpus, fake_recipe

ENGINE = FakeEngineConfig(token_s=0.125, turn_tokens=8)


def play(world: FakeWorld) -> RunResult:
    result = run_virtual(world.run())
    world.check_ledger()
    return result


TASKS = tuple(Task(id=TaskId(f"evaluation#{n}"), environment="fake", seed=n) for n in range(3))


def by_seed(task: Task, _attempt: int) -> Behaviour:
    """Solved or not by the environment's seed, which differs between rollouts."""
    return Behaviour(turns=2, step_s=task.seed % 5, reward=float(task.seed % 3 == 0))


def evaluated(*, steps: int = 0, workers: int = 2, slots: int = 64) -> tuple[FakeWorld, RunResult]:
    recipe = fake_recipe(
        run={"steps": steps},
        evaluation={"rollouts_per_task": 5},
        engine={"shape": f"{workers}C"},
        environment={"kind": "fake", "slots": slots},
    )
    start = RunStart(gpus=fake_gpus(workers), evaluation_tasks=TASKS)
    world = FakeWorld(recipe, engine=ENGINE, script=by_seed, start=start)
    return world, play(world)


def numbers(result: EvaluationResult | None) -> tuple[object, ...]:
    assert result is not None
    return (result.success, result.reward_mean, result.rollouts, result.faults, result.success_by_task)


def test_two_evaluations_of_the_same_weights_are_the_same_to_the_token() -> None:
    world, result = evaluated()
    assert numbers(result.before) == numbers(result.after)
    calls = [(call.task, call.call, call.text) for call in world.environments.calls if call.call in ("reset", "step")]
    half = len(calls) // 2
    assert sorted(calls[:half]) == sorted(calls[half:])
    assert result.before is not None
    assert result.before.success is not None
    assert 0 < result.before.success < 1
    actions = [text for _, call, text in calls[:half] if call == "step"]
    assert len(set(actions)) == len(actions) == 15 * 2  # no two rollouts draw alike


@pytest.mark.parametrize(("workers", "slots"), [(1, 64), (3, 2)])
def test_an_evaluation_does_not_depend_on_the_fleet(workers: int, slots: int) -> None:
    _, want = evaluated()
    world, got = evaluated(workers=workers, slots=slots)
    assert numbers(got.before) == numbers(want.before)
    assert world.environments.open_max <= slots


def test_waiting_for_a_slot_is_no_part_of_a_rollouts_time() -> None:
    recipe = fake_recipe(
        run={"steps": 0},
        evaluation={"rollouts_per_task": 5},
        environment={"kind": "fake", "slots": 2},
        rollout={"trajectory_timeout_s": 9},
    )
    start = RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS)
    result = play(FakeWorld(recipe, engine=ENGINE, script=lambda _t, _a: Behaviour(step_s=7, reward=1.0), start=start))
    # 15 rollouts of 8 s, two at a time.
    assert numbers(result.before) == (1.0, 1.0, 15, 0, (1.0, 1.0, 1.0))


def test_an_evaluation_is_of_the_version_that_it_says_and_no_part_of_training() -> None:
    world, result = evaluated(steps=3)
    assert result.before is not None
    assert result.after is not None
    assert (result.before.version, result.after.version) == (0, 3)
    versions = {entry.trajectory: entry.versions for entry in world.journal.of(TurnEntry)}
    assert {v for name, runs in versions.items() if name.startswith("after3.") for v, _ in runs} == {3}
    assert all(s.trajectory.startswith("g") for batch in world.trainer.batches for s in batch.samples)
    assert len({name for name in versions if name.startswith(("before0.", "after3."))}) == 2 * 15


def test_training_begins_where_the_evaluation_before_it_ends() -> None:
    recipe = fake_recipe(run={"steps": 1}, evaluation={"rollouts_per_task": 5})
    start = RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS)
    world = FakeWorld(recipe, engine=ENGINE, script=lambda _t, _a: Behaviour(step_s=7, reward=1.0), start=start)
    play(world)
    # 15 rollouts at once: a turn of 8 tokens in 1 s, and 7 s of the environment.
    [baseline] = world.baselines
    assert baseline.at_s == pytest.approx(8)
    assert baseline.generated_tokens == 15 * 8
    assert set(baseline.rollout_busy_s) == set(baseline.rollout_iterations) == {0, 1}
    [step] = world.steps
    assert step.router.generated_tokens >= baseline.generated_tokens + 4 * 8


def test_rollouts_with_a_fault_are_left_out_of_an_evaluation_and_counted() -> None:
    def script(task: Task, attempt: int) -> Behaviour:
        return Behaviour(reward=1.0, fault=Fault.RAISE if task.id == "evaluation#1" and attempt < 2 else None)

    recipe = fake_recipe(run={"steps": 0}, evaluation={"rollouts_per_task": 4})
    world = FakeWorld(recipe, script=script, start=RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS))
    result = play(world)
    assert numbers(result.before) == (1.0, 1.0, 10, 2, (1.0, 1.0, 1.0))
    assert result.faults == {}
    warnings = [text for name, text in world.stages if name == "warning"]
    assert warnings == ["evaluation before training: 2 of 12 rollouts ended with a fault and do not count"]


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_run_from_a_checkpoint_is_not_evaluated_before_training_again(is_restored: bool) -> None:
    # One that failed before its first checkpoint begins anew when it is resumed, so that it needs the number.
    recipe = fake_recipe(run={"steps": 0}, evaluation={"rollouts_per_task": 1})
    start = RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS, incarnation=1, is_restored=is_restored)
    result = play(FakeWorld(recipe, script=by_seed, start=start))
    assert (result.before is None) == is_restored
    assert result.after is not None


def test_an_evaluation_in_which_everything_fails_has_no_success_and_says_why() -> None:
    recipe = fake_recipe(run={"steps": 0}, evaluation={"rollouts_per_task": 2})
    world = FakeWorld(
        recipe,
        script=lambda _t, _a: Behaviour(fault=Fault.NONSENSE),
        start=RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS),
    )
    result = play(world)
    assert numbers(result.before) == (None, None, 0, 6, (None, None, None))


def test_a_task_whose_rollouts_all_fail_has_no_success_of_its_own() -> None:
    recipe = fake_recipe(run={"steps": 0}, evaluation={"rollouts_per_task": 2})
    world = FakeWorld(
        recipe,
        script=lambda task, _: Behaviour(reward=1.0, fault=Fault.RAISE if task.id == "evaluation#1" else None),
        start=RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS),
    )
    assert numbers(play(world).before) == (1.0, 1.0, 4, 2, (1.0, None, 1.0))


def ended(status: TrajectoryStatus, success: bool | None) -> Trajectory:
    return Trajectory(
        id=TrajectoryId("t"),
        group=GroupId("g"),
        task=TASKS[0],
        status=status,
        turns=(),
        reward=0.5,
        success=success,
        started_s=0.0,
        ended_s=1.0,
    )


DONE, CUT, FAULT = TrajectoryStatus.DONE, TrajectoryStatus.TRUNCATED_TURNS, TrajectoryStatus.ENV_RAISED


@pytest.mark.parametrize(
    ("rows", "success", "by_task"),
    [
        ([[(DONE, True), (CUT, None)], [(DONE, False)]], 1 / 3, (0.5, 0.0)),
        ([[(DONE, None), (CUT, None)], [(DONE, None)]], None, (None, None)),
        ([[(CUT, None)], [(CUT, None)]], 0.0, (0.0, 0.0)),
        ([[(FAULT, None)], [(DONE, True)]], 1.0, (None, 1.0)),
    ],
    ids=["told", "not told", "all truncated", "a fault"],
)
def test_success_is_known_only_where_an_environment_tells_it(
    rows: list[list[tuple[TrajectoryStatus, bool | None]]], success: float | None, by_task: tuple[float | None, ...]
) -> None:
    result = evaluation._result(WeightVersion(0), [[ended(*one) for one in row] for row in rows])
    assert (result.success, result.success_by_task) == (success, by_task)


def test_trajectories_of_evaluations_have_names_of_their_own() -> None:
    recipe = fake_recipe(run={"steps": 0}, evaluation={"rollouts_per_task": 1})
    names: list[str] = []
    for incarnation in (0, 1, 2):  # the journal of a resumed run goes on in the same files
        start = RunStart(
            gpus=fake_gpus(2), evaluation_tasks=TASKS, incarnation=incarnation, is_restored=incarnation == 2
        )
        world = FakeWorld(recipe, script=by_seed, start=start)
        play(world)
        names += [entry.trajectory for entry in world.journal.of(TrajectoryEntry)]
    assert len(names) == len(set(names)) == (2 + 2 + 1) * 3


def test_a_recipe_without_evaluation_plays_no_task() -> None:
    start = RunStart(gpus=fake_gpus(2), evaluation_tasks=TASKS)
    world = FakeWorld(fake_recipe(run={"steps": 0}), script=by_seed, start=start)
    assert play(world).before is None
    assert world.environments.calls == []
