"""Predicted against simulated time until a batch closes: the paper's equations and ours, and what choosing by them loses.

    python -m benchmarks.predict [--quick] [--fresh] [--data DIR] [--processes N] [--results FILE]

Cells are configurations (model, GPU, workload, load, staleness) times shapes; `docs/prediction.md` says how they are measured.
Truths are kept in a file, one line per cell and shape, and used again while the code that makes them stays what it is: a run that
was stopped goes on where it was. `--quick` takes a fixed few configurations with short trajectories.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._data import add_data_argument, find_data
from benchmarks._predict_cells import HELD_OUT, WORKLOADS, Cell, cells, quick_cells
from benchmarks._report import Check, report
from benchmarks._scores import CellScore, bias, mape, noise, regret, score, table
from benchmarks._truth import Asked, asked_from, asked_json, label_of, truth_of

RESULTS = Path("runs/predict.jsonl")
MADE_BY = ("src/pearl/sim", "src/pearl/pipeline", "src/pearl/elastic", "src/pearl/silicon", "benchmarks/_truth.py")
"""What truths follow from; and those modules of the core that the refit is in."""
CORE = ("workload", "distribution", "profile", "platform", "progress", "admission")
Task = tuple[Cell, str, int, Path | None, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fixed few configurations, within a minute")
    parser.add_argument("--fresh", action="store_true", help="forget the truths of earlier runs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where truths are kept")
    add_data_argument(parser)
    options = parser.parse_args(arguments)
    folder = find_data(options.data).folder
    chosen = quick_cells() if options.quick else list(cells())
    if options.fresh:
        options.results.unlink(missing_ok=True)
    found = _truths(chosen, folder, options.results, options.processes)
    scores = [score(cell, [found[_key(task)] for task in _tasks([cell], folder)]) for cell in chosen]
    print(table(scores))
    settings = {
        "quick": options.quick,
        "configurations": len(chosen),
        "cells": sum(len(each.shapes) for each in scores),
    }
    labels = {f"workload {name}": label_of(name, folder) for name in WORKLOADS}
    return report("predict", checks_of(scores), {**settings, **labels})


def checks_of(scores: Sequence[CellScore]) -> list[Check]:
    """What is asked of predictions, over all cells and over those held out."""
    held_out = [each for each in scores if each.cell.workload in HELD_OUT]
    tuned = [each for each in scores if each.cell.workload not in HELD_OUT]
    return [
        Check(name="mape", value=mape(tuned, "pearl"), target="<= 0.10"),
        Check(name="mape_heldout", value=mape(held_out, "pearl"), target="<= 0.12"),
        Check(name="regret_mean", value=regret(scores, "pearl"), target="<= 0.02"),
        Check(name="regret_max", value=max(each.regret("pearl") for each in scores), target="<= 0.08"),
        Check(name="bias", value=bias(scores, "pearl")),
        Check(name="truth_noise", value=noise(scores)),
        Check(name="mape_paper", value=mape(scores, "paper")),
        Check(name="regret_mean_paper", value=regret(scores, "paper")),
    ]


# -- truths -----------------------------------------------------------------------------------------------------------


def _truths(chosen: Sequence[Cell], folder: Path | None, path: Path, processes: int) -> dict[str, list[Asked]]:
    """Key -> questions; what is not in the file is simulated, and written to it."""
    tasks = _tasks(chosen, folder)
    found = _read(path, {_key(task) for task in tasks})
    missing = [task for task in tasks if _key(task) not in found]
    if not missing:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, (key, records) in enumerate(pool.imap_unordered(_simulated, missing), start=1):
            file.write(json.dumps({"key": key, "asked": records}) + "\n")
            file.flush()
            found[key] = [asked_from(record) for record in records]
            print(f"\r{done}/{len(missing)} simulated", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def _tasks(chosen: Iterable[Cell], folder: Path | None) -> list[Task]:
    made_by = _made_by()
    return [(cell, shape, bound, folder, made_by) for cell in chosen for shape, bound in cell.shapes()]


def _key(task: Task) -> str:
    cell, shape, bound, folder, made_by = task
    return f"{cell.key}/{shape}/{bound}/{label_of(cell.workload, folder)}/{made_by}"


def _simulated(task: Task) -> tuple[str, list[object]]:
    cell, shape, bound, folder, _ = task
    return _key(task), [asked_json(asked) for asked in truth_of(cell, shape, bound, folder)]


def _read(path: Path, wanted: set[str]) -> dict[str, list[Asked]]:
    found: dict[str, list[Asked]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a run was stopped while it wrote
        if record["key"] in wanted:
            found[record["key"]] = [asked_from(each) for each in record["asked"]]
    return found


def _made_by() -> str:
    files = [
        path for each in MADE_BY for path in (sorted(Path(each).rglob("*.py")) if Path(each).is_dir() else [Path(each)])
    ]
    files += [Path(f"src/pearl/core/{name}.py") for name in CORE]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
