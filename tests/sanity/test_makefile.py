"""The Makefile and .ci/run by what they would do, without doing it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def dry_run(target: str, folder: Path) -> list[str]:
    """Commands of a target as in a fresh clone: no environment, no model."""
    return make("-n", target, f"VENV={folder}/venv", f"MODEL={folder}/model").splitlines()


def place(commands: list[str], text: str) -> int:
    """Index of the one command that holds the text."""
    (index,) = [index for index, command in enumerate(commands) if text in command]
    return index


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)

    assert targets is not None
    listed = re.findall(r"^  make (\w+)", make("help"), re.MULTILINE)
    assert sorted(listed) == sorted(targets[1].split())


def test_setup_installs_torch_first_and_from_pins(tmp_path: Path) -> None:
    commands = dry_run("setup", tmp_path)

    torch, pearl = place(commands, "constraints.txt torch"), place(commands, "--editable '.[train,dev]'")
    assert place(commands, "-m venv") < torch < pearl
    assert "--constraint constraints.txt" in commands[pearl]


def test_setup_is_done_once(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").touch()

    assert not any("install" in line for line in dry_run("setup", tmp_path))


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_setup_is_done_again_when_what_it_installs_changes(file: str, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").touch()

    # -W: as if the file were newer than everything.
    assert "install" in make("-n", "-W", file, "setup", f"VENV={tmp_path}/venv")


def test_the_demo_makes_its_model_when_there_is_none(tmp_path: Path) -> None:
    commands = dry_run("demo", tmp_path)

    assert (
        place(commands, "touch") < place(commands, "make_tiny_qwen3.py") < place(commands, "pearl train recipes/demo/")
    )
    alone = dry_run(f"{tmp_path}/model/config.json", tmp_path)
    assert place(alone, "--editable") < place(alone, "make_tiny_qwen3.py")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert not any("make_tiny_qwen3.py" in line for line in dry_run("demo", tmp_path))


@pytest.mark.parametrize("fails", ["", "not integration", "integration"])
def test_tests_run_in_two_halves_and_either_can_fail(fails: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".installed").touch()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "ran $4"\ntest "$4" != "{fails} and not chaos and not gpu"\n')
    python.chmod(0o755)

    done = subprocess.run(
        ["make", "test", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode == 0) == (fails == "")
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("ran ")) == [
        "ran integration and not chaos and not gpu",
        "ran not integration and not chaos and not gpu",
    ]


@pytest.mark.parametrize("tool", ["ruff check", "ruff format --check", "mypy", "lint-imports"])
def test_check_runs(tool: str, tmp_path: Path) -> None:
    assert any(line.startswith(f"{tmp_path}/venv/bin/{tool}") for line in dry_run("check", tmp_path))


def test_every_benchmark_runs_in_its_quick_form(tmp_path: Path) -> None:
    benchmarks = [path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")]

    (loop,) = [line for line in dry_run("bench", tmp_path) if "for name in" in line]
    assert sorted(re.search(r"for name in ([^;]+);", loop)[1].split()) == sorted(path.stem for path in benchmarks)  # type: ignore[index]
    assert all("--quick" in path.read_text(encoding="utf-8") for path in benchmarks)


def test_ci_is_a_valid_script_that_runs_the_same_targets() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")

    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("make ")] == ["setup", "check", "test"]
    assert os.access(script, os.X_OK)
