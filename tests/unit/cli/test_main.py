"""The commands: what they print, how they end, what they import."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

import pearl
from pearl.cli import train as train_command
from pearl.cli.main import app
from pearl.config.load import load_recipe
from pearl.config.recipe import Recipe
from pearl.errors import ModelError, RunFailed, UserError
from pearl.report.live import JobSummary, Reporter, StepReport
from pearl.report.run_folder import RunFolder

RECIPE = '[model]\npath = "m"\n\n[environment]\nkind = "guess_number"\nparams = { low = 1 }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with one recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(RECIPE)
    return tmp_path


def pearl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


class Job:
    """Stands in for the runtime: remembers how it was called, then does as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Recipe, RunFolder, bool]] = []
        self.act: Callable[[RunFolder, Reporter], None] = lambda folder, reporter: None

    def preflight(self, recipe: Recipe) -> None:
        if recipe.environment.kind == "odd":
            raise ModelError("the model is odd")

    def run_job(self, recipe: Recipe, folder: RunFolder, reporter: Reporter, resume: bool) -> JobSummary:
        self.calls.append((recipe, folder, resume))
        self.act(folder, reporter)
        return JobSummary(
            folder=folder.path,
            steps=recipe.run.steps,
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
    module = ModuleType("pearl.cluster.job")
    module.run_job = job.run_job  # type: ignore[attr-defined]
    module.preflight = job.preflight  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pearl.cluster.job", module)
    return job


def run_folders() -> list[Path]:
    return sorted(Path("runs").iterdir()) if Path("runs").exists() else []


class TestRoot:
    def test_version(self) -> None:
        assert pearl_command("--version").stdout == f"pearl {pearl.__version__}\n"

    def test_help_names_the_commands(self) -> None:
        text = pearl_command("--help").stdout
        assert all(command in text for command in ("train", "config", "doctor"))

    @pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], ["config", "nonsense"]])
    def test_unknown_commands_and_options(self, arguments: list[str]) -> None:
        result = pearl_command(*arguments)
        assert result.exit_code == 2
        assert "nonsense" in result.stderr


class TestConfigShow:
    def test_every_value_with_its_origin(self) -> None:
        result = pearl_command("config", "show", "x.toml", "rollout.max_staleness=2", "environment.params.high=16")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        shown = {line.partition("  #")[0].rstrip(): line.partition("  # ")[2] for line in lines}
        assert shown['path = "m"'] == "x.toml:2"
        assert shown["low = 1"] == "x.toml:6"
        assert shown["high = 16"] == "override"
        assert shown["max_staleness = 2"] == "override"
        assert shown["group_size = 8"] == "default"
        assert shown["# stop_at_success is not set"] == "default"
        comments = {line.index("  # ") for line in lines if "  # " in line}
        assert len(comments) == 1, "origins stand in one column"

    @pytest.mark.parametrize("overrides", [[], ["environment.params={}"], ['environment.params.note=a # b \\ "c"']])
    def test_what_is_shown_is_the_recipe_itself(self, overrides: list[str]) -> None:
        Path("shown.toml").write_text(pearl_command("config", "show", "x.toml", *overrides).stdout)
        assert load_recipe(Path("shown.toml")).recipe == load_recipe(Path("x.toml"), overrides).recipe

    def test_an_empty_table_is_shown(self) -> None:
        Path("y.toml").write_text('model.path = "m"\nenvironment.kind = "k"\n')
        result = pearl_command("config", "show", "y.toml")
        assert tomllib.loads(result.stdout)["environment"]["params"] == {}

    def test_json(self) -> None:
        document = json.loads(pearl_command("config", "show", "x.toml", "--json", "run.seed=3").stdout)
        assert document["run.seed"] == {"value": 3, "origin": "override"}
        assert document["environment.params.low"] == {"value": 1, "origin": "x.toml:6"}
        assert document["run.stop_at_success"] == {"value": None, "origin": "default"}


class TestConfigCheck:
    def test_a_fine_recipe(self) -> None:
        result = pearl_command("config", "check", "x.toml", "run.seed=3")
        assert result.exit_code == 0
        # path, kind, params.low and the seed are set.
        assert result.stdout.startswith("x.toml: fine; 4 values set, ")

    def test_mistakes_end_with_status_2_and_no_traceback(self) -> None:
        result = pearl_command("config", "check", "x.toml", "rollout.max_stalenes=3", "engine.shape=9X")
        assert result.exit_code == 2
        assert result.stdout == ""
        first, second = result.stderr.splitlines()
        assert first.startswith("command line: rollout.max_stalenes: unknown key; did you mean rollout.max_staleness?")
        assert second.startswith("command line: engine.shape: got '9X', want e.g. `2C`")

    def test_nothing_to_check(self) -> None:
        result = pearl_command("config", "check", "run.seed=3")
        assert result.exit_code == 2
        assert result.stderr.startswith("command line: no recipe; want at least one, e.g. ")


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
        assert lines[0] == f"run folder  {folder.path}"
        assert lines[1] == "training    on"
        assert lines[2].startswith("step 1/5 ")
        assert lines[4] == "success     0.25 -> 0.75"
        assert lines[5] == f"run folder  {folder.path}"
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

    @pytest.mark.parametrize(
        ("error", "status"), [(ModelError("the model is odd"), 2), (RunFailed("too many restarts"), 1)]
    )
    def test_errors_end_with_a_message_and_a_status(self, job: Job, error: Exception, status: int) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            raise error

        job.act = act
        result = pearl_command("train", "x.toml")
        assert result.exit_code == status
        assert result.stderr.startswith(str(error))
        assert "Traceback" not in result.output

    def test_a_failed_run_says_how_to_go_on(self, job: Job) -> None:
        def act(folder: RunFolder, reporter: Reporter) -> None:
            (folder.checkpoints / "step-000010").mkdir()
            raise RunFailed("too many restarts")

        job.act = act
        result = pearl_command("train", "x.toml")
        [folder] = run_folders()
        assert result.stderr == f"too many restarts\ngo on from step-000010 with: pearl train --resume {folder}\n"

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

    def test_a_recipe_is_refused(self, job: Job, run: Path) -> None:
        result = pearl_command("train", "x.toml", "--resume", str(run))
        assert result.exit_code == 2
        assert "got x.toml with --resume, want no recipe" in result.stderr
        assert not job.calls

    def test_no_run_folder(self, job: Job) -> None:
        result = pearl_command("train", "--resume", "runs/nope")
        assert result.exit_code == 2
        assert result.stderr == "runs/nope: no such run folder\n"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("ray", "safetensors", "tensorboard", "tokenizers", "torch", "transformers", "psutil")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pearl.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded', sorted(set(sys.modules) & {{'numpy', 'pydantic', 'asyncio', *{HEAVY!r}}}))"
    )
    assert python(code).splitlines()[-1] == "loaded []"


def test_the_base_install_is_enough_for_all_but_training() -> None:
    code = (
        "import sys\n"
        f"for name in {HEAVY!r}:\n    sys.modules[name] = None\n"
        "import pearl.config.load, pearl.core.shape, pearl.core.state, pearl.report.journal, pearl.report.panel\n"
        "import pearl.cli.train, pearl.cli.doctor, pearl.cli.config\n"
        "from pearl.cli.main import app\n"
        "app(['config', 'check', 'x.toml'])\n"
    )
    assert python(code).startswith("x.toml: fine; ")


def test_user_errors_are_two_and_others_one() -> None:
    # The promise of the module: what the user can mend is 2.
    assert issubclass(ModelError, UserError)
    assert not issubclass(RunFailed, UserError)


def test_the_command_ends_cleanly_on_ctrl_c_outside_a_command() -> None:
    code = (
        "import sys, pearl.cli.main as m\n"
        "def app():\n    raise KeyboardInterrupt\n"
        "m.app = app\n"
        "try:\n    m.main()\nexcept SystemExit as error:\n    print(error.code)"
    )
    assert python(code) == "130\n"
