"""Several policies side by side: one column each, over what seeds gave, and beside it how that compares with the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pearl.records.journal import Json
from pearl.sim.leases import Availability
from pearl.sim.summary import Figures, figures_json
from pearl.sim.tally import Moment
from pearl.units import format_duration

Pick = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of a comparison, as it comes from the process that simulated it."""

    figures: Figures
    timeline: tuple[Moment, ...]
    steps_s: tuple[float, ...]
    """Ends of training steps."""
    availability: Availability
    """GPUs from outside; empty where all of them are there all the time."""
    wall_s: float
    """Real time that it took."""


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    pick: Pick
    text: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _hours(value: float) -> str:
    return f"{value:,.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _gpu_hours(owner: str) -> _Row:
    return _Row(f"GPU-hours {owner}", lambda figures: figures.gpu_hours.get(owner), _hours)


def _workers(name: str, label: str) -> _Row:
    return _Row(label, lambda figures: figures.workers.get(name), _count)


ROWS = (
    _Row("throughput, tokens/s", lambda figures: figures.tokens_per_s, _count),
    _Row("steps", lambda figures: figures.steps, _count),
    _Row("step, mean", lambda figures: figures.step_s, format_duration),
    _Row("step, p50", lambda figures: figures.step_s_p50, format_duration),
    _Row("step, p90", lambda figures: figures.step_s_p90, format_duration),
    *(_gpu_hours(owner) for owner in ("reserved", "external", "training", "borrowed")),
    _Row("price", lambda figures: figures.price, _hours),
    _Row("price per million trained tokens", lambda figures: figures.price_per_mtoken, _hours),
    _Row("rollout GPUs idle", lambda figures: figures.rollout_idle_share, _percent),
    _Row("training GPUs idle", lambda figures: figures.training_idle_share, _percent),
    _workers("started", "workers started"),
    _workers("stopped", "workers stopped"),
    _workers("withdrawn", "workers withdrawn with their GPUs"),
    _workers("lost", "workers lost"),
    _workers("roles", "roles changed"),
    _workers("borrowed", "workers borrowed"),
    _workers("returned", "workers returned"),
    _Row("changes failed", lambda figures: figures.plans.get("failed"), _count),
    _Row("tokens computed again", lambda figures: figures.recomputed_tokens, _count),
    _Row("trajectories truncated", lambda figures: figures.truncated, _count),
    _Row("trajectories lost", lambda figures: figures.lost, _count),
)


def means(runs: Sequence[Figures], pick: Pick) -> float | None:
    """Over seeds; where some have a number, the others count as 0. None: none has."""
    found = [pick(figures) for figures in runs]
    if all(value is None for value in found):
        return None
    return sum(value or 0.0 for value in found) / len(found)


def comparison_text(columns: Mapping[str, Sequence[Figures] | str]) -> str:
    """A table: policy -> its runs, or why there are none. Rows that say nothing of any policy are left out."""
    runs = {policy: found for policy, found in columns.items() if not isinstance(found, str)}
    first = next(iter(columns))
    table = [["", *columns]]
    for row in ROWS:
        values = {policy: means(found, row.pick) for policy, found in runs.items()}
        if not any(values.values()):
            continue
        cells = [
            "failed"
            if policy not in runs
            else _cell(row, runs[policy], values[policy], values.get(first), policy == first)
            for policy in columns
        ]
        table.append([row.name, *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines)


def _cell(row: _Row, runs: Sequence[Figures], value: float | None, base: float | None, is_first: bool) -> str:
    if value is None:
        return "-"
    text = row.text(value)
    if row is ROWS[0] and len(runs) > 1:
        low, high = (choose(figures.tokens_per_s for figures in runs) for choose in (min, max))
        text += f" [{low:,.0f} .. {high:,.0f}]"
    return text if is_first or not base else f"{text} (x{value / base:.2f})"


def comparison_json(columns: Mapping[str, Sequence[Outcome] | str]) -> list[Json]:
    """Each policy with its mean numbers, what they are over those of the first, and its runs; or with why there are none."""
    first = next(iter(columns.values()))
    base = [] if isinstance(first, str) else [outcome.figures for outcome in first]
    told: list[Json] = []
    for policy, found in columns.items():
        if isinstance(found, str):
            told.append({"policy": policy, "failed": found})
            continue
        runs = [outcome.figures for outcome in found]
        mean: dict[str, Json] = {}
        over: dict[str, Json] = {}
        for row in ROWS:
            value, of_first = means(runs, row.pick), means(base, row.pick) if base else None
            mean[row.name] = value
            over[row.name] = value / of_first if value is not None and of_first else None
        seeds: list[Json] = [figures_json(figures) for figures in runs]
        told.append({"policy": policy, "mean": mean, "over_first": over, "runs": seeds})
    return told
