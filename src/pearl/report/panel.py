"""The live panel of a run on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pearl.report.live import StepReport, fault_text, percent
from pearl.units import format_duration

HISTORY_STEPS = 40
"""Training steps that the curves show."""

_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_PER_S = 2.0
_MAX_WIDTH = 96
_LABEL_WIDTH = 10
_VALUE_WIDTH = 9
_FRAME_WIDTH = 6
_METRICS_SHOWN = 6


class RichReporter:
    """A panel that is redrawn in place, with short curves of the last steps."""

    def __init__(
        self, title: str, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`steps` is the number of training steps that the run aims at."""
        self._title, self._steps, self._clock = title, steps, clock
        self._began_s = clock()
        self._stage = "starting"
        self._reports: deque[StepReport] = deque(maxlen=HISTORY_STEPS)
        self._console = console or Console()
        self._live = _CalmLive(
            console=self._console, get_renderable=self.render, refresh_per_second=_REFRESH_PER_S, transient=False
        )
        self._is_open = False

    def stage(self, name: str, text: str) -> None:
        """Show what the run does now."""
        self._stage = f"{name}: {text}"
        self._redraw()

    def step(self, report: StepReport) -> None:
        """Show the newest numbers."""
        self._reports.append(report)
        self._redraw()

    def close(self) -> None:
        """Leave the last panel on the screen."""
        if self._is_open:
            self._is_open = False
            with _unless_gone(self._console):
                self._live.stop()

    def render(self) -> RenderableType:
        """The panel as it is now."""
        reports = tuple(self._reports)
        width = min(_MAX_WIDTH, self._console.width)
        rows: list[RenderableType] = [self._progress(reports)]
        if reports:
            rows += ["", _curves(reports, width - _FRAME_WIDTH), "", _facts(reports[-1])]
        rows += ["", Text(self._stage, style="dim", no_wrap=True, overflow="ellipsis")]
        return Panel(
            Group(*rows),
            title=Text.assemble((" pearl ", "bold"), (f"{self._title} ", "dim")),
            title_align="left",
            border_style="dim",
            padding=(1, 2),
            width=width,
        )

    def _progress(self, reports: Sequence[StepReport]) -> RenderableType:
        done = reports[-1].step if reports else 0
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        label = Text.assemble(("step".ljust(_LABEL_WIDTH + 2), "dim"), (f"{done} of {self._steps}", "bold"))
        bar = ProgressBar(total=max(self._steps, 1), completed=done, complete_style="cyan", finished_style="green")
        grid.add_row(label, bar, format_duration(self._clock() - self._began_s))
        return grid

    def _redraw(self) -> None:
        with _unless_gone(self._console):
            if not self._is_open:
                self._is_open = True
                self._live.start()
            self._live.refresh()


class _CalmLive(Live):
    """Redrawn by a thread of its own as well, for the clock."""

    def refresh(self) -> None:
        """Draw what is shown now."""
        with _unless_gone(self.console):
            super().refresh()


@contextlib.contextmanager
def _unless_gone(console: Console) -> Iterator[None]:
    """A terminal that went away must not end the run: it gets nothing more to show."""
    try:
        yield
    except OSError:
        console.quiet = True


def _curves(reports: Sequence[StepReport], width: int) -> Table:
    last, room = reports[-1], max(width - _LABEL_WIDTH - _VALUE_WIDTH - 4, 1)
    reports = reports[-room:]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(width=_VALUE_WIDTH, no_wrap=True)
    grid.add_column(no_wrap=True, style="cyan")
    if last.success_mean is not None:
        successes = [report.success_mean or 0.0 for report in reports]
        grid.add_row("success", Text(f"{last.success_mean:.2f}", style="bold"), sparkline(successes, low=0, high=1))
    grid.add_row("reward", f"{last.reward_mean:.3f}", sparkline([report.reward_mean for report in reports]))
    speeds = [report.tokens_per_s for report in reports]
    grid.add_row("tokens/s", f"{last.tokens_per_s:,.0f}", sparkline(speeds, low=0))
    return grid


def _facts(report: StepReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(
        "staleness",
        f"mean {report.staleness_mean:.2f}   max {report.staleness_max}   "
        f"{percent(report.stale_token_frac).strip()} of tokens stale",
    )
    grid.add_row(
        "idle",
        f"trainer {percent(report.trainer_idle_frac)}   rollout {percent(report.rollout_idle_frac)}",
    )
    grid.add_row("in flight", f"{report.in_flight_trajectories:,} trajectories")
    faults = fault_text(report.faults)
    grid.add_row("faults", Text(faults, style="" if faults == "none" else "yellow"))
    if report.metrics:
        grid.add_row("trainer", _metrics_text(report.metrics))
    return grid


def _metrics_text(metrics: Mapping[str, float]) -> str:
    shown = [f"{name} {value:.3g}" for name, value in list(metrics.items())[:_METRICS_SHOWN]]
    return "   ".join(shown)


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """A curve of block characters, one per value; the scale is that of the values unless given."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return " " * len(values)
    bottom = min(finite) if low is None else low
    top = max(finite) if high is None else high
    span = top - bottom
    return "".join(_bar((value - bottom) / span if span > 0 else 0.0) for value in values)


def _bar(height: float) -> str:
    if not 0 <= height <= 1:
        height = 1.0 if height > 1 else 0.0
    return _BARS[min(int(height * len(_BARS)), len(_BARS) - 1)]
