"""Mutation score of choice, plan and gates: of small changes to the code, the share that its tests notice.

python scripts/mutation_score.py               # all of MODULES; about twenty minutes on two cores
python scripts/mutation_score.py gate choose   # some

Runs mutmut (extra `mutation`) in a copy of the working tree, prints the score and the survivors of each module, and ends with
exit status 1 when a module is below LEAST. A change that makes tests run for ever counts as noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.85
CORE = "src/pearl/core"
MODULES: Mapping[str, tuple[str, ...]] = {
    "choose": ("test_choose.py",),
    "lines": ("test_choose.py",),
    "consider": ("test_consider.py", "test_decide.py"),
    "scene": ("test_decide.py",),
    "decide": ("test_decide.py",),
    "plan": ("test_plan.py",),
    "actions": ("test_actions.py",),
    "arrange": ("test_arrange.py", "test_plan.py"),
    "schedule": ("test_schedule.py", "test_plan.py"),
    "seats": ("test_seats.py", "test_plan.py"),
    "gate": ("test_gate.py",),
    "toggle": ("test_toggle.py",),
    "survival": ("test_survival.py",),
}
"""Module of the decision core -> the unit tests that its changes are shown to."""
COPIED = ("src", "tests", "benchmarks", "scripts", "examples", "recipes", "pyproject.toml")
_CAUGHT = {1, 3, -24, 24, 36, 152, 255}
"""Exit codes of a run that noticed: tests failed or broke, or ran out of time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python scripts/mutation_score.py", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; by default all")
    names = parser.parse_args(arguments).modules or list(MODULES)
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        parser.error(f"got {unknown[0]!r}, want some of {', '.join(MODULES)}")
    scores = [_score(name) for name in names]
    return 0 if min(scores) >= LEAST else 1


def _score(name: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                shutil.copytree(source, place / each, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place / each)
        with (place / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(_settings(name))
        _run(place)
        codes = _codes(place / "mutants" / CORE / f"{name}.py.meta")
    survivors = sorted(mutant for mutant, code in codes.items() if code not in _CAUGHT)
    score = 1 - len(survivors) / len(codes)
    print(f"{name:<10} {score:7.1%}  {len(codes) - len(survivors)} of {len(codes)} noticed", flush=True)
    for mutant in survivors:
        print(f"             survived: {mutant}")
    return score


def _settings(name: str) -> str:
    tests = [f"tests/unit/core/{test}" for test in MODULES[name]]
    copied = [each for each in COPIED if each != "pyproject.toml"]
    lines = (f"paths_to_mutate = {json.dumps([f'{CORE}/{name}.py'])}", f"tests_dir = {json.dumps(tests)}")
    return "\n".join(["", "[tool.mutmut]", *lines, f"also_copy = {json.dumps(copied)}", ""])


def _run(place: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(os.cpu_count() or 1)]
    with (place / "log").open("wb") as log:
        result = subprocess.run(command, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if result.returncode:
        tail = (place / "log").read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-20:]
        raise SystemExit("\n".join(["mutation_score: mutmut failed:", *tail]))


def _codes(meta: Path) -> dict[str, int | None]:
    codes: dict[str, int | None] = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


if __name__ == "__main__":
    sys.exit(main())
