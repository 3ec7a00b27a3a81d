"""What a run shows while it goes on and when it ends: one frozen record per training step, any number of reporters.

Reporters only show: they decide nothing, and what they show is derived from the journal's own sources.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from pearl.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step, as people follow it."""

    step: int
    """1-based; the step that just ended."""
    version: int
    """Weight version after the step."""
    elapsed_s: float
    """Since the run began."""
    reward_mean: float
    """Of the batch."""
    success_mean: float | None
    """Of the batch, 0..1; None where the environment does not know."""
    tokens_per_s: float
    """Generated since the last step."""
    staleness_mean: float
    """Of the batch, over trained tokens, in versions."""
    staleness_max: int
    """Of the batch, in versions."""
    stale_token_frac: float
    """Of the batch: trained tokens with staleness > 0, 0..1."""
    trainer_idle_frac: float
    """Share of the time since the last step that the trainer waited, 0..1."""
    rollout_idle_frac: float
    """The same for rollout workers, averaged over them, 0..1."""
    in_flight_trajectories: int
    faults: Mapping[str, int]
    """Trajectory status -> count since the run began; faults only."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the trainer: loss, entropy, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a run came to."""

    folder: Path
    """The run folder."""
    steps: int
    """Training steps done, over all times the run was resumed."""
    wall_s: float
    """Of training, start-up and evaluation left out."""
    success_before: float | None
    """0..1; None when not evaluated."""
    success_after: float | None
    """0..1; None when not evaluated."""
    trained_tokens: int
    tokens_per_s: float
    """Generated, over `wall_s`."""
    stale_token_frac: float
    """Trained tokens with staleness > 0, 0..1."""
    staleness_max: int
    trainer_idle_frac: float
    """0..1 of `wall_s`."""
    rollout_idle_frac: float
    """0..1 of `wall_s`, averaged over rollout workers."""
    faults: Mapping[str, int]
    """Trajectory status -> count; faults only."""
    restarts: int
    """Processes restarted after a failure."""
    late_iterations_frac: float | None = None
    """Iterations that took longer than `engine.pacing` says, 0..1; None without pacing."""
    handoffs: int = 0
    """Turns whose KV went from a prefill worker to a decode worker."""
    appended_turns: int = 0
    """Turns whose new tokens a decode worker computed itself."""


class Reporter(Protocol):
    """Follows a run; calls never fail the run for a reason of display."""

    def stage(self, name: str, text: str) -> None:
        """The run does something else now: `stage("warmup", "supervised step 20 of 200")`."""

    def step(self, report: StepReport) -> None:
        """A training step ended."""

    def close(self) -> None:
        """The run is over; harmless when repeated."""


class MultiReporter:
    """Several reporters as one."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def stage(self, name: str, text: str) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.stage(name, text)

    def step(self, report: StepReport) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.step(report)

    def close(self) -> None:
        """Close all, the last one opened first."""
        for reporter in reversed(self._reporters):
            reporter.close()


class PlainReporter:
    """One line per training step and per stage, for logs and pipes."""

    def __init__(self, steps: int, file: IO[str] | None = None) -> None:
        """`steps` is the number of training steps that the run aims at."""
        self._steps, self._file = steps, file

    def stage(self, name: str, text: str) -> None:
        """`evaluation  before training: 16 tasks, 64 rollouts`."""
        self._print(stage_line(name, text))

    def step(self, report: StepReport) -> None:
        """One aligned line."""
        self._print(plain_line(report, self._steps))

    def close(self) -> None:
        """Nothing to do."""

    def _print(self, line: str) -> None:
        # Looked up at every call, so that a redirected stdout is followed; flushed, so that `tail -f` is live. A reader
        # that went away (`| head`) must not end the run.
        with contextlib.suppress(OSError):
            print(line, file=self._file or sys.stdout, flush=True)


def stage_line(name: str, text: str) -> str:
    """A stage on one line."""
    return f"{name:<10}  {text}"


def plain_line(report: StepReport, steps: int) -> str:
    """A training step on one line; columns stay where they are from step to step."""
    width = len(str(steps))
    parts = [
        f"step {report.step:>{width}}/{steps}",
        f"{format_duration(report.elapsed_s):>12}",
        f"success {_success(report.success_mean)}",
        f"reward {report.reward_mean:6.3f}",
        f"{report.tokens_per_s:>7,.0f} tokens/s",
        f"staleness {report.staleness_mean:4.2f} max {report.staleness_max}",
        f"idle trainer {percent(report.trainer_idle_frac)} rollout {percent(report.rollout_idle_frac)}",
        f"in flight {report.in_flight_trajectories:>4}",
    ]
    if report.faults:
        parts.append(f"faults {fault_text(report.faults)}")
    return "  ".join(parts)


def percent(fraction: float) -> str:
    """`  7 %`, `100 %`: five characters."""
    return f"{fraction * 100:3.0f} %"


def fault_text(faults: Mapping[str, int]) -> str:
    """`3 env_hung, 1 timed_out`, most frequent first; `none`."""
    counted = sorted(
        ((count, status) for status, count in faults.items() if count), key=lambda item: (-item[0], item[1])
    )
    return ", ".join(f"{count} {status}" for count, status in counted) or "none"


def _success(value: float | None) -> str:
    return "   –" if value is None else f"{value:4.2f}"
