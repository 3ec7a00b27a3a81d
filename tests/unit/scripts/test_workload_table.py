"""The tables of docs/workloads.md are those of the generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import workload_table


def test_the_page_is_up_to_date() -> None:
    assert workload_table.main(["--check"]) == 0, "run `python scripts/workload_table.py`"


def test_an_outdated_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "workloads.md"
    page.write_text(f"before\n{workload_table.BEGIN}\nold\n{workload_table.END}\nafter\n")
    monkeypatch.setattr(workload_table, "PAGE", page)
    monkeypatch.setattr(workload_table, "GROUPS", 3)
    assert workload_table.main(["--check"]) == 1
    assert workload_table.main([]) == 0
    assert workload_table.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- Measured")
    assert text.endswith("<!-- End of what was measured. -->\nafter\n")
    assert "old" not in text


def test_a_page_without_a_place_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "workloads.md"
    page.write_text("nothing")
    monkeypatch.setattr(workload_table, "PAGE", page)
    with pytest.raises(SystemExit, match=r"workloads\.md: want the lines"):
        workload_table.main([])


def test_moments_by_hand() -> None:
    assert workload_table._moments([1, 2, 3, 2000.0]) == "502 / 2.5 / 1,700"
