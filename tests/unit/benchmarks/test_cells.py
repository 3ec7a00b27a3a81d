"""Cells are measured once, kept, and measured again when code changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import _cells
from benchmarks._cells import Cell, Result, code_hash, key_of, measure


def squared(cell: Cell) -> Result:
    """In a process of its own: counts its calls in a file."""
    with Path(cell["log"]).open("a") as log:
        log.write(f"{cell['n']} {os.getpid()}\n")
    return {"square": cell["n"] ** 2}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_cells, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "b.jsonl"


def test_results_in_order_and_only_what_is_missing(tmp_path: Path, results: Path) -> None:
    log = tmp_path / "log"
    cells = [{"n": n, "log": str(log)} for n in (3, 1, 2)]
    assert [each["square"] for each in measure("b", cells[:2], squared, code="x")] == [9, 1]
    assert [each["square"] for each in measure("b", cells, squared, code="x")] == [9, 1, 4]
    ran = [line.split() for line in log.read_text().splitlines()]
    assert sorted(n for n, _ in ran) == ["1", "2", "3"]
    assert str(os.getpid()) not in [pid for _, pid in ran]
    assert sum(map(bool, results.read_text().splitlines())) == 3


def test_other_code_or_fresh_measures_again(tmp_path: Path, results: Path) -> None:
    log = tmp_path / "log"
    cells = [{"n": 5, "log": str(log)}]
    for code, fresh, calls in (("x", False, 1), ("x", False, 1), ("y", False, 2), ("y", True, 3)):
        measure("b", cells, squared, code=code, fresh=fresh)
        assert len(log.read_text().splitlines()) == calls
    assert len(results.read_text().splitlines()) == 1


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, results: Path) -> None:
    log = tmp_path / "log"
    cells = [{"n": n, "log": str(log)} for n in (1, 2)]
    measure("b", cells, squared, code="x")
    text = results.read_text()
    results.write_text(text[: -len(text.splitlines()[-1]) // 2])
    assert [each["square"] for each in measure("b", cells, squared, code="x")] == [1, 4]
    assert len(log.read_text().splitlines()) == 3
    assert [each["square"] for each in measure("b", cells, squared, code="x")] == [1, 4]
    assert len(log.read_text().splitlines()) == 3


def test_keys_tell_cells_and_code_apart(tmp_path: Path) -> None:
    assert key_of({"a": 1, "b": 2}, "x") == key_of({"b": 2, "a": 1}, "x")
    assert len({key_of({"a": 1}, "x"), key_of({"a": 2}, "x"), key_of({"a": 1}, "y")}) == 3
    more = tmp_path / "more.json"
    more.write_text("1")
    one = code_hash(more)
    more.write_text("2")
    assert len({one, code_hash(more), code_hash()}) == 3


def test_what_is_left_out_of_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "pearl"
    for name in ("a/b.py", "a/c.py", "d.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("1")
    monkeypatch.setattr(_cells, "ROOT", tmp_path)
    hashes = {without: code_hash(without=without) for without in ((), ("a",), ("a/b.py",), ("a/b.py", "a/c.py"))}
    assert hashes["a",] == hashes["a/b.py", "a/c.py"]
    assert len(set(hashes.values())) == 3
    (source / "a" / "b.py").write_text("2")
    again = {without: code_hash(without=without) for without in hashes}
    assert [hashes[each] == again[each] for each in hashes] == [False, True, True, True]
    with pytest.raises(FileNotFoundError, match=r"without: got a/x\.py"):
        code_hash(without=("a/x.py",))
