"""What simulated runs came to, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from pearl.records.journal import Json
from pearl.sim.simulate import Simulated
from pearl.units import format_duration


def summary_json(run: Simulated) -> dict[str, Json]:
    """One run; times in virtual seconds."""
    tally, steps = run.tally, run.tally.steps
    hours = tally.gpu_hours(run.seconds)
    training_h = hours.get("training", 0.0)
    return {
        "policy": run.policy,
        "seconds": run.seconds,
        "steps": len(steps),
        "step_s": _step_s(run),
        "tokens_per_s": run.tokens_per_s,
        "generated_tokens": tally.generated_tokens,
        "trained_tokens": run.trained_tokens,
        "recomputed_tokens": max(0, tally.computed_tokens - tally.prompt_tokens),
        "turns": tally.turns,
        "trajectories": dict(sorted(tally.ends.items())),
        "gpu_hours": {name: hours[name] for name in sorted(hours)},
        "trainer_idle_share": 1 - run.trainer_busy_s / run.seconds if training_h and run.seconds else None,
        "trainer_wait_s": sum(step.wait_s for step in steps),
        "decisions": dict(sorted(tally.reasons.items())),
        "changes": dict(sorted(tally.changes.items())),
        "trained_twice": run.trained_twice,
        "stalls": len(run.stalls),
    }


def summary_text(run: Simulated) -> str:
    """One run, a line for each of what matters."""
    tally = run.tally
    hours = tally.gpu_hours(run.seconds)
    step_s = _step_s(run)
    ends = ", ".join(f"{count} {status}" for status, count in sorted(tally.ends.items()))
    changes = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.changes.items()))
    rows = [
        ("policy", run.policy),
        ("virtual time", format_duration(run.seconds)),
        ("steps", f"{len(tally.steps)}" + ("" if step_s is None else f", mean {format_duration(step_s)}")),
        ("throughput", f"{run.tokens_per_s:,.0f} tokens/s of rollout and training"),
        ("trajectories", ends or "none"),
        ("recomputed", f"{max(0, tally.computed_tokens - tally.prompt_tokens):,} prompt tokens"),
        ("GPU-hours", ", ".join(f"{hours[name]:.2f} {name}" for name in sorted(hours)) or "none"),
        ("changes", changes or "none"),
    ]
    if run.stalls:
        first = run.stalls[0]
        rows.append(("stalls", f"{len(run.stalls)}; the first after {format_duration(first.at_s)}: {first.tasks}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def comparison_text(runs: Sequence[Simulated]) -> str:
    """Several policies side by side; throughput over that of the first as well."""
    base = runs[0].tokens_per_s
    rows = [("policy", "tokens/s", "of the first", "steps", "step", "GPU-hours of rollout", "borrowed", "changes")]
    for run in runs:
        hours, step_s = run.tally.gpu_hours(run.seconds), _step_s(run)
        rows.append(
            (
                run.policy,
                f"{run.tokens_per_s:,.0f}",
                f"{run.tokens_per_s / base:.3f}" if base else "-",
                str(len(run.tally.steps)),
                "-" if step_s is None else f"{step_s:.1f} s",
                f"{hours.get('serving', 0.0):.2f}",
                f"{hours.get('borrowed', 0.0):.2f}",
                str(sum(run.tally.changes.values())),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _step_s(run: Simulated) -> float | None:
    """Mean over steps, the first one, which has the start in it, left out where there are others."""
    ends = [step.at_s for step in run.tally.steps]
    if len(ends) < 2:
        return ends[0] if ends else None
    return (ends[-1] - ends[0]) / (len(ends) - 1)
