"""What a run shows, rendered to text."""

import errno
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pearl.report.live import JobSummary, MultiReporter, PlainReporter, Reporter, StepReport, fault_text, plain_line
from pearl.report.panel import RichReporter, sparkline
from pearl.report.summary import render_summary

REPORT = StepReport(
    step=7,
    version=7,
    elapsed_s=125.0,
    reward_mean=0.5312,
    success_mean=0.4375,
    tokens_per_s=1234.4,
    staleness_mean=0.618,
    staleness_max=1,
    stale_token_frac=0.612,
    trainer_idle_frac=0.124,
    rollout_idle_frac=1.0,
    in_flight_trajectories=128,
    faults={},
    metrics={"loss": -0.0123, "entropy": 0.81},
)
SUMMARY = JobSummary(
    folder=Path("runs/guess-20250131-120000"),
    steps=1200,
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


def rendered(reporter: RichReporter, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(reporter.render())
    return capture.get().splitlines()


def panel(width: int = 100, steps: int = 60) -> tuple[RichReporter, Console]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    clock_s = iter([0.0, *[125.0] * 100])
    return RichReporter("guess-20250131-120000", steps, console, lambda: next(clock_s)), console


class Terminal(io.StringIO):
    """A terminal that can go away."""

    is_gone = False

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


class TestPlain:
    def test_one_line_per_step(self) -> None:
        assert plain_line(REPORT, 100) == (
            "step   7/100    2 min 05 s  success 0.44  reward  0.531    1,234 tokens/s  staleness 0.62 max 1  "
            "idle trainer  12 % rollout 100 %  in flight  128"
        )

    def test_columns_stay_in_place(self) -> None:
        later = replace(
            REPORT,
            step=100,
            elapsed_s=7384.0,
            success_mean=None,
            reward_mean=-1.25,
            tokens_per_s=9.9,
            trainer_idle_frac=0,
        )
        first, second = plain_line(REPORT, 100), plain_line(later, 100)
        for label in ("success", "reward", "tokens/s", "staleness", "idle", "in flight"):
            assert first.index(label) == second.index(label), label

    def test_faults_come_last(self) -> None:
        line = plain_line(replace(REPORT, faults={"env_hung": 2, "timed_out": 1}), 100)
        assert line.endswith("in flight  128  faults 2 env_hung, 1 timed_out")

    def test_lines_are_written_as_they_come(self) -> None:
        file = io.StringIO()
        reporter = PlainReporter(100, file)
        reporter.stage("evaluation", "before training: 16 tasks")
        reporter.step(REPORT)
        reporter.close()
        assert file.getvalue() == f"evaluation  before training: 16 tasks\n{plain_line(REPORT, 100)}\n"

    def test_a_reader_that_went_away_ends_nothing(self) -> None:
        file = Terminal()
        file.is_gone = True
        PlainReporter(100, file).step(REPORT)

    def test_standard_output_is_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        PlainReporter(100).stage("warmup", "supervised step 1")
        assert capsys.readouterr().out == "warmup      supervised step 1\n"


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({}, "none"),
        ({"env_hung": 0}, "none"),
        ({"timed_out": 1, "env_hung": 3, "env_lost": 1}, "3 env_hung, 1 env_lost, 1 timed_out"),
    ],
)
def test_faults_most_frequent_first(faults: dict[str, int], text: str) -> None:
    assert fault_text(faults) == text


class TestSparkline:
    @pytest.mark.parametrize(
        ("values", "curve"),
        [
            ([], ""),
            ([0, 1], "▁█"),
            ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
            ([5, 5, 5], "▁▁▁"),
            ([math.nan, math.nan], "  "),
            ([0, math.nan, math.inf, -math.inf, 1], "▁▁█▁█"),
        ],
    )
    def test_scale_of_the_values(self, values: list[float], curve: str) -> None:
        assert sparkline(values) == curve

    def test_given_scale(self) -> None:
        assert sparkline([0.5, 1.0, 2.0, -1.0], low=0, high=1) == "▅██▁"


class TestPanel:
    def test_before_the_first_step(self) -> None:
        reporter, console = panel()
        lines = rendered(reporter, console)
        assert "pearl guess-20250131-120000" in lines[0]
        assert any("0 of 60" in line and "2 min 05 s" in line for line in lines)
        assert any("starting" in line for line in lines)
        assert not any("success" in line for line in lines)

    def test_the_newest_step_is_shown(self) -> None:
        reporter, console = panel()
        reporter.stage("training", "up to 60 steps")
        for step in range(1, 8):
            reporter.step(replace(REPORT, step=step, reward_mean=step / 10, faults={"env_hung": 2}))
        reporter.close()
        text = "\n".join(rendered(reporter, console))
        for part in (
            "7 of 60",
            "success     0.44       ▄▄▄▄▄▄▄",
            "reward      0.700      ▁▂▃▅▆▇█",
            "tokens/s    1,234      ███████",
            "staleness   mean 0.62   max 1   61 % of tokens stale",
            "idle        trainer  12 %   rollout 100 %",
            "in flight   128 trajectories",
            "faults      2 env_hung",
            "trainer     loss -0.0123   entropy 0.81",
            "training: up to 60 steps",
        ):
            assert part in text, part

    def test_an_environment_that_knows_no_success(self) -> None:
        reporter, console = panel()
        reporter.step(replace(REPORT, success_mean=None, metrics={}))
        reporter.close()
        text = "\n".join(rendered(reporter, console))
        assert "success" not in text
        assert "reward" in text

    @pytest.mark.parametrize("width", [40, 60, 80, 200])
    def test_every_width_is_whole(self, width: int) -> None:
        reporter, console = panel(width)
        for step in range(1, 61):
            reporter.step(replace(REPORT, step=step))
        reporter.close()
        lines = rendered(reporter, console)
        assert {len(line) for line in lines} == {min(width, 96)}
        assert not any("…" in line for line in lines)

    def test_a_run_without_steps(self) -> None:
        reporter, console = panel(steps=0)
        assert any("0 of 0" in line for line in rendered(reporter, console))

    def test_a_terminal_that_goes_away_ends_nothing(self) -> None:
        terminal = Terminal()
        console = Console(file=terminal, force_terminal=True)
        reporter = RichReporter("x", 1, console)
        reporter.stage("training", "on")
        terminal.is_gone = True
        reporter.step(REPORT)
        reporter.step(REPORT)
        reporter.close()
        reporter.close()
        assert console.quiet


class TestMulti:
    def test_all_are_told_and_closed_in_reverse(self) -> None:
        calls: list[tuple[str, object]] = []

        class Recorder:
            def __init__(self, name: str) -> None:
                self.name = name

            def stage(self, name: str, text: str) -> None:
                calls.append((self.name, (name, text)))

            def step(self, report: StepReport) -> None:
                calls.append((self.name, report))

            def close(self) -> None:
                calls.append((self.name, "close"))

        reporter: Reporter = MultiReporter([Recorder("a"), Recorder("b")])
        reporter.stage("s", "t")
        reporter.step(REPORT)
        reporter.close()
        assert calls == [
            ("a", ("s", "t")), ("b", ("s", "t")), ("a", REPORT), ("b", REPORT), ("b", "close"), ("a", "close"),
        ]  # fmt: skip


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

    def test_nothing_stale_and_restarts(self) -> None:
        text = render_summary(replace(SUMMARY, stale_token_frac=0.0, staleness_max=0, restarts=3, faults={}))
        assert "staleness   none: every token was drawn by the weights that it trained" in text
        assert "faults      none" in text
        assert text.endswith("restarts    3")
