"""`pearl compare` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pearl.cli import compare as module
from pearl.cli.compare import POLICIES
from pearl.report.run_folder import RunFolder
from tests.unit.cli._simulations import RECIPE, SMALL, pearl


def test_policies_are_compared_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time or one by one, alone or beside others: each run is the same, byte for byte of its journal."""
    monkeypatch.setattr(module, "can_plot", lambda: False)
    roots = tmp_path / "a", tmp_path / "b"
    arguments = ("compare", RECIPE, *SMALL, "prices.external=1.5")
    done = pearl(*arguments, f"run.root={roots[0]}", "--policies", "roll, pearl", "--jobs", "2")
    assert done.exit_code == 0, done.output
    table = done.stdout.split("\n\n")[1].splitlines()
    assert table[0].split() == ["roll", "pearl"]
    assert table[1].startswith("throughput, tokens/s")
    assert "plot    none, because matplotlib is not installed; for it: pip install 'pearl-rl[report]'" in done.stdout
    as_json = pearl(
        *arguments, f"run.root={roots[1]}", "--policies", "pearl,roll", "--seeds", "2", "--json", "--jobs", "1"
    )
    found = json.loads(as_json.stdout)
    assert [column["policy"] for column in found["policies"]] == ["pearl", "roll"]
    assert [run["seed"] for run in found["policies"][0]["runs"]] == [0, 1]
    assert found["policies"][0]["over_first"]["throughput, tokens/s"] == 1.0
    assert found["policies"][0]["mean"]["price"] > 0
    one, other = (next(root.iterdir()) for root in roots)
    assert other == Path(found["folder"])
    assert {path.name for path in one.iterdir()} == {"comparison.json", "recipe.toml", "runs"}
    runs = [sorted(path.name for path in (folder / "runs").iterdir()) for folder in (one, other)]
    assert runs == [
        ["pearl-seed0", "roll-seed0"],
        ["pearl-seed0", "pearl-seed1", "roll-seed0", "roll-seed1"],
    ]
    for name in runs[0]:
        turns = [(folder / "runs" / name / "journal" / "turns.jsonl").read_bytes() for folder in (one, other)]
        assert turns[0] == turns[1]
    with RunFolder.open(other / "runs" / "roll-seed1") as folder:
        assert folder.world == "simulated"


def test_who_cannot_do_it_is_told_and_the_others_are_compared(tmp_path: Path) -> None:
    arguments = (
        "compare",
        RECIPE,
        *SMALL,
        f"run.root={tmp_path}",
        "fleet.reserved_gpus=0",
        "--policies",
        "pearl,roll",
        "--jobs",
        "1",
    )
    done = pearl(*arguments)
    assert done.exit_code == 1
    assert "roll: no rollout worker serves within 1800 s" in done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("throughput, tokens/s"))
    assert row.split()[-1] == "failed"
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    told = json.loads((folder / "comparison.json").read_text())["policies"]
    assert [sorted(column) for column in told] == [["mean", "over_first", "policy", "runs"], ["failed", "policy"]]


def test_shapes_are_compared(tmp_path: Path) -> None:
    policies = "static:2C@tp2,static:1P1D@tp2"
    done = pearl("compare", RECIPE, *SMALL, f"run.root={tmp_path}", "--policies", policies, "--json", "--jobs", "1")
    assert [column["policy"] for column in json.loads(done.stdout)["policies"]] == policies.split(",")


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("", "--policies: got none, want some of pearl"),
        (" , ", "--policies: got none, want some of pearl"),
        ("pearl,rol", "--policies: got 'rol', want some of pearl"),
        ("roll:2C", "--policies: got 'roll:2C', want some of pearl"),
        ("roll,pearl,roll", "--policies: got 'roll' twice, want each once"),
        ("static", 'elastic.shape: got "", want a shape'),
        ("static:2X", "elastic.shape: got '2X', want e.g."),
    ],
)
def test_policies_that_are_none(tmp_path: Path, policies: str, message: str) -> None:
    done = pearl("compare", RECIPE, f"run.root={tmp_path / 'runs'}", "--policies", policies)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()
    assert "rlboost_plus" in POLICIES


@pytest.mark.parametrize("seeds", ["0", "-3", "1001"])
def test_seeds_that_are_none(tmp_path: Path, seeds: str) -> None:
    done = pearl("compare", RECIPE, f"run.root={tmp_path / 'runs'}", "--policies", "pearl", "--seeds", seeds)
    assert done.exit_code == 2
    assert f"--seeds: got {seeds}, want 1..1000" in done.stderr
    assert not (tmp_path / "runs").exists()
