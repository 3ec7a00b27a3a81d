"""How far predictions are from the truth, and what choosing by them loses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._predict_cells import Cell
from benchmarks._truth import Asked, platform_for
from pearl.core.fluid import FluidPredictor
from pearl.core.makespan import Predictor, Profile, Target, candidates_of
from pearl.core.paper_model import PaperPredictor
from pearl.core.shape import parse_shape

PREDICTORS: Mapping[str, Predictor] = {"pearl": FluidPredictor(), "paper": PaperPredictor()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeScore:
    """A shape of a cell."""

    shape: str
    truth_s: float
    """Mean over its run's questions."""
    noise: float
    """Standard error of that over it."""
    predicted_s: Mapping[str, float]
    """Predictor -> mean over the same questions; inf where it takes the shape for infeasible."""

    def error(self, predictor: str) -> float:
        """Relative, signed; NaN where nothing was predicted."""
        error = self.predicted_s[predictor] / self.truth_s - 1
        return error if math.isfinite(error) else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class CellScore:
    """A cell."""

    cell: Cell
    shapes: tuple[ShapeScore, ...]
    regrets: Mapping[str, tuple[float, ...]]
    """Predictor -> for each shape that serves when it is asked, what its choice loses, mean over questions."""

    def regret(self, predictor: str) -> float:
        """Mean over what serves."""
        return statistics.fmean(self.regrets[predictor])


def score(cell: Cell, found: Sequence[Sequence[Asked]]) -> CellScore:
    """Of a cell, from the questions of each of its shapes."""
    platform = platform_for(cell)
    targets = [Target(shape=parse_shape(shape), append_tokens=bound) for shape, bound in cell.shapes()]
    candidates = candidates_of(targets)
    truths, noises = zip(*(truth(asked) for asked in found), strict=True)
    predicted: dict[str, list[float]] = {name: [] for name in PREDICTORS}
    regrets: dict[str, list[float]] = {name: [] for name in PREDICTORS}
    for number, asked in enumerate(found):
        for name, predictor in PREDICTORS.items():
            own: list[float] = []
            lost: list[float] = []
            for each in asked:
                profile = Profile(workload=each.workload, platform=replace(platform, time_scale=each.time_scale))
                close_s = predictor.forecast(profile, each.progress)(candidates).close_s
                # No batch is taken before the update under way has ended; nobody needs a model for that.
                close_s = np.maximum(close_s, each.progress.coming_s).tolist()
                own.append(close_s[number])
                lost.append(truths[close_s.index(min(close_s))] / min(truths) - 1)
            predicted[name].append(statistics.fmean(own))
            regrets[name].append(statistics.fmean(lost))
    return CellScore(
        cell=cell,
        shapes=tuple(
            ShapeScore(
                shape=str(target),
                truth_s=truths[number],
                noise=noises[number],
                predicted_s={name: values[number] for name, values in predicted.items()},
            )
            for number, target in enumerate(targets)
        ),
        regrets={name: tuple(values) for name, values in regrets.items()},
    )


def truth(asked: Sequence[Asked]) -> tuple[float, float]:
    """Mean time until the batch closes, and its relative standard error.

    A batch of which no trajectory has made a turn takes about as long, times something, as its slowest trajectory alone, whose
    mean over all batches is known: of those it is a ratio estimate. The others, with staleness, are taken as they are.
    """
    fresh = [
        each
        for each in asked
        if not any(turns for turns, count in each.progress.running.items() if count) and each.progress.running
    ]
    others = [each.close_s for each in asked if not any(each is one for one in fresh)]
    total, square = sum(others), len(others) * (statistics.variance(others) if len(others) > 1 else 0.0)
    if fresh:
        ratio = sum(each.close_s for each in fresh) / sum(each.alone_s for each in fresh)
        total += len(fresh) * ratio * fresh[0].usual_s
        square += sum((each.close_s - ratio * each.alone_s) ** 2 for each in fresh)
    return total / len(asked), math.sqrt(square) / total


def mape(scores: Sequence[CellScore], predictor: str) -> float | None:
    """Mean absolute relative error over shapes for which there is a prediction."""
    errors = [abs(shape.error(predictor)) for each in scores for shape in each.shapes]
    known = [error for error in errors if not math.isnan(error)]
    return statistics.fmean(known) if known else None


def bias(scores: Sequence[CellScore], predictor: str) -> float | None:
    """Mean signed relative error."""
    errors = [shape.error(predictor) for each in scores for shape in each.shapes]
    known = [error for error in errors if not math.isnan(error)]
    return statistics.fmean(known) if known else None


def regret(scores: Sequence[CellScore], predictor: str) -> float | None:
    """Mean over cells."""
    return statistics.fmean(each.regret(predictor) for each in scores) if scores else None


def noise(scores: Sequence[CellScore]) -> float | None:
    """Mean relative standard error of the truths: what of the error nobody could predict, about 0.8 times."""
    every = [shape.noise for each in scores for shape in each.shapes]
    return statistics.fmean(every) if every else None


def table(scores: Sequence[CellScore]) -> str:
    """Rows: workload and staleness; and shapes by kind; then the worst."""
    lines = [
        f"{'workload':18} {'stale':>5} {'n':>4} {'mape':>6} {'bias':>6} {'paper':>6} {'regret':>7} {'paper':>7} {'noise':>6}"
    ]
    groups: dict[tuple[str, str], list[CellScore]] = {}
    for each in scores:
        groups.setdefault((each.cell.workload, str(each.cell.max_staleness)), []).append(each)
        groups.setdefault(("held out" if each.cell.held_out else "tuned on", "any"), []).append(each)
    for (name, stale), some in sorted(groups.items(), key=lambda pair: (pair[0][1], pair[0][0])):
        lines.append(
            f"{name:18} {stale:>5} {len(some):4d} {_text(mape(some, 'pearl')):>6} {_text(bias(some, 'pearl')):>6} "
            f"{_text(mape(some, 'paper')):>6} {_text(regret(some, 'pearl')):>7} {_text(regret(some, 'paper')):>7} "
            f"{_text(noise(some)):>6}"
        )
    lines += ["", "shape, in order of the cell: mean signed error of ours, without and with staleness"]
    for number in range(max(len(each.shapes) for each in scores)):
        signed = [
            _text(
                bias(
                    [replace(e, shapes=e.shapes[number : number + 1]) for e in scores if e.cell.max_staleness == stale],
                    "pearl",
                )
            )
            for stale in (0, 1)
        ]
        lines.append(f"  {scores[0].shapes[number].shape:24} {signed[0]:>6} {signed[1]:>6}")
    worst = sorted(
        ((abs(shape.error("pearl")), each, shape) for each in scores for shape in each.shapes), key=lambda row: -row[0]
    )
    lines += ["", "worst predictions"]
    lines += [
        f"  {shape.error('pearl'):+.2f}  {shape.truth_s:.1f} s (+- {shape.noise:.0%})  {shape.shape}  {each.cell}"
        for _, each, shape in worst[:10]
    ]
    lines += ["", "worst choices"]
    losing = sorted(scores, key=lambda each: -each.regret("pearl"))[:6]
    lines += [f"  {each.regret('pearl'):.3f}  {each.cell}" for each in losing]
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
