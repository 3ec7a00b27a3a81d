"""The live panel, rendered to text."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from pearl.report.panel import RichReporter, sparkline
from tests.unit.report._reports import REPORT, Terminal


def rendered(reporter: RichReporter, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(reporter.render())
    return capture.get().splitlines()


def panel(width: int = 100, steps: int = 60) -> tuple[RichReporter, Console]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    clock_s = iter([0.0, *[125.0] * 100])
    return RichReporter("guess-20250131-120000", steps, console, lambda: next(clock_s)), console


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
