"""`pearl train` as its user runs it: ended from outside, resumed, and refused with a clear message."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pearl.cluster.weights import shared_memory_root
from pearl.file_lock import holder
from tests.models import make_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RECIPE = """
[run]
name = "test"
steps = {steps}
[model]
path = "{model}"
[environment]
kind = "guess_number"
slots = 32
[rollout]
groups_per_batch = 4
group_size = 4
max_context_tokens = 64
[engine]
max_sequences = 32
max_context_tokens = 64
[sampling]
max_new_tokens = 4
[train]
learning_rate = 1e-3
[checkpoint]
every_steps = 1
[cluster]
object_store_mib = 80
"""


def write_recipe(folder: Path, model: Path, steps: int) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(model=model, steps=steps))
    return path


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pearl.cli.main", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(path: Path, pattern: str, process: subprocess.Popen[str]) -> Path:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        found = sorted(path.glob(pattern))
        if found:
            return found[0]
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"no {pattern} within 120 s")


def gone_within(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return alive


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_from_outside_leaves_nothing_and_is_resumed(
    tiny_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    recipe = write_recipe(tmp_path, tiny_model, steps=2000)
    process = start("train", recipe, cwd=tmp_path)
    wait_for(tmp_path / "runs", "test-*/checkpoints/step-000002", process)
    # Ray's two agents look for their raylet once a minute and end by themselves then.
    children = [p for p in psutil.Process(process.pid).children(recursive=True) if "Agent" not in " ".join(p.cmdline())]
    assert len(children) >= 5
    (folder,) = (tmp_path / "runs").iterdir()
    intruder = start("train", "--resume", folder, cwd=tmp_path)
    _, errors = intruder.communicate(timeout=60)
    assert intruder.returncode == 2, errors
    assert f"the run is in use by process {process.pid};" in errors
    assert process.poll() is None
    process.send_signal(how)
    output, errors = process.communicate(timeout=60)
    assert gone_within(children, 30) == [], "processes were left behind"
    if how is signal.SIGTERM:
        assert process.returncode == 130
        assert f"pearl train --resume runs/{folder.name}" in errors
        assert "Traceback" not in errors + output
        left = [
            path for path in shared_memory_root().glob("pearl-weights-*") if holder(path / "lock") == str(process.pid)
        ]
        assert left == []

    newest = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    resumed = start("train", "--resume", folder, f"run.steps={newest + 2}", cwd=tmp_path)
    output, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output + errors
    assert f"from step-{newest:06d}" in output
    trained = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    versions = [step["version"] for step in trained]
    assert versions[-2:] == [newest + 1, newest + 2]
    # Steps after the last checkpoint are done again, on trajectories that were begun again.
    again = [sample[0] for step in trained[-2:] for sample in step["samples"]]
    assert len(again) == len(set(again)) == 32


def contents(folder: Path) -> dict[Path, bytes]:
    """All that a run left, but for the process id in its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_another_model_is_refused_and_the_folder_stays_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    recipe = write_recipe(tmp_path, model, steps=1)
    first = start("train", recipe, cwd=tmp_path)
    output, errors = first.communicate(timeout=120)
    assert first.returncode == 0, output + errors
    (folder,) = (tmp_path / "runs").iterdir()
    before = contents(folder)
    shutil.rmtree(model)
    make_folder(model, hidden=32)
    resumed = start("train", "--resume", folder, "run.steps=2", cwd=tmp_path)
    output, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 2, output + errors
    assert "config.json differ from what the run began with" in errors
    assert f"by editing {folder / 'recipe.toml'}" in errors
    assert "Traceback" not in errors
    assert contents(folder) == before

    # Damage that only shows when the tensors are read leaves nothing half-written either.
    shutil.rmtree(model)
    shutil.copytree(tiny_model, model)
    weights = folder / "checkpoints" / "step-000001" / "trainer" / "trainer-weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    before = contents(folder)
    resumed = start("train", "--resume", folder, "run.steps=2", cwd=tmp_path)
    output, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 2, output + errors
    assert "trainer-weights.safetensors: damaged" in errors
    assert contents(folder) == before


MISTAKES = {
    "model.path=nowhere": "config.json",
    "environment.kind=gues_number": "guess_number",
    "rollout.max_stalenes=1": "max_staleness",
    "engine.shape=0D": "0D",
    "run.root=/proc/nowhere": "/proc/nowhere",
    "weights.host_budget_gib=0.0001": "weights.host_budget_gib",
    "cluster.object_store_mib=90000000": "cluster.object_store_mib: got 90000000, want at most",
    "cluster.address=127.0.0.1:1": "no Ray cluster there: Connection refused",
    "engine.device=cuda:99": "engine.device: got cuda:99",
}


def test_mistakes_end_with_status_2_and_leave_no_run(tiny_model: Path, tmp_path: Path) -> None:
    """All at the same time: what takes time is Python's start."""
    started: dict[str, subprocess.Popen[str]] = {}
    for number, override in enumerate(MISTAKES):
        folder = tmp_path / str(number)
        folder.mkdir()
        started[override] = start("train", write_recipe(folder, tiny_model, steps=1), override, cwd=folder)
    for number, (override, message) in enumerate(MISTAKES.items()):
        output, errors = started[override].communicate(timeout=240)
        assert started[override].returncode == 2, f"{override}: {output}{errors}"
        assert message in errors
        assert "Traceback" not in errors
        assert not (tmp_path / str(number) / "runs").exists()
