"""The tables of `benchmarks.paper`: which cells each needs, and what is printed beside the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import t as student

from benchmarks._cells import Result
from benchmarks._paper_cells import PaperCell

DENSE, SPARSE = "qwen3-8b", "qwen3-30b-a3b"
MODELS = (DENSE, SPARSE)
SEGMENT_S = 7200.0
PEARL, PAPER, ANY_TP = "pearl", "paper", "pearl, any tp"
REALISABLE = ("roll", "rlboost_plus", "rlboost_plus_seeding", "borrow_all", PAPER)
"""What a user could run instead, on the same GPUs."""
LARGE = {"bamboo_s1_2h": 14, "bamboo_s2_2h": 10, "bamboo_s3_2h": 12}
"""Fixed GPUs of the paper's ROLL-Large: not on offer to the others, so no baseline of a check."""
TPS = (1, 2, 4)
FEW_SEEDS = 2
"""Of what is information only."""


@dataclass(frozen=True, slots=True)
class Row:
    """A setting and what was tried in it."""

    title: str
    cells: Mapping[str, Sequence[PaperCell]]
    """Policy or shape -> one cell for each seed."""
    stated: str = ""
    """The paper's figure."""


@dataclass(frozen=True, slots=True)
class Table:
    """A figure or table of the paper."""

    title: str
    rows: Sequence[Row]
    value: Callable[[Result], float] = field(default=lambda result: float(result["tokens_per_s"]))
    unit: str = "tokens/s"
    more_is_better: bool = True

    @property
    def cells(self) -> list[PaperCell]:
        return [cell for row in self.rows for cells in row.cells.values() for cell in cells]


Results = Mapping[str, Result]
"""By `name_of`."""


def name_of(cell: PaperCell) -> str:
    """Of a cell among results."""
    return str(cell)


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def half(self) -> float:
        """Half of the 95 % interval of the mean; NaN of one value."""
        count = len(self.values)
        if count < 2:
            return math.nan
        return float(student.ppf(0.975, count - 1) * np.std(self.values, ddof=1) / math.sqrt(count))

    def __str__(self) -> str:
        return f"{self.mean:,.0f}" + (f" +-{self.half:,.0f}" if len(self.values) > 1 else "")


def means(table: Table, row: Row, results: Results) -> dict[str, Mean]:
    """What was tried -> what came out."""
    return {
        name: Mean(tuple(table.value(results[name_of(cell)]) for cell in cells)) for name, cells in row.cells.items()
    }


# -- what is run ----------------------------------------------------------------------------------------------------


def segments(seeds: int, duration_s: float, models: Sequence[str], traces: Sequence[str], workload: str) -> Table:
    """Fig. 5: policies on the three segments."""
    rows = []
    for model in models:
        for trace in traces:
            seen = [
                PaperCell(model=model, policy="", trace=trace, seed=seed, duration_s=duration_s, workload=workload)
                for seed in range(seeds)
            ]
            cells = {name: [replace(cell, policy=name) for cell in seen] for name in (*REALISABLE, PEARL)}
            # The same on every trace, of which it takes nothing.
            cells["roll"] = [replace(cell, policy="roll", trace="") for cell in seen]
            few = seen[:FEW_SEEDS]
            cells["static 2P6D"] = [replace(cell, policy="static", shape="2P6D@tp2") for cell in few]
            cells["roll_large"] = [replace(cell, policy="roll", trace="", gpus=LARGE[trace]) for cell in few]
            cells[ANY_TP] = [replace(cell, policy=PEARL, tp=TPS) for cell in few]
            rows.append(Row(title=f"{model} {trace[7:9]}", cells=cells))
    kind = "synthetic trajectories of section 3" if workload == "section3" else f"recorded trajectories ({workload})"
    return Table(title=f"Fig. 5: throughput on spot traces, {kind}", rows=rows)


def ablation(seeds: int, steps: int) -> Table:
    """Fig. 7: 4 to 16 rollout GPUs, none from outside: shapes without borrowing, borrowing always, with the gate."""
    rows = []
    for model in MODELS:
        for gpus in (4, 8, 12, 16):
            seen = [PaperCell(model=model, policy="", gpus=gpus, seed=seed, steps=steps) for seed in range(seeds)]
            cells = _shapes(seen, gpus // 2)
            for name in (*REALISABLE[1:], PEARL):
                cells[name] = [replace(cell, policy=name) for cell in seen]
            rows.append(Row(title=f"{model} {gpus} GPUs", cells=cells, stated=FIG_7[model, gpus > 4]))
    return Table(title="Fig. 7: fixed rollout GPUs, 16 training GPUs to borrow", rows=rows)


FIG_7 = {
    (DENSE, False): "PD -20.6 %, + toggle +93.6 %, + gate +92.3 %",
    (DENSE, True): "PD +12.8..15.3 %, + toggle +16.2..26.5 %, + gate +17.9..26.5 %",
    (SPARSE, False): "PD -30.9 %, + toggle +118.3 %, + gate +129.5 %",
    (SPARSE, True): "PD +7.8..8.9 %, + toggle +9.4..26.2 %, + gate +9.2..27.5 %",
}


def batches(seeds: int, steps: int) -> Table:
    """Fig. 8: other batches and lengths, 8 rollout GPUs."""
    usual = PaperCell(model=DENSE, policy="", gpus=8, seed=0, steps=steps)
    settings = [(f"batch {batch}", replace(usual, batch=batch), "+5.3..63.7 %") for batch in (32, 64, 96, 128)]
    settings += [(f"{k}K tokens", replace(usual, context=k * 1024), "+9.8..26.5 %") for k in (8, 16, 24, 32)]
    rows = []
    for title, setting, stated in settings:
        seen = [replace(setting, seed=seed) for seed in range(seeds)]
        cells = {name: [replace(cell, policy=name) for cell in seen] for name in (*REALISABLE[1:], PEARL)}
        rows.append(Row(title=title, cells=cells, stated=f"PEARL over RLBoost+ {stated}"))
    return Table(title="Fig. 8: batch and length, Qwen3-8B on 8 GPUs", rows=rows)


def modes(seeds: int, steps: int) -> Table:
    """Fig. 2c: colocated and apart, Qwen3-30B-A3B on 16 GPUs."""
    stated = {32: "PD +9.7 %", 48: "best 4P4D", 64: "best 5P3D", 80: "PD +1.4 %", 96: "PD -6.1 %"}
    rows = []
    for batch, said in stated.items():
        seen = [
            PaperCell(model=SPARSE, policy="", gpus=16, seed=seed, steps=steps, batch=batch, staleness=0)
            for seed in range(seeds)
        ]
        rows.append(Row(title=f"batch {batch}", cells=_shapes(seen, 8), stated=said))
    return Table(title="Fig. 2c: seconds of a rollout", rows=rows, value=_wait_s, unit="s", more_is_better=False)


def ratios(seeds: int, steps: int) -> Table:
    """Table 2: the ratio chosen and the best one, Qwen3-8B."""
    stated = {10: "2P3D", 26: "5P8D (chosen 4P9D)", 12: "3P3D", 28: "4P10D", 16: "3P5D", 32: "4P12D"}
    rows = []
    for gpus, said in stated.items():
        seen = [
            PaperCell(model=DENSE, policy="", gpus=gpus, seed=seed, steps=steps, staleness=0) for seed in range(seeds)
        ]
        rows.append(Row(title=f"{gpus} GPUs", cells=_shapes(seen, gpus // 2), stated=f"best {said}"))
    return Table(title="Table 2: seconds of a rollout", rows=rows, value=_wait_s, unit="s", more_is_better=False)


def _wait_s(result: Result) -> float:
    return float(result["wait_s"])


def _shapes(cells: Sequence[PaperCell], workers: int) -> dict[str, list[PaperCell]]:
    """All colocated, and every ratio with at most half of the workers, at most six, for prefill."""
    names = [f"{workers}C", *(f"{x}P{workers - x}D" for x in range(1, min(6, workers - 1) + 1))]
    return {name: [replace(cell, policy="static", shape=f"{name}@tp2") for cell in cells] for name in names}


# -- what is printed ------------------------------------------------------------------------------------------------


def best_of(table: Table, found: Mapping[str, Mean], names: Sequence[str]) -> str:
    """The best of these by its mean."""
    sign = 1 if table.more_is_better else -1
    return max(names, key=lambda name: sign * found[name].mean)


def print_policies(table: Table, results: Results) -> None:
    """A column for each policy, a line for each row."""
    names = [name for name in table.rows[0].cells if not is_shape(name)]
    print(f"{table.title} ({table.unit}; mean over seeds and 95 % interval)")
    width = max(len(row.title) for row in table.rows)
    columns = [max(len(name), 14) for name in names]
    print("  " + " " * width + "".join(f"  {name:>{size}}" for name, size in zip(names, columns, strict=True)))
    for row in table.rows:
        found = means(table, row, results)
        line = "".join(f"  {found[name]!s:>{size}}" for name, size in zip(names, columns, strict=True))
        print(f"  {row.title:<{width}}{line}")
    print()


def print_shapes(table: Table, results: Results) -> None:
    """For each row: colocated, the best apart, and the paper's figure."""
    print(f"{table.title} (mean over seeds)")
    width = max(len(row.title) for row in table.rows)
    for row in table.rows:
        found = means(table, row, results)
        shapes = [name for name in found if is_shape(name)]
        colocated, apart = shapes[0], best_of(table, found, shapes[1:])
        gain = found[apart].mean / found[colocated].mean
        gain = gain if table.more_is_better else 1 / gain
        print(
            f"  {row.title:<{width}}  {colocated} {found[colocated].mean:,.1f} {table.unit}, best apart {apart} "
            f"{found[apart].mean:,.1f} ({100 * (gain - 1):+.1f} %); paper: {row.stated}"
        )
    print()


def print_gains(table: Table, results: Results, base: str) -> None:
    """Policies over one of them, beside the paper's figure."""
    width = max(len(row.title) for row in table.rows)
    print(f"{table.title}: over {base}")
    for row in table.rows:
        found = means(table, row, results)
        first = found[base].mean if base in found else found[next(iter(found))].mean
        gains = ", ".join(
            f"{name} {100 * (found[name].mean / first - 1):+.1f} %"
            for name in found
            if not is_shape(name) and name != base
        )
        print(f"  {row.title:<{width}}  {gains}; paper: {row.stated or '-'}")
    print()


def is_shape(name: str) -> bool:
    """Whether a column is a shape that was held."""
    return name[0].isdigit()
