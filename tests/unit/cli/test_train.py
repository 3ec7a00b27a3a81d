"""`pearl train`: new and resumed runs around a runtime that stands in."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

from pearl.cli import train as train_command
from pearl.cli.main import app
from pearl.config.cluster import ClusterConfig
from pearl.config.load import load_recipe
from pearl.config.recipe import Recipe
from pearl.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    RunFailed,
    RunFolderError,
    StateError,
    TrainingError,
    WeightsError,
)
from pearl.report.live import JobSummary, Reporter, StepReport
from pearl.report.run_folder import RunFolder


def pearl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


class Job:
    """Stands in for the runtime: remembers how it was called, then does as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Recipe, RunFolder, bool]] = []
        self.act: Callable[[RunFolder, Reporter], None] = lambda folder, reporter: None

        self.begins = True
        self.has_ray = True

    def preflight(self, recipe: Recipe) -> None:
        if recipe.environment.kind == "odd":
            raise ModelError("the model is odd")

    def preflight_resumption(self, recipe: Recipe, folder: RunFolder) -> None:
        self.preflight(recipe)
        if recipe.run.steps == 13:
            raise CheckpointError("a checkpoint of another model")

    @contextlib.contextmanager
    def ray_session(self, config: ClusterConfig) -> Iterator[None]:
        if not self.has_ray:
            raise ConfigError(f"cluster.address: got {config.address!r}")
        yield

    def run_job(
        self, recipe: Recipe, folder: RunFolder, reporter: Reporter, resume: bool, begun: Callable[[], None]
    ) -> JobSummary:
        self.calls.append((recipe, folder, resume))
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder.open(folder.path)
        if self.begins:
            begun()
        self.act(folder, reporter)
        return JobSummary(
            folder=folder.path,
            steps=recipe.run.steps,
            new_steps=recipe.run.steps,
            wall_s=61.0,
            success_before=0.25,
            success_after=0.75,
            trained_tokens=1000,
            tokens_per_s=10.0,
            stale_token_frac=0.5,
            staleness_max=1,
            trainer_idle_frac=0.1,
            rollout_idle_frac=0.2,
            faults={},
            restarts=0,
        )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job()
    for name, functions in {
        "job": ("run_job",),
        "preflight": ("preflight", "preflight_resumption"),
        "local_ray": ("ray_session",),
    }.items():
        module = ModuleType(f"pearl.cluster.{name}")
        for function in functions:
            setattr(module, function, getattr(job, function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return job


def run_folders() -> list[Path]:
    return sorted(Path("runs").iterdir()) if Path("runs").exists() else []


class TestTrain:
    def test_a_run(self, job: Job) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            reporter.stage("training", "on")
            reporter.step(
                StepReport(
                    step=1,
                    version=1,
                    elapsed_s=1.0,
                    reward_mean=0.0,
                    success_mean=0.5,
                    tokens_per_s=1.0,
                    staleness_mean=0.0,
                    staleness_max=0,
                    stale_token_frac=0.0,
                    trainer_idle_frac=0.0,
                    rollout_idle_frac=0.0,
                    in_flight_trajectories=1,
                    faults={},
                )
            )

        job.act = act
        result = pearl_command("train", "x.toml", "run.steps=5", "run.name=guess")
        assert result.exit_code == 0, result.output
        [(recipe, folder, resume)] = job.calls
        assert (recipe.run.steps, resume) == (5, False)
        assert run_folders() == [folder.path]
        lines = result.stdout.splitlines()
        assert lines[0] == "ray         starting"
        assert lines[1] == f"run folder  {folder.path}"
        assert lines[2] == "training    on"
        assert lines[3].startswith("step 1/5 ")
        assert lines[5] == "success     0.25 -> 0.75"
        assert lines[6] == f"run folder  {folder.path}"
        assert list(folder.metrics.glob("events.out.tfevents.*"))

    def test_several_files(self, job: Job) -> None:
        Path("more.toml").write_text("run.steps = 7")
        pearl_command("train", "x.toml", "run.seed=1", "more.toml")
        assert job.calls[0][0].run.steps == 7

    @pytest.mark.parametrize(
        "arguments", [[], ["x"], ["nope.toml"], ["x.toml", "run.steps=-1"], ["x.toml", "environment.kind=odd"]]
    )
    def test_mistakes_leave_nothing(self, job: Job, arguments: list[str]) -> None:
        result = pearl_command("train", *arguments)
        assert result.exit_code == 2
        assert result.stderr
        assert (job.calls, run_folders()) == ([], [])

    @pytest.mark.parametrize("error", [ModelError("the model is odd"), CheckpointError("damaged")])
    def test_a_mistake_that_shows_before_the_run_begins_leaves_nothing(self, job: Job, error: Exception) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            (folder.journal / "turns.jsonl").touch()
            raise error

        job.act, job.begins = act, False
        result = pearl_command("train", "x.toml")
        assert (result.exit_code, result.stderr) == (2, f"{error}\n")
        assert not Path("runs").exists()

    def test_without_ray_there_is_no_run(self, job: Job) -> None:
        job.has_ray = False
        result = pearl_command("train", "x.toml", "cluster.address=127.0.0.1:1")
        assert result.exit_code == 2
        assert result.stderr == "cluster.address: got '127.0.0.1:1'\n"
        assert result.stdout == "ray         connecting to 127.0.0.1:1\n"
        assert (job.calls, Path("runs").exists()) == ([], False)

    @pytest.mark.parametrize(
        "error",
        [
            RunFailed("too many restarts"),
            CheckpointError("no space left"),
            TrainingError("the loss is nan"),
            WeightsError("no space left"),
            StateError("no such worker"),
        ],
    )
    def test_whatever_ends_a_run_that_has_begun_says_how_to_go_on(self, job: Job, error: Exception) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            (folder.checkpoints / "step-000010").mkdir()
            raise error

        job.act = act
        result = pearl_command("train", "x.toml")
        [folder] = run_folders()
        assert result.exit_code == 1
        assert result.stderr == f"{error}\ngo on from step-000010 with: pearl train --resume {folder}\n"
        assert "Traceback" not in result.output

    def test_a_run_that_fails_before_it_begins_is_kept(self, job: Job) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            raise RunFailed("trainer: not up within 120 s")

        job.act, job.begins = act, False
        result = pearl_command("train", "x.toml")
        assert len(run_folders()) == 1
        assert result.exit_code == 1
        assert result.stderr.startswith("trainer: not up within 120 s\nthere is no checkpoint yet; ")

    def test_ctrl_c(self, job: Job) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            raise KeyboardInterrupt

        job.act = act
        result = pearl_command("train", "x.toml")
        [folder] = run_folders()
        assert result.exit_code == 130
        assert result.stderr == f"stopped; there is no checkpoint yet; the journal is in {folder / 'journal'}\n"

    def test_other_errors_are_not_hidden(self, job: Job) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            raise ZeroDivisionError

        job.act = act
        assert isinstance(pearl_command("train", "x.toml").exception, ZeroDivisionError)

    def test_without_the_train_extra(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(train_command, "find_spec", lambda name: None if name in ("torch", "ray") else object())
        result = pearl_command("train", "x.toml")
        assert result.exit_code == 2
        assert result.stderr == (
            "train: ray, torch not installed; install the train extra: pip install 'pearl-rl[train]'\n"
        )
        assert (job.calls, run_folders()) == ([], [])

    def test_a_place_that_cannot_be_written(self, job: Job) -> None:
        result = pearl_command("train", "x.toml", "run.root=x.toml/runs")
        assert result.exit_code == 2
        assert result.stderr.startswith("x.toml/runs: a run folder cannot be made here: ")


class TestResume:
    @pytest.fixture
    def run(self, job: Job) -> Path:
        pearl_command("train", "x.toml", "run.steps=5")
        job.calls.clear()
        return run_folders()[0]

    def test_the_recipe_of_the_folder_is_used(self, job: Job, run: Path) -> None:
        Path("x.toml").unlink()
        result = pearl_command("train", "--resume", str(run))
        assert result.exit_code == 0, result.output
        [(recipe, folder, resume)] = job.calls
        assert (recipe.run.steps, folder.path, resume) == (5, run, True)
        assert run_folders() == [run]

    @pytest.mark.parametrize("how", ["checkpoint", "ray", "trainer"])
    def test_what_refuses_a_resumption_leaves_the_folder_as_it_was(self, job: Job, run: Path, how: str) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            raise CheckpointError("damaged")

        job.act, job.begins, job.has_ray = act, how != "trainer", how != "ray"
        before = {path: path.read_bytes() if path.is_file() else b"" for path in run.rglob("*")}
        result = pearl_command("train", "--resume", str(run), f"run.steps={13 if how == 'checkpoint' else 9}")
        assert result.exit_code == 2
        assert {path: path.read_bytes() if path.is_file() else b"" for path in run.rglob("*")} == before

    def test_what_may_change_is_written_down(self, job: Job, run: Path) -> None:
        pearl_command("train", "--resume", str(run), "run.steps=9", "cluster.max_worker_restarts=1")
        recipe = job.calls[0][0]
        assert (recipe.run.steps, recipe.cluster.max_worker_restarts) == (9, 1)
        assert load_recipe(run / "recipe.toml").recipe == recipe
        origins = json.loads((run / "origins.json").read_text())
        assert origins["cluster.max_worker_restarts"] == "override"
        assert origins["model.path"] == "x.toml:2"

    @pytest.mark.parametrize(
        "override", ["run.seed=1", "run={seed=1}", "clusters.a=1", "rollout.group_size=2", "run=1"]
    )
    def test_what_must_stay_is_refused(self, job: Job, run: Path, override: str) -> None:
        before = (run / "recipe.toml").read_text()
        result = pearl_command("train", "--resume", str(run), override)
        assert result.exit_code == 2
        assert "cannot change when a run is resumed; want run.steps or cluster.*" in result.stderr
        assert (job.calls, (run / "recipe.toml").read_text()) == ([], before)

    def test_a_run_that_is_still_training_is_refused(self, job: Job, run: Path) -> None:
        with RunFolder.open(run):
            result = pearl_command("train", "--resume", str(run))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"{run}: the run is in use by process {os.getpid()}; ")
        assert not job.calls

    def test_a_recipe_is_refused(self, job: Job, run: Path) -> None:
        result = pearl_command("train", "x.toml", "--resume", str(run))
        assert result.exit_code == 2
        assert "got x.toml with --resume, want no recipe" in result.stderr
        assert not job.calls

    def test_no_run_folder(self, job: Job) -> None:
        result = pearl_command("train", "--resume", "runs/nope")
        assert result.exit_code == 2
        assert result.stderr == "runs/nope: no such run folder\n"
