"""The evaluation of the PEARL paper (section 6) in simulation, beside the paper's figures.

The world (`paper_world.json`) was fitted to section 3 alone (`benchmarks.paper_fit`) before anything here was run. Columns:
`paper` is the paper's decision space and predictor, `pearl` ours. `docs/evaluation.md` explains every difference.

Results of cells are kept in `build/benchmarks/paper.jsonl`: a run that was stopped goes on, and one after a change of the code
begins anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks._cells import code_hash, measure
from benchmarks._data import add_data_argument, find_data
from benchmarks._paper_cells import TRACES, run_cell
from benchmarks._paper_tables import (
    ANY_TP,
    DENSE,
    FEW_SEEDS,
    MODELS,
    PAPER,
    PEARL,
    REALISABLE,
    SEGMENT_S,
    SPARSE,
    Results,
    Table,
    ablation,
    batches,
    best_of,
    is_shape,
    means,
    modes,
    name_of,
    print_gains,
    print_policies,
    print_shapes,
    ratios,
    segments,
)
from benchmarks._paper_world import WORLD, world_hash
from benchmarks._report import Check, report

SEEDS, STEPS, ROLLOUTS = 5, 8, 4
QUICK_S = 1200.0
SHORT = {DENSE: "8b", SPARSE: "30b"}
PAPER_SPEEDUP = {DENSE: "2.17-2.37", SPARSE: "2.43-2.79"}
PAPER_GAIN = {DENSE: (5.9, 26.9, 10.6), SPARSE: (7.4, 36.3, 19.0)}


def tables(quick: bool) -> dict[str, Table]:
    """What is measured, in order."""
    if quick:
        return {"fig5": segments(1, QUICK_S, (DENSE,), TRACES[1:2], "section3")}
    return {
        "fig5": segments(SEEDS, SEGMENT_S, MODELS, TRACES, "section3"),
        "fig2c": modes(FEW_SEEDS, ROLLOUTS),
        "fig7": ablation(1, STEPS),
        "fig8": batches(1, STEPS),
        "table2": ratios(FEW_SEEDS, ROLLOUTS),
        "recorded": segments(1, SEGMENT_S, MODELS, TRACES, "swe"),
    }


def ratio_to(table: Table, results: Results, others: Sequence[str] | None) -> list[tuple[str, float, str]]:
    """Row -> throughput of pearl over that of the best of others; None: of all that was tried, but for more or larger choices."""
    found = []
    for row in table.rows:
        values = means(table, row, results)
        names = [name for name in values if (name in others if others is not None else name not in LEFT_OUT)]
        best = best_of(table, values, names)
        found.append((row.title, values[PEARL].mean / values[best].mean, best))
    return found


LEFT_OUT = (PEARL, ANY_TP, "roll_large")
"""Not what pearl is measured against: itself, and what has other GPUs or workers to choose from."""


def print_compared(table: Table, results: Results) -> None:
    print(f"{table.title}: pearl over the best in hindsight, and over the best baseline")
    hindsight, baseline = ratio_to(table, results, None), ratio_to(table, results, REALISABLE)
    for (title, ratio, best), (_, over, base) in zip(hindsight, baseline, strict=True):
        print(f"  {title:<22} {ratio:.3f} ({best})   {over:.3f} ({base})")
    print()


def print_segments(table: Table, results: Results) -> None:
    print_policies(table, results)
    print_compared(table, results)
    for row in table.rows:
        found = means(table, row, results)
        model, segment = row.title.split()
        stated = f"{PAPER_GAIN[model][int(segment[1]) - 1]:+.1f} %"
        print(
            f"  {row.title:<18} over roll {found[PEARL].mean / found['roll'].mean:.2f} (paper {PAPER_SPEEDUP[model]}), over "
            f"rlboost_plus {100 * (found[PEARL].mean / found['rlboost_plus'].mean - 1):+.1f} % (paper {stated}), over paper "
            f"{100 * (found[PEARL].mean / found[PAPER].mean - 1):+.1f} %, over roll_large "
            f"{100 * (found[PEARL].mean / found['roll_large'].mean - 1):+.1f} %"
        )
    print()


def checks_of(measured: dict[str, tuple[Table, Results]]) -> list[Check]:
    """The numbers that the evaluation is judged by."""
    judged = [part for name, part in measured.items() if name in ("fig5", "fig7", "fig8", "recorded")]
    hindsight = [ratio for table, results in judged for _, ratio, _ in ratio_to(table, results, None)]
    baseline = [ratio for table, results in judged for _, ratio, _ in ratio_to(table, results, REALISABLE)]
    checks = [
        Check(name="vs_hindsight_min", value=min(hindsight, default=None), target=">= 0.95"),
        Check(name="vs_best_baseline_min", value=min(baseline, default=None), target=">= 0.98"),
    ]
    if "fig5" not in measured:
        return checks
    table, results = measured["fig5"]
    spaces = []
    for model in dict.fromkeys(row.title.split()[0] for row in table.rows):
        rows = {row.title.split()[1]: means(table, row, results) for row in table.rows if row.title.startswith(model)}
        over_roll = [found[PEARL].mean / found["roll"].mean for found in rows.values()]
        checks.append(Check(name=f"speedup_vs_roll_{SHORT[model]}", value=sum(over_roll) / len(over_roll)))
        for segment, found in rows.items():
            gain = found[PEARL].mean / found["rlboost_plus"].mean - 1
            checks.append(Check(name=f"gain_vs_rlboost_{segment}_{SHORT[model]}", value=gain))
            spaces.append(found[PEARL].mean / found[PAPER].mean)
    return [*checks, Check(name="pearl_vs_paper_space", value=sum(spaces) / len(spaces))]


def print_table(name: str, table: Table, results: Results) -> None:
    if name in ("fig5", "recorded"):
        print_segments(table, results)
        return
    if any(map(is_shape, table.rows[0].cells)):
        print_shapes(table, results)
    if PEARL in table.rows[0].cells:
        print_policies(table, results)
        print_gains(table, results, "rlboost_plus")
        print_compared(table, results)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 virtual minutes of one segment and model, one seed")
    parser.add_argument("--fresh", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--only", action="append", metavar="PART", help="fig5, fig2c, fig7, fig8, table2 or recorded")
    add_data_argument(parser)
    options = parser.parse_args(arguments)
    wanted = tables(options.quick)
    for name in options.only or ():
        if name not in wanted:
            parser.error(f"--only: got {name!r}, want one of {', '.join(wanted)}")
    data = find_data(options.data)
    print(f"world {world_hash()[:16]} ({WORLD.name}), recorded data: {data.label}\n", flush=True)
    measured: dict[str, tuple[Table, Results]] = {}
    for name, table in wanted.items():
        if options.only and name not in options.only:
            continue
        cells = [replace(cell, data=str(data.folder or "")) for cell in table.cells]
        found = measure(
            "paper",
            [cell.cell for cell in cells],
            run_cell,
            code=code_hash(WORLD),
            fresh=options.fresh and not measured,
        )
        results = {name_of(cell): result for cell, result in zip(table.cells, found, strict=True)}
        measured[name] = (table, results)
        print_table(name, table, results)
    return report("paper", checks_of(measured), {"quick": options.quick, "world": world_hash(), "data": data.label})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
