"""How a simulation gets on, shown while it runs: virtual time, steps, GPUs, and how much faster than the clock it is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pearl.pipeline.training_loop import StepOutcome
from pearl.ports import JournalSink
from pearl.records.journal import JournalEntry
from pearl.sim.tally import Moment
from pearl.units import format_duration

LOOK_EVERY = 256
"""Journal entries between two looks at the clock: a few milliseconds of simulation."""
SPEAK_EVERY_S = 10.0
"""Between two lines where nothing can be redrawn, at least; each training step has one anyway."""
DRAW_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """How far a simulation goes."""

    steps: int
    duration_s: float | None
    """Virtual; None: until the steps are done."""

    def share(self, steps: int, now_s: float) -> float:
        """Of the way, 0..1."""
        by_steps = steps / self.steps if self.steps else 1.0
        return min(1.0, by_steps if self.duration_s is None else max(by_steps, now_s / self.duration_s))


class Shown(Protocol):
    """Where progress is shown."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def now(self, share: float, text: str) -> None:
        """How it is now; may be left out."""

    def close(self) -> None:
        """It is over."""


class NotShown:
    """For programs: nothing is."""

    def say(self, line: str) -> None:
        """Nothing."""

    def now(self, share: float, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainLines:
    """Lines for logs and pipes; a reader that went away does not end the simulation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._spoke_s = clock, clock()

    def say(self, line: str) -> None:
        """Print it."""
        self._spoke_s = self._clock()
        with contextlib.suppress(OSError):
            print(line, file=sys.stdout, flush=True)

    def now(self, share: float, text: str) -> None:
        """Print it where nothing was said for a while."""
        if self._clock() - self._spoke_s >= SPEAK_EVERY_S:
            self.say(f"{100 * share:3.0f} %  {text}")

    def close(self) -> None:
        """Nothing to do."""


class LiveLine:
    """A bar that is redrawn in place, below the lines that stay."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f} %  {task.description}"), console=console
        )
        self._task = self._progress.add_task("starting", total=1.0)
        self._progress.start()

    def say(self, line: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def now(self, share: float, text: str) -> None:
        """Redraw the bar."""
        self._progress.update(self._task, completed=share, description=text)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def shown_here(*, quiet: bool) -> Shown:
    """On a terminal a live line, else plain ones; nothing where stdout is for a program, or closed."""
    if quiet or sys.stdout is None:
        return NotShown()
    if sys.stdout.isatty():
        console = Console()
        if not console.is_dumb_terminal:
            return LiveLine(console)
    return PlainLines()


class Follower:
    """A journal sink that passes on what it gets and tells how the simulation gets on."""

    def __init__(self, sink: JournalSink, shown: Shown, aim: Aim, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._shown, self._aim, self._clock = sink, shown, aim, clock
        self._began_s = self._looked_s = clock()
        self._entries = 0
        self._steps = 0
        self.fleet: Callable[[], Moment | None] = lambda: None
        """GPUs now."""

    def write(self, entry: JournalEntry) -> None:
        """Pass it on; from time to time, tell."""
        self._sink.write(entry)
        self._entries += 1
        if self._entries % LOOK_EVERY:
            return
        now_s = self._clock()
        if now_s - self._looked_s >= DRAW_EVERY_S:
            self._looked_s = now_s
            self._shown.now(self._aim.share(self._steps, entry.at_s), self._text(entry.at_s))

    async def flush(self) -> None:
        """Of what was passed on."""
        await self._sink.flush()

    def step(self, outcome: StepOutcome, tokens_per_s: float) -> None:
        """A training step ended."""
        self._steps = outcome.report.version
        width = len(str(self._aim.steps))
        self._shown.say(
            f"step {self._steps:>{width}}/{self._aim.steps}  {format_duration(outcome.at_s):>12}"
            f"  waited {format_duration(outcome.wait_s)}, trained {format_duration(outcome.report.train_s)}"
            f"  {tokens_per_s:>7,.0f} tokens/s generated  {self._fleet_text()}  {self._speed_text(outcome.at_s)}"
        )
        self._shown.now(self._aim.share(self._steps, outcome.at_s), self._text(outcome.at_s))

    def close(self) -> None:
        """Show nothing more."""
        self._shown.close()

    def _text(self, at_s: float) -> str:
        return f"at {format_duration(at_s)}, {self._steps} steps, {self._fleet_text()}, {self._speed_text(at_s)}"

    def _speed_text(self, at_s: float) -> str:
        spent_s = self._clock() - self._began_s
        return f"{at_s / spent_s:,.0f}x real time" if spent_s > 0 else ""

    def _fleet_text(self) -> str:
        moment = self.fleet()
        if moment is None:
            return "no GPUs"
        external, borrowed = moment.owned.get("external", 0), moment.serving.get("borrowed", 0)
        return f"{sum(moment.owned.values())} GPUs ({external} external, {borrowed} borrowed)"
