"""What every benchmark ends with can be relied on by whoever reads it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    """A module of the benchmarks, which are no installed package."""
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


REPORT = load("_report")


@pytest.mark.parametrize(
    ("value", "target", "passed"),
    [
        (2000, ">= 2000", True),
        (1999.9, ">= 2000", False),
        (300, "<= 300", True),
        (301, "<= 300", False),
        (1, "> 1", False),
        (0.5, "< 1e0", True),
        (-2.5, "== -2.5", True),
        (None, ">= 0", False),
        (None, None, True),
        (1e9, None, True),
    ],
)
def test_a_check_passes_when_its_value_meets_the_target(value: float | None, target: str | None, passed: bool) -> None:
    assert REPORT.Check(name="x", value=value, target=target).passed is passed


@pytest.mark.parametrize("target", ["2000", ">=2000", "=> 2000", ">= many", ">= 1 or so", ""])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"check x: target: got .*, want e\.g\. '>= 2000' or None"):
        REPORT.Check(name="x", value=1, target=target)


def test_the_last_line_is_one_json_object_and_the_status_says_whether_all_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = REPORT.Check(name="turns_per_s", value=2500.0, target=">= 2000")
    bad = REPORT.Check(name="bytes_per_turn", value=301.0, target="<= 300")
    information = REPORT.Check(name="us_per_turn", value=400.0)

    assert REPORT.report("overhead", [good, information], {"quick": True}) == 0
    assert REPORT.report("overhead", [good, bad, information], {"quick": True}) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == {
        "benchmark": "overhead",
        "checks": [
            {"name": "turns_per_s", "value": 2500.0, "target": ">= 2000", "pass": True},
            {"name": "bytes_per_turn", "value": 301.0, "target": "<= 300", "pass": False},
            {"name": "us_per_turn", "value": 400.0, "target": None, "pass": True},
        ],
        "settings": {"quick": True},
    }


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")))
def test_every_benchmark_says_what_it_measures(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--quick" in done.stdout
