"""`pearl simulate` as its users meet it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.config.load import load_recipe
from pearl.records.journal import StateEntry, StepEntry, TrajectoryEntry
from pearl.report.journal import read_entries
from pearl.report.run_folder import RunFolder
from pearl.report.trajectories import read_recording
from tests.unit.cli._simulations import RECIPE, SMALL, pearl

ROOT = Path(__file__).parents[3]


def only_folder(root: Path) -> Path:
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return folder


def test_steps_are_told_as_they_end_and_then_the_sum(tmp_path: Path) -> None:
    done = pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path / 'runs'}")
    assert done.exit_code == 0, done.output
    steps, _, rest = done.stdout.partition("\n\n")
    assert [line.split()[:2] for line in steps.splitlines()] == [["step", "1/2"], ["step", "2/2"]]
    assert "GPUs (" in steps
    assert "x real time" in steps
    assert rest.splitlines()[0].split() == ["policy", "pearl"]
    assert rest.splitlines()[-1].split() == ["run", "folder", str(only_folder(tmp_path / "runs"))]


def test_json_is_all_there_is_to_read(tmp_path: Path) -> None:
    done = pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path}", "--json")
    found = json.loads(done.stdout)
    assert (found["policy"], found["steps"], found["trained_twice"], found["stalls"]) == ("pearl", 2, 0, 0)
    assert found["folder"] == str(only_folder(tmp_path))


def test_the_folder_is_that_of_a_run(tmp_path: Path) -> None:
    assert pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path}").exit_code == 0
    path = only_folder(tmp_path)
    with RunFolder.open(path) as folder:
        assert folder.world == "simulated"
        recipe = load_recipe(folder.recipe_file).recipe
        assert recipe.run.steps == 2
        assert len(list(read_entries(folder.journal, StepEntry))) == 2
        ends = list(read_entries(folder.journal, TrajectoryEntry))
        assert any(folder.metrics.iterdir())
    # What it says of trajectories can be planned and simulated with.
    attempts = [entry for entry in ends if entry.status in ("done", "truncated_turns", "truncated_tokens")]
    assert len(read_recording(path).trajectories) == len(attempts) >= 8
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["simulation"]["steps"]) == ("finished", 2, 2)
    assert json.loads((path / "origins.json").read_text())["run.steps"] == "override"
    again = pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path / 'again'}", f"workload.trajectories={path}")
    assert again.exit_code == 0, again.output


def test_a_simulated_run_is_not_resumed(tmp_path: Path) -> None:
    assert pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path}").exit_code == 0
    path = only_folder(tmp_path)
    done = pearl("train", "--resume", str(path))
    assert done.exit_code == 2
    assert f"{path}: a simulated run has nothing to go on from; simulate it again with `pearl simulate" in done.stderr


def test_a_run_that_fails_keeps_what_happened(tmp_path: Path) -> None:
    done = pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path}", "elastic.policy=roll", "fleet.reserved_gpus=0")
    assert done.exit_code == 1
    path = only_folder(tmp_path)
    assert "no rollout worker serves within 1800 s" in done.stderr
    assert f"what happened until then is in {path}" in done.stderr
    assert json.loads((path / "summary.json").read_text())["ended"] == "failed"
    assert list(read_entries(path / "journal", StateEntry))


def test_ctrl_c_leaves_a_folder_that_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pearl.cli.main", "simulate", RECIPE, "run.steps=10000", f"run.root={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().split()[:2] == ["step", "1/10000"]
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    path = only_folder(tmp_path)
    assert stderr.startswith("stopped; ")
    assert f"virtual seconds are in {path}" in stderr
    with RunFolder.open(path) as folder:
        assert len(list(read_entries(folder.journal, StepEntry))) >= 1
        assert list(read_entries(folder.journal, TrajectoryEntry))
    summary = json.loads((path / "summary.json").read_text())
    assert summary["ended"] == "interrupted"
    assert summary["simulation"]["steps"] >= 1


TRACE = "time_s,gpus\n0,4\n100,2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv: got 0 rows, want at least 2"),
        ("time_s,gpus\n", "trace.csv: got 0 rows, want at least 2"),
        ("time,gpus\n0,1\n", "trace.csv: line 1: got 'time,gpus', want time_s,gpus"),
        (TRACE + "90,4\n", "trace.csv: line 4: time_s: got 90 after 100, want times that rise"),
        (TRACE + "200,-1\n", "trace.csv: line 4: gpus: got '-1', want a whole number 0..100000"),
        (TRACE + "200,1.5\n", "trace.csv: line 4: gpus: got '1.5', want a whole number"),
        (TRACE + "200\n", "trace.csv: line 4: got '200', want two numbers: time_s,gpus"),
        (TRACE + "nan,1\n", "trace.csv: line 4: time_s: got 'nan', want seconds"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text, encoding="utf-8")
    spot = RECIPE.replace("qwen3_8b_spot", "laptop")
    refused(tmp_path, f"simulation.availability: {tmp_path}/{message}", spot, f"simulation.availability={trace}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.jsonl: got no trajectory"),
        ('{"turns": []}\n', "t.jsonl: line 1: "),
        ('{"turns": [{"input_tokens": -1, "output_tokens": 1}]}\n', "t.jsonl: line 1: "),
        ('{"turns": [{"input_tokens": 9, "output_tokens": 1}]}\n{"turns"\n', "t.jsonl: line 2: "),
    ],
)
def test_trajectories_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text, encoding="utf-8")
    refused(tmp_path, message, RECIPE, f"workload.trajectories={file}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("simulation.availability=nowhere.csv", "extends=[]"), "extends"),
        (("workload.trajectories=nowhere.jsonl",), "nowhere.jsonl: no such file"),
        (("faults.schedule=nowhere.json",), "faults.schedule: nowhere.json: no such file"),
        (("elastic.policy=nobody",), 'elastic.policy: got "nobody", want one of "pearl"'),
        (("elastic.policy=static",), 'elastic.shape: got "", want a shape, e.g. "2P6D@tp2"'),
        (
            ("fleet.reserved_gpus=0", "fleet.external_gpus=0", "fleet.training_gpus=0"),
            "fleet.reserved_gpus: got no GPUs, want some of one kind > 0",
        ),
        (("simulation.duration_s=0",), "simulation.duration_s: got 0, want a number > 0"),
        (("simulation.duration_s=-5",), "simulation.duration_s: got -5, want a number > 0"),
        (("fleet.reserved_gpus=-4",), "fleet.reserved_gpus: got -4, want an integer 0..100000"),
        (
            ("simulation.mean_external_gpus=13",),
            "simulation.mean_external_gpus: got 13, want <= fleet.external_gpus = 12",
        ),
        (("simulation.change_gpus=5",), "simulation.change_gpus: got 5, want a divisor of fleet.external_gpus = 12"),
        (("simulation.availability=x.csv",), "simulation.mean_external_gpus: got 8 beside simulation.availability"),
        (("prices.external=-1",), "prices.external: got -1, want a number"),
        (("faults.kills_per_h=-1",), "faults.kills_per_h: got -1, want a number"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    refused(tmp_path, message, RECIPE, *overrides)


def refused(tmp_path: Path, message: str, recipe: str, *overrides: str) -> None:
    """By both commands, with the same words, status 2, one line that tells it, and no folder."""
    root = tmp_path / "runs"
    for command, options in (("simulate", ()), ("compare", ("--policies", "pearl"))):
        if command == "compare" and any(override.startswith("elastic.policy=") for override in overrides):
            continue  # which is what it replaces
        done = pearl(command, recipe, f"run.root={root}", *overrides, *options)
        assert done.exit_code == 2, done.output
        assert message in done.stderr
        assert done.stdout == ""
        assert not root.exists()


@pytest.mark.parametrize("command", [("simulate",), ("compare", "--policies", "pearl")])
def test_a_place_that_cannot_be_written(tmp_path: Path, command: tuple[str, ...]) -> None:
    root = tmp_path / "file"
    root.write_text("here already")
    done = pearl(command[0], RECIPE, f"run.root={root}", *command[1:])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"{root}: a ")
    assert "cannot be made here" in done.stderr
    assert "choose another place with run.root=FOLDER" in done.stderr
    assert root.read_text() == "here already"


def test_folders_that_are_there_are_left_alone(tmp_path: Path) -> None:
    for _ in range(2):
        assert pearl("simulate", RECIPE, *SMALL, f"run.root={tmp_path}").exit_code == 0
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
