"""The world of the paper's evaluation, and how its results are judged. Nothing is simulated but one short cell."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._cells import Result
from benchmarks._data import write_trajectories
from benchmarks._paper_cells import PaperCell, run_cell
from benchmarks._paper_tables import (
    ANY_TP,
    LARGE,
    PEARL,
    REALISABLE,
    Mean,
    Row,
    Table,
    ablation,
    best_of,
    means,
    modes,
    name_of,
    segments,
)
from benchmarks._paper_world import fitted, log_normal, scripts_of, trajectories_of, world_hash
from benchmarks.paper import checks_of, ratio_to, tables
from pearl.core.workload import WorkloadProfile
from pearl.report.workload_file import read_workload

ROOT = Path(__file__).parents[3]


class TestWorld:
    def test_a_log_normal_has_its_mean_and_most_of_its_spread(self) -> None:
        """64 quantiles leave out the tail beyond 1 - 1/128: their spread is a little below the true one."""
        found = log_normal(30, 0.9, least=0)
        assert found.mean == pytest.approx(30)
        assert 0.8 < math.sqrt(found.variance) / 30 < 0.9
        assert found.quantile(0.5) == pytest.approx(30 / math.sqrt(1 + 0.81), rel=0.05)

    def test_least(self) -> None:
        assert log_normal(2, 1.5, least=1).values[0] == 1

    def test_written_trajectories_have_the_fitted_means(self, tmp_path: Path) -> None:
        for world in fitted().values():
            path = write_trajectories(scripts_of(trajectories_of(world)), tmp_path / "t.jsonl")
            found, want = read_workload(path), world.profile()
            assert len(path.read_text().splitlines()) == 1024
            # Attempts are alike: 64 tasks tell the mean of their numbers of turns no better than to some 10 %.
            assert found.turns.mean == pytest.approx(want.turns.mean, rel=0.25)
            for name in ("new_tokens", "generated_tokens", "env_s"):
                got: WorkloadProfile = getattr(found, name)
                assert got.mean == pytest.approx(getattr(want, name).mean, rel=0.06), name  # type: ignore[attr-defined]

    def test_the_docs_name_the_world_that_is_there(self) -> None:
        assert world_hash() in (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


class TestMean:
    def test_by_hand(self) -> None:
        """1 .. 5: deviation sqrt(2.5), over sqrt(5), times 2.776 (Student, 4 degrees of freedom)."""
        mean = Mean((1.0, 2.0, 3.0, 4.0, 5.0))
        assert (mean.mean, mean.half) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3))
        assert str(Mean((1000.0,))) == "1,000"
        assert str(Mean((1000.0, 1000.0))) == "1,000 +-0"
        assert math.isnan(Mean((1.0,)).half)


class TestTables:
    def test_what_the_paper_has(self) -> None:
        found = tables(quick=False)
        assert list(found) == ["fig5", "fig2c", "fig7", "fig8", "table2", "recorded"]
        row = found["fig5"].rows[0]
        assert {len(row.cells[name]) for name in (*REALISABLE, PEARL)} == {5}
        assert {cell.duration_s for cell in found["fig5"].cells} == {7200.0}
        assert {cell.gpus for cell in row.cells["roll_large"]} == {LARGE["bamboo_s1_2h"]}
        assert {tuple(row.cells["roll"]) for row in found["fig5"].rows[:3]} == {tuple(row.cells["roll"])}
        assert {*REALISABLE, PEARL} <= set(row.cells)

    def test_names_of_cells_are_their_own(self) -> None:
        for table in tables(quick=False).values():
            for row in table.rows:
                cells = [cell for some in row.cells.values() for cell in some]
                assert len({name_of(cell) for cell in cells}) == len(cells)

    def test_shapes(self) -> None:
        (first, *_) = modes(1, 2).rows
        assert list(first.cells) == ["8C", "1P7D", "2P6D", "3P5D", "4P4D", "5P3D", "6P2D"]
        (four, *_) = ablation(1, 2).rows
        assert [name for name in four.cells if name[0].isdigit()] == ["2C", "1P1D"]


def results_of(table: Table, values: dict[str, float]) -> dict[str, Result]:
    """Each policy with its value in every row and seed."""
    return {
        name_of(cell): {"tokens_per_s": values.get(name, 1.0), "wait_s": values.get(name, 1.0)}
        for row in table.rows
        for name, cells in row.cells.items()
        for cell in cells
    }


class TestJudging:
    TABLE = segments(2, 60.0, ("qwen3-8b",), ("bamboo_s1_2h",), "section3")

    def test_the_best_of_all_and_of_baselines(self) -> None:
        found = results_of(
            self.TABLE, {PEARL: 98.0, "static 2P6D": 100.0, "paper": 99.0, ANY_TP: 500.0, "roll_large": 300.0}
        )
        assert ratio_to(self.TABLE, found, None) == [("qwen3-8b s1", pytest.approx(0.98), "static 2P6D")]
        assert ratio_to(self.TABLE, found, REALISABLE) == [("qwen3-8b s1", pytest.approx(98 / 99), "paper")]

    def test_checks(self) -> None:
        found = results_of(self.TABLE, {PEARL: 120.0, "roll": 50.0, "rlboost_plus": 100.0, "paper": 125.0})
        checks = {check.name: check for check in checks_of({"fig5": (self.TABLE, found)})}
        assert checks["vs_hindsight_min"].value == pytest.approx(0.96)
        assert checks["vs_hindsight_min"].passed
        assert not checks["vs_best_baseline_min"].passed
        assert checks["speedup_vs_roll_8b"].value == pytest.approx(2.4)
        assert checks["gain_vs_rlboost_s1_8b"].value == pytest.approx(0.2)
        assert checks["pearl_vs_paper_space"].value == pytest.approx(0.96)

    def test_nothing_measured_passes_nothing(self) -> None:
        assert not any(check.passed for check in checks_of({}))

    def test_less_is_better_where_it_is(self) -> None:
        cell = PaperCell(model="qwen3-30b-a3b", policy="static", seed=0)
        row = Row("r", {"8C": [cell], "4P4D": [replace(cell, seed=1)]})
        table = Table("t", [row], value=lambda r: float(r["wait_s"]), more_is_better=False)
        found = means(table, row, {name_of(cell): {"wait_s": 3.0}, name_of(replace(cell, seed=1)): {"wait_s": 2.0}})
        assert best_of(table, found, ["8C", "4P4D"]) == "4P4D"


def test_a_cell_says_what_it_did() -> None:
    """Two steps of 16 trajectories on one worker, training on 16 GPUs."""
    cell = PaperCell(model="qwen3-30b-a3b", policy="roll", seed=3, gpus=2, batch=16, steps=2)
    found = run_cell(cell.cell)
    assert found["steps"] == 2
    assert sum(found["trajectories"].values()) >= 32
    assert set(found["shapes"]) == {"1C@tp2"}
    assert run_cell(cell.cell) == found
