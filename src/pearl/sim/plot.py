"""GPUs by what they do, over time: one panel per policy, all on the same axes.

What is drawn: areas on top of each other, from GPUs that serve (decode, prefill, colocated, borrowed) over those that change and
those that train to those that idle; a line for all GPUs that were available, whether or not the run had them; a tick at the
end of each training step. Needs matplotlib, of the extra `report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pearl.errors import RunFolderError
from pearl.sim.comparison import Outcome
from pearl.sim.tally import OWNERS, Moment

AREAS: Mapping[str, str] = {
    "decode": "#2166ac",
    "prefill": "#67a9cf",
    "colocated": "#1b9e77",
    "borrowed": "#e6ab02",
    "in transition": "#9e9e9e",
    "training": "#c0504d",
    "idle": "#ececec",
}
"""Name -> colour, from the bottom up."""
_WIDTH_IN, _PANEL_IN, _FRAME_IN = 11.0, 2.3, 1.0
_DPI = 110


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def areas_of(moment: Moment) -> dict[str, int]:
    """GPUs by what they do; their sum is the GPUs that the run has."""
    serving = moment.serving
    borrowed = serving.get("borrowed", 0)
    # Workers on training GPUs are colocated ones.
    areas = {
        "decode": serving.get("decode", 0),
        "prefill": serving.get("prefill", 0),
        "colocated": serving.get("colocated", 0) - borrowed,
        "borrowed": borrowed,
        "in transition": serving.get("transition", 0),
        "training": serving.get("updating", 0),
    }
    return {**areas, "idle": max(0, sum(moment.owned.values()) - sum(areas.values()))}


def available_line(outcome: Outcome) -> tuple[list[float], list[int]]:
    """Times and GPUs that there were: the run's own, and those from outside, held or not; a step function."""
    own = max((_own(moment) for moment in outcome.timeline), default=0)
    if outcome.availability:
        rows = [row for row in outcome.availability if row[0] < outcome.figures.seconds]
        rows = rows if rows[0][0] == 0 else [(0.0, 0), *rows]
        return [at_s for at_s, _ in rows], [own + gpus for _, gpus in rows]
    most = max((sum(moment.owned.values()) for moment in outcome.timeline), default=0)
    return [0.0], [most]


def _own(moment: Moment) -> int:
    return sum(moment.owned.get(owner, 0) for owner in OWNERS if owner != "external")


def plot_fleets(outcomes: Sequence[Outcome], folder: Path, title: str) -> tuple[Path, ...]:
    """Draw one panel per run into `gpus.svg` and `gpus.png` of a folder; their paths.

    Raises:
        RunFolderError: they cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _FRAME_IN + _PANEL_IN * len(outcomes)), layout="constrained")
    panels = figure.subplots(len(outcomes), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    longest_s = max(outcome.figures.seconds for outcome in outcomes)
    unit_s, unit = (3600.0, "h") if longest_s > 2 * 3600 else (60.0, "min") if longest_s > 120 else (1.0, "s")
    for panel, outcome in zip(panels, outcomes, strict=True):
        _draw(panel, outcome, unit_s)
    top = max(max(available_line(outcome)[1], default=1) for outcome in outcomes)
    panels[0].set_xlim(0, longest_s / unit_s)
    panels[0].set_ylim(0, top * 1.08)
    panels[-1].set_xlabel(f"virtual time, {unit}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    paths = tuple(folder / f"gpus.{kind}" for kind in ("svg", "png"))
    try:
        for path in paths:
            figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise RunFolderError(f"{folder}: the plot cannot be written: {error.strerror or error}") from error
    return paths


def _draw(panel: Any, outcome: Outcome, unit_s: float) -> None:
    end_s, figures = outcome.figures.seconds, outcome.figures
    moments = [moment for moment in outcome.timeline if moment.at_s < end_s]
    times = [moment.at_s / unit_s for moment in moments] + [end_s / unit_s]
    rows = [areas_of(moment) for moment in moments]
    rows = rows + rows[-1:]
    for name, colour in AREAS.items():
        below = [sum(row[other] for other in list(AREAS)[: list(AREAS).index(name)]) for row in rows]
        top = [low + row[name] for low, row in zip(below, rows, strict=True)]
        panel.fill_between(times, below, top, step="post", color=colour, linewidth=0, label=name)
    at_s, gpus = available_line(outcome)
    line = [time / unit_s for time in at_s] + [end_s / unit_s]
    panel.step(line, gpus + gpus[-1:], where="post", color="black", linewidth=1.0, label="available")
    ends = [step_s / unit_s for step_s in outcome.steps_s if step_s <= end_s]
    (ticks,) = panel.plot(
        ends, [0] * len(ends), "|", color="black", markersize=11, markeredgewidth=1.2, clip_on=False, label="step ends"
    )
    ticks.set_in_layout(False)  # they stick out below on purpose; the layout would make room for them
    said = f"{figures.policy}: {figures.tokens_per_s:,.0f} tokens/s, {figures.steps} steps"
    panel.set_title(said, loc="left", fontsize=9, fontweight="bold")
    panel.set_ylabel("GPUs", fontsize=9)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
