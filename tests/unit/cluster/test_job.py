"""What the steps of a run add up to. Whole runs: tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.cluster.job import _Job, _Totals
from pearl.config.recipe import Recipe
from pearl.pipeline.router import RouterCounts
from pearl.pipeline.run import RunResult
from pearl.pipeline.training_loop import StepOutcome
from pearl.records.ids import WeightVersion
from pearl.records.training import TrainingBatch, TrainReport
from pearl.report.live import PlainReporter
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


class TestLateIterations:
    def test_growth_of_all_workers_is_added_up(self) -> None:
        totals = _Totals()
        totals.count_iterations({0: (100, 10), 1: (50, 0)})
        totals.count_iterations({0: (130, 11), 1: (60, 5)})
        assert (totals.iterations, totals.late_iterations) == (190, 16)

    def test_a_restarted_worker_counts_from_zero_again(self) -> None:
        totals = _Totals()
        totals.count_iterations({0: (100, 10)})
        # More late ones than before, of fewer iterations: only the iterations tell that it is another process.
        totals.count_iterations({0: (40, 12)})
        assert (totals.iterations, totals.late_iterations) == (140, 22)

    def test_a_worker_that_was_silent_for_a_step_is_not_counted_twice(self) -> None:
        totals = _Totals()
        for now in ({0: (100, 10)}, {}, {0: (150, 20)}):
            totals.count_iterations(now)
        assert (totals.iterations, totals.late_iterations) == (150, 20)

    @pytest.mark.parametrize(("pacing", "want"), [("p.json", 0.25), (None, None)])
    def test_the_summary_has_their_share_of_a_paced_run(
        self, tiny_model: Path, tmp_path: Path, pacing: str | None, want: float | None
    ) -> None:
        job = _Job(recipe(tiny_model, engine={"pacing": pacing}), RunFolder(tmp_path), PlainReporter(1), False)
        job._on_step(STEP)
        assert job._summary(RESULT, 0).late_iterations_frac == want

    def test_no_iteration_at_all(self, tiny_model: Path, tmp_path: Path) -> None:
        job = _Job(recipe(tiny_model, engine={"pacing": "p.json"}), RunFolder(tmp_path), PlainReporter(1), False)
        assert job._summary(RESULT, 0).late_iterations_frac == 0
