"""`pearl train`: from a recipe, or a run folder, to a finished run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import typer

from pearl.cli.packages import EXTRAS, pip_command
from pearl.cli.recipes import check_shape, load_arguments, split_arguments
from pearl.config.load import load_recipe
from pearl.config.recipe import Recipe
from pearl.errors import ConfigError, RunFailed, UserError
from pearl.report.live import JobSummary, MultiReporter, PlainReporter, Reporter
from pearl.report.run_folder import RunFolder
from pearl.report.summary import render_summary


def begin(arguments: Sequence[str]) -> None:
    """A new run.

    Raises:
        UserError: the recipe, the installation or the place for the run folder is not fine.
    """
    loaded = load_arguments(arguments)
    require_train_extra("train")
    _preflight(loaded.recipe)
    _run(loaded.recipe, RunFolder.create(loaded.recipe, loaded.origins), resume=False)


def go_on(run: Path, arguments: Sequence[str]) -> None:
    """A run that was begun before.

    Raises:
        UserError: not a run folder, or an override of something that must stay as it was.
    """
    files, overrides = split_arguments(arguments)
    if files:
        raise ConfigError(
            f"command line: got {files[0]} with --resume, want no recipe (the run goes on with {run / 'recipe.toml'})"
        )
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key != "run.steps" and not key.startswith("cluster."):
            raise ConfigError(
                f"command line: {key}: cannot change when a run is resumed; want run.steps or cluster.*, "
                f"or a new run with `pearl train {run / 'recipe.toml'} {override}`"
            )
    folder = RunFolder.open(run)
    loaded = load_recipe(folder.recipe_file, overrides, checks=(check_shape,))
    require_train_extra("train")
    _preflight(loaded.recipe)
    if overrides:
        changed = {key: origin for key, origin in loaded.origins.items() if origin.kind == "override"}
        folder.update(loaded.recipe, changed)
    _run(loaded.recipe, folder, resume=True)


def require_train_extra(command: str, *, without: Sequence[str] = ()) -> None:
    """Refuse early and in plain words what would fail later with an ImportError; `without` may be missing.

    Raises:
        UserError: a package of the train extra is missing.
    """
    missing = [package for package in EXTRAS["train"] if package not in without and find_spec(package) is None]
    if missing:
        raise UserError(
            f"{command}: {', '.join(missing)} not installed; install the train extra: {pip_command('train')}"
        )


def _preflight(recipe: Recipe) -> None:
    # Before there is a run folder: a mistake must not leave one.
    from pearl.cluster.job import preflight

    preflight(recipe)


def _run(recipe: Recipe, folder: RunFolder, *, resume: bool) -> None:
    from pearl.cluster.job import run_job

    reporter = _reporter(recipe, folder)
    try:
        reporter.stage("run folder", str(folder.path))
        summary: JobSummary = run_job(recipe, folder, reporter, resume)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_next_step(folder)}") from None
    except RunFailed as error:
        raise RunFailed(f"{error}\n{_next_step(folder)}") from error
    finally:
        reporter.close()
    typer.echo(f"\n{render_summary(summary)}")


def _reporter(recipe: Recipe, folder: RunFolder) -> Reporter:
    from pearl.report.tensorboard import TensorboardReporter

    terminal: Reporter = PlainReporter(recipe.run.steps)
    if sys.stdout.isatty():
        from rich.console import Console

        from pearl.report.panel import RichReporter

        console = Console()
        if not console.is_dumb_terminal:
            terminal = RichReporter(folder.path.name, recipe.run.steps, console)
    return MultiReporter((terminal, TensorboardReporter(folder.metrics)))


def _next_step(folder: RunFolder) -> str:
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        return f"there is no checkpoint yet; the journal is in {folder.journal}"
    return f"go on from {checkpoint.name} with: pearl train --resume {folder.path}"
