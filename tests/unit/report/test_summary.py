"""The closing summary."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pearl.report.live import JobSummary
from pearl.report.summary import render_summary, write_summary

SUMMARY = JobSummary(
    folder=Path("runs/guess-20250131-120000"),
    steps=1200,
    new_steps=1200,
    wall_s=3725.0,
    success_before=0.334,
    success_after=0.938,
    trained_tokens=1_234_567,
    tokens_per_s=5012.3,
    stale_token_frac=0.612,
    staleness_max=1,
    trainer_idle_frac=0.12,
    rollout_idle_frac=0.053,
    faults={"timed_out": 1, "env_hung": 2},
    restarts=0,
)


class TestSummary:
    def test_whole(self) -> None:
        assert render_summary(SUMMARY) == (
            "success     0.33 -> 0.94\n"
            "run folder  runs/guess-20250131-120000\n"
            "\n"
            "steps       1,200 in 1 h 02 min\n"
            "tokens      1,234,567 trained, 5,012 generated per second\n"
            "staleness   61 % of trained tokens stale, by 1 at most\n"
            "idle        trainer 12 %, rollout 5 %\n"
            "faults      2 env_hung, 1 timed_out\n"
            "restarts    none"
        )

    @pytest.mark.parametrize(
        ("before", "after", "text"),
        [
            (None, None, "not evaluated (evaluation.rollouts_per_task is 0, or the environment does not tell success)"),
            (None, 0.5, "0.50 (not evaluated before training)"),
            (0.5, None, "0.50 before training (not evaluated after it)"),
            (0.0, 1.0, "0.00 -> 1.00"),
        ],
    )
    def test_success_comes_first(self, before: float | None, after: float | None, text: str) -> None:
        first, *_ = render_summary(replace(SUMMARY, success_before=before, success_after=after)).splitlines()
        assert first == f"success     {text}"

    @pytest.mark.parametrize(
        ("before", "after", "text"),
        [
            ((0.42, 288, 0), (0.0, 271, 17), "0.42 -> 0.00 (271 of 288 rollouts)"),
            ((0.42, 271, 17), (0.5, 288, 0), "0.42 (271 of 288 rollouts) -> 0.50"),
            ((0.42, 288, 0), (None, 0, 1288), "0.42 -> unknown (0 of 1,288 rollouts)"),
            ((None, 0, 0), (0.5, 1, 1), "0.50 (1 of 2 rollouts) (not evaluated before training)"),
            ((None, 0, 4), (None, 0, 4), "unknown (0 of 4 rollouts) -> unknown (0 of 4 rollouts)"),
        ],
    )
    def test_faults_of_an_evaluation_are_told(
        self, before: tuple[float | None, int, int], after: tuple[float | None, int, int], text: str
    ) -> None:
        summary = replace(
            SUMMARY,
            success_before=before[0],
            rollouts_before=before[1],
            faults_before=before[2],
            success_after=after[0],
            rollouts_after=after[1],
            faults_after=after[2],
        )
        assert render_summary(summary).splitlines()[0] == f"success     {text}"

    def test_steps_of_a_resumed_run_are_told_apart(self) -> None:
        text = render_summary(replace(SUMMARY, new_steps=3, wall_s=0.6))
        assert "\nsteps       3 in 0.6 s (1,200 since the run began)\n" in text

    def test_nothing_stale_and_restarts(self) -> None:
        text = render_summary(replace(SUMMARY, stale_token_frac=0.0, staleness_max=0, restarts=3, faults={}))
        assert "staleness   none: every token was drawn by the weights that it trained" in text
        assert "faults      none" in text
        assert text.endswith("restarts    3")

    def test_hand_offs_are_told_where_there_are_any(self) -> None:
        assert "hand-offs" not in render_summary(SUMMARY)
        text = render_summary(replace(SUMMARY, handoffs=1234, appended_turns=5))
        assert "\nhand-offs   1,234 turns handed over, 5 appended" in text

    @pytest.mark.parametrize(("frac", "shown"), [(0.034, "3 %"), (0.0, "0 %")])
    def test_late_iterations_close_a_paced_run(self, frac: float, shown: str) -> None:
        text = render_summary(replace(SUMMARY, late_iterations_frac=frac))
        assert text.endswith(f"\nlate        {shown} of iterations took longer than engine.pacing says")

    @pytest.mark.parametrize("frac", [0.25, None])
    def test_programs_find_them_too(self, tmp_path: Path, frac: float | None) -> None:
        write_summary(replace(SUMMARY, folder=tmp_path, late_iterations_frac=frac))
        assert json.loads((tmp_path / "summary.json").read_text())["late_iterations_frac"] == frac
