"""TensorBoard files, read back with TensorBoard's own reader."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pearl.report.live import StepReport
from pearl.report.tensorboard import TensorboardReporter

REPORT = StepReport(
    step=3,
    version=3,
    elapsed_s=12.5,
    reward_mean=0.5,
    success_mean=0.25,
    tokens_per_s=1000.0,
    staleness_mean=0.75,
    staleness_max=2,
    stale_token_frac=0.5,
    trainer_idle_frac=0.125,
    rollout_idle_frac=0.0625,
    in_flight_trajectories=128,
    faults={"env_hung": 2, "timed_out": 1},
    metrics={"loss": -0.5, "entropy": 0.25},
)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) over all files."""
    points: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                points.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return points


def test_every_number_has_its_curve(tmp_path: Path) -> None:
    reporter = TensorboardReporter(tmp_path)
    reporter.stage("training", "on")
    reporter.step(REPORT)
    reporter.step(replace(REPORT, step=4, success_mean=None, metrics={"loss": math.nan}))
    reporter.close()
    reporter.close()
    points = read(tmp_path)
    assert {tag: values[0] for tag, values in points.items()} == {
        "rollout/reward_mean": (3, 0.5),
        "rollout/success_mean": (3, 0.25),
        "rollout/tokens_per_s": (3, 1000.0),
        "rollout/in_flight_trajectories": (3, 128.0),
        "rollout/idle_frac": (3, 0.0625),
        "staleness/mean": (3, 0.75),
        "staleness/max": (3, 2.0),
        "staleness/stale_token_frac": (3, 0.5),
        "train/idle_frac": (3, 0.125),
        "train/version": (3, 3.0),
        "run/elapsed_s": (3, 12.5),
        "faults/total": (3, 3.0),
        "faults/env_hung": (3, 2.0),
        "faults/timed_out": (3, 1.0),
        "train/loss": (3, -0.5),
        "train/entropy": (3, 0.25),
    }
    assert len(points["rollout/success_mean"]) == 1
    assert [step for step, _ in points["train/loss"]] == [3, 4]
    assert math.isnan(points["train/loss"][1][1])


def test_a_resumed_run_takes_back_the_steps_that_it_repeats(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (3, 4)):
        reporter = TensorboardReporter(tmp_path)
        for step in steps:
            reporter.step(replace(REPORT, step=step, version=10 * len(steps) + step))
        reporter.close()
    files = list(tmp_path.glob("events.out.tfevents.*"))
    assert len(files) == 2
    starts = [
        event.step for file in files for event in EventFileLoader(str(file)).Load() if event.HasField("session_log")
    ]
    assert starts == [3]


def test_no_torch_and_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, pearl.report.tensorboard as t\n"
        "t.TensorboardReporter(pathlib.Path(sys.argv[1])).close()\n"
        "print(sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_run_without_a_step_leaves_no_file(tmp_path: Path) -> None:
    reporter = TensorboardReporter(tmp_path)
    reporter.stage("start", "trainer")
    reporter.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics").touch()
    reporter = TensorboardReporter(tmp_path / "metrics")
    reporter.step(REPORT)
    reporter.step(REPORT)
    reporter.close()


def test_a_disk_that_fills_up_ends_the_curves_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: EventFileWriter, event: object) -> None:
        raise OSError(28, "No space left on device")

    reporter = TensorboardReporter(tmp_path)
    reporter.step(REPORT)
    with monkeypatch.context() as patch:
        patch.setattr(EventFileWriter, "add_event", full)
        reporter.step(replace(REPORT, step=4))
    reporter.step(replace(REPORT, step=5))
    reporter.close()
    assert [step for step, _ in read(tmp_path)["train/version"]] == [3]
