"""What the steps of a run add up to. Whole runs: tests/integration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pearl.cluster.job import _Job
from pearl.config.recipe import Recipe
from pearl.pipeline.evaluation import EvaluationResult
from pearl.pipeline.router import RouterCounts
from pearl.pipeline.run import RunResult, RunStart
from pearl.pipeline.training_loop import Baseline, StepOutcome
from pearl.records.ids import WeightVersion
from pearl.records.training import TrainingBatch, TrainReport
from pearl.report.live import JobSummary, PlainReporter, StepReport
from pearl.report.run_folder import RunFolder


def recipe(folder: Path, **sections: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"model": {"path": str(folder)}, "environment": {"kind": "guess_number"}, **sections})


STEP = StepOutcome(
    at_s=2.0,
    batch=TrainingBatch(version=WeightVersion(0), samples=()),
    report=TrainReport(version=WeightVersion(1), train_s=1.0, samples=0, trained_tokens=0, metrics={}),
    wait_s=1.0,
    publish_s=0.0,
    reward_mean=0.0,
    success_mean=None,
    active_trajectories=0,
    router=RouterCounts(),
    faults={},
    rollout_busy_s={0: 1.0, 1: 1.0},
    rollout_iterations={0: (90, 5), 1: (30, 25)},
)
RESULT = RunResult(
    version=WeightVersion(1),
    wall_s=2.0,
    before=None,
    after=None,
    generated_tokens=0,
    turns=0,
    continued_turns=0,
    worker_restarts=0,
    worker_losses=0,
    handoffs=7,
    appended_turns=3,
    faults={},
    group_ends={},
)
START = RunStart(gpus=())


class ListReporter:
    """Keeps the numbers of every step."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []

    def stage(self, name: str, text: str) -> None: ...

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def close(self) -> None: ...


class TestBaseline:
    """Start-up and an evaluation took 100 s and drew 5,000 tokens; then come two steps of 2 s."""

    @pytest.fixture
    def told(self, tiny_model: Path, tmp_path: Path) -> tuple[list[StepReport], JobSummary]:
        reporter = ListReporter()
        job = _Job(recipe(tiny_model, engine={"pacing": "p.json"}), RunFolder(tmp_path), reporter, True)
        job.totals.begin(
            Baseline(
                at_s=100.0,
                generated_tokens=5000,
                rollout_busy_s={0: 60.0, 1: 70.0},
                rollout_iterations={0: (1000, 900), 1: (1000, 800)},
            )
        )
        for at_s, tokens, busy_s, iterations in (
            (102.0, 5400, {0: 61.0, 1: 70.5}, {0: (1010, 901), 1: (1010, 801)}),
            (104.0, 5600, {0: 62.0, 1: 72.5}, {0: (1020, 901), 1: (1020, 801)}),
        ):
            counts = RouterCounts()
            counts.generated_tokens = tokens
            job._on_step(
                replace(
                    STEP, at_s=at_s, router=counts, rollout_busy_s=busy_s, rollout_iterations=iterations, wait_s=0.5
                )
            )
        start = replace(START, version=WeightVersion(6), is_restored=True)
        result = replace(RESULT, version=WeightVersion(8), wall_s=5.0, generated_tokens=9999)
        return reporter.steps, job._summary(start, result, 0)

    def test_the_first_step_is_as_long_as_it_is(self, told: tuple[list[StepReport], JobSummary]) -> None:
        steps, _ = told
        assert [step.tokens_per_s for step in steps] == [200.0, 100.0]
        assert [step.trainer_idle_frac for step in steps] == [0.25, 0.25]
        assert [step.rollout_idle_frac for step in steps] == [1 - 1.5 / 4, 1 - 3 / 4]

    def test_the_summary_is_about_training(self, told: tuple[list[StepReport], JobSummary]) -> None:
        _, summary = told
        assert (summary.steps, summary.new_steps) == (8, 2)
        assert summary.tokens_per_s == (400 + 200) / 5
        assert summary.trainer_idle_frac == 1 / 5
        assert summary.rollout_idle_frac == 1 - 4.5 / 8
        assert summary.late_iterations_frac == 2 / 40


def test_evaluations_are_told_with_what_they_rest_on(tiny_model: Path, tmp_path: Path) -> None:
    before = EvaluationResult(
        version=WeightVersion(0), success=0.5, reward_mean=0.5, rollouts=10, faults=2, success_by_task=(0.5,)
    )
    after = replace(before, success=None, reward_mean=None, rollouts=0, faults=12, success_by_task=(None,))
    job = _Job(recipe(tiny_model), RunFolder(tmp_path), PlainReporter(1), False)
    summary = job._summary(START, replace(RESULT, before=before, after=after), 0)
    assert (summary.success_before, summary.rollouts_before, summary.faults_before) == (0.5, 10, 2)
    assert (summary.success_after, summary.rollouts_after, summary.faults_after) == (None, 0, 12)


class TestLateIterations:
    @pytest.mark.parametrize(("pacing", "want"), [("p.json", 0.25), (None, None)])
    def test_the_summary_has_their_share_of_a_paced_run(
        self, tiny_model: Path, tmp_path: Path, pacing: str | None, want: float | None
    ) -> None:
        job = _Job(recipe(tiny_model, engine={"pacing": pacing}), RunFolder(tmp_path), PlainReporter(1), False)
        job._on_step(STEP)
        assert job._summary(START, RESULT, 0).late_iterations_frac == want

    def test_no_iteration_at_all(self, tiny_model: Path, tmp_path: Path) -> None:
        job = _Job(recipe(tiny_model, engine={"pacing": "p.json"}), RunFolder(tmp_path), PlainReporter(1), False)
        assert job._summary(START, RESULT, 0).late_iterations_frac == 0
