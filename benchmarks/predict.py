"""Predicted against simulated time until a batch closes: the paper's equations and ours, and what choosing by them loses.

    python -m benchmarks.predict [--quick] [--fresh] [--data DIR]

Cells are configurations (model, GPU, workload, load, staleness) times shapes; `docs/prediction.md` says how they are measured.
Truths are kept in a file, one line per cell and shape, and used again while the code that makes them stays what it is: a run that
was stopped goes on where it was. `--quick` takes a fixed few configurations with short trajectories; it tells a predictor that is
broken from one that is not, and no more, so that its targets are twice as wide.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks._cells import measure
from benchmarks._data import add_data_argument, find_data
from benchmarks._predict_cells import HELD_OUT, WORKLOADS, cells, quick_cells
from benchmarks._report import Check, report
from benchmarks._scores import CellScore, bias, mape, noise, regret, score, table
from benchmarks._truth import asked_from, cells_json, label_of, simulated, truths_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three configurations, within a minute")
    parser.add_argument("--fresh", action="store_true", help="forget the truths of earlier runs")
    add_data_argument(parser)
    options = parser.parse_args(arguments)
    folder = find_data(options.data).folder
    chosen = quick_cells() if options.quick else list(cells())
    found = measure(
        "predict",
        [each for cell in chosen for each in cells_json(cell, folder)],
        partial(simulated, folder=folder),
        code=truths_code(),
        fresh=options.fresh,
    )
    truths = iter([[asked_from(record) for record in result["asked"]] for result in found])
    scores = [score(cell, [next(truths) for _ in cell.shapes()]) for cell in chosen]
    print(table(scores))
    settings = {
        "quick": options.quick,
        "configurations": len(chosen),
        "cells": len(found),
    }
    labels = {f"workload {name}": label_of(name, folder) for name in WORKLOADS}
    return report("predict", checks_of(scores, quick=options.quick), {**settings, **labels})


def checks_of(scores: Sequence[CellScore], *, quick: bool = False) -> list[Check]:
    """What is asked of predictions, over all cells and over those held out; `quick`: twice as much is allowed."""

    def most(share: float) -> str:
        return f"<= {share * (2 if quick else 1):.2f}"

    held_out = [each for each in scores if each.cell.workload in HELD_OUT]
    tuned = [each for each in scores if each.cell.workload not in HELD_OUT]
    return [
        Check(name="mape", value=mape(tuned, "pearl"), target=most(0.1)),
        Check(name="mape_heldout", value=mape(held_out, "pearl"), target=most(0.12)),
        Check(name="regret_mean", value=regret(scores, "pearl"), target=most(0.02)),
        Check(name="regret_max", value=max(each.regret("pearl") for each in scores), target=most(0.08)),
        Check(name="bias", value=bias(scores, "pearl")),
        Check(name="truth_noise", value=noise(scores)),
        Check(name="mape_paper", value=mape(scores, "paper")),
        Check(name="regret_mean_paper", value=regret(scores, "paper")),
    ]


if __name__ == "__main__":
    sys.exit(main())
