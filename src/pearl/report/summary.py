"""The closing summary of a run: the number that matters first, then where everything is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from pearl.errors import RunFailed
from pearl.records.journal import Json
from pearl.report.live import JobSummary, fault_text, percent
from pearl.units import format_duration

_LABEL_WIDTH = 11


def render_summary(summary: JobSummary) -> str:
    """The summary as plain text, several lines without a final newline; the first two are the ones to read."""
    rows = [
        ("success", _success_text(summary)),
        ("run folder", str(summary.folder)),
        ("", ""),
        ("steps", _steps_text(summary)),
        ("tokens", f"{summary.trained_tokens:,} trained, {summary.tokens_per_s:,.0f} generated per second"),
        ("staleness", _staleness_text(summary)),
        ("idle", f"trainer {_percent(summary.trainer_idle_frac)}, rollout {_percent(summary.rollout_idle_frac)}"),
        ("faults", fault_text(summary.faults)),
        ("restarts", str(summary.restarts) if summary.restarts else "none"),
    ]
    if summary.handoffs or summary.appended_turns:
        rows.append(("hand-offs", f"{summary.handoffs:,} turns handed over, {summary.appended_turns:,} appended"))
    if summary.late_iterations_frac is not None:
        late = _percent(summary.late_iterations_frac)
        rows.append(("late", f"{late} of iterations took longer than engine.pacing says"))
    return "\n".join(f"{label:<{_LABEL_WIDTH}} {text}".rstrip() for label, text in rows)


def write_summary(summary: JobSummary, more: Mapping[str, Json] | None = None) -> None:
    """Write it to `summary.json` in the run folder, for programs, with whatever else there is to say.

    Raises:
        RunFailed: it cannot be written.
    """
    fields = {**dataclasses.asdict(summary), "folder": str(summary.folder), **(more or {})}
    path = summary.folder / "summary.json"
    try:
        path.write_text(json.dumps(fields, indent=2) + "\n")
    except OSError as error:
        raise RunFailed(f"{path}: cannot be written: {error.strerror or error}") from error


def _success_text(summary: JobSummary) -> str:
    before = _evaluation_text(summary.success_before, summary.rollouts_before, summary.faults_before)
    after = _evaluation_text(summary.success_after, summary.rollouts_after, summary.faults_after)
    match before, after:
        case None, None:
            return "not evaluated (evaluation.rollouts_per_task is 0, or the environment does not tell success)"
        case None, str():
            return f"{after} (not evaluated before training)"
        case str(), None:
            return f"{before} before training (not evaluated after it)"
        case _:
            return f"{before} -> {after}"


def _evaluation_text(success: float | None, rollouts: int, faults: int) -> str | None:
    """`0.94`, or `0.94 (271 of 288 rollouts)` where the others had a fault; None: there is nothing to say."""
    if success is None and not faults:
        return None
    number = "unknown" if success is None else f"{success:.2f}"
    return f"{number} ({rollouts:,} of {rollouts + faults:,} rollouts)" if faults else number


def _steps_text(summary: JobSummary) -> str:
    text = f"{summary.new_steps:,} in {format_duration(summary.wall_s)}"
    return text if summary.new_steps == summary.steps else f"{text} ({summary.steps:,} since the run began)"


def _staleness_text(summary: JobSummary) -> str:
    if summary.staleness_max == 0:
        return "none: every token was drawn by the weights that it trained"
    return f"{_percent(summary.stale_token_frac)} of trained tokens stale, by {summary.staleness_max} at most"


def _percent(fraction: float) -> str:
    return percent(fraction).strip()
