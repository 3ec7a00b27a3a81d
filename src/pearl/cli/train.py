"""`pearl train`: from a recipe, or a run folder, to a finished run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import typer

from pearl.cli.packages import EXTRAS, pip_command
from pearl.cli.recipes import check_shape, load_arguments, split_arguments
from pearl.config.load import load_recipe
from pearl.config.recipe import Recipe
from pearl.errors import ConfigError, PearlError, RunFailed, RunFolderError, UserError
from pearl.report.live import MultiReporter, PlainReporter, Reporter, stage_line
from pearl.report.run_folder import RunFolder
from pearl.report.summary import render_summary


def begin(arguments: Sequence[str]) -> None:
    """A new run.

    Raises:
        UserError: the recipe, the installation or the place for the run folder is not fine; nothing is left behind.
        RunFailed: the run cannot go on.
    """
    loaded = load_arguments(arguments)
    require_train_extra("train")
    from pearl.cluster.preflight import preflight

    # All that can be known to be wrong is found before there is a run folder: a mistake must not leave one.
    preflight(loaded.recipe)
    with _ray(loaded.recipe), RunFolder.create(loaded.recipe, loaded.origins) as folder:
        run = _Run(loaded.recipe, folder, resume=False)
        try:
            run.do()
        except UserError:
            folder.discard()
            raise


def go_on(run: Path, arguments: Sequence[str]) -> None:
    """A run that was begun before.

    Raises:
        UserError: not a run folder, one in use, an override of something that must stay as it was, or a model that is not
            the run's; the folder stays as it was.
        RunFailed: the run cannot go on.
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
    with RunFolder.open(run) as folder:
        if folder.world == "simulated":
            raise RunFolderError(
                f"{run}: a simulated run has nothing to go on from; simulate it again with "
                f"`pearl simulate {folder.recipe_file}`"
            )
        loaded = load_recipe(folder.recipe_file, overrides, checks=(check_shape,))
        changed = {key: origin for key, origin in loaded.origins.items() if origin.kind == "override"}
        require_train_extra("train")
        from pearl.cluster.preflight import preflight_resumption

        preflight_resumption(loaded.recipe, folder)
        with _ray(loaded.recipe):
            update = partial(folder.update, loaded.recipe, changed) if changed else _nothing
            _Run(loaded.recipe, folder, resume=True, begin=update).do()


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


def _ray(recipe: Recipe) -> AbstractContextManager[None]:
    from pearl.cluster.local_ray import ray_session

    address = recipe.cluster.address
    typer.echo(stage_line("ray", f"connecting to {address}" if address else "starting"))
    return ray_session(recipe.cluster)


def _nothing() -> None:
    pass


@dataclass(slots=True)
class _Run:
    """From a run folder to a summary."""

    recipe: Recipe
    folder: RunFolder
    _: KW_ONLY
    resume: bool
    begin: Callable[[], None] = _nothing
    """Called when nothing of the user's can be wrong any more, and before the run changes anything in its folder."""
    _has_begun: bool = False

    def do(self) -> None:
        """Run, and say how it ended.

        Raises:
            UserError: something of the user's is wrong, and the run has not begun.
            RunFailed: everything else.
        """
        from pearl.cluster.job import run_job

        reporter = _reporter(self.recipe, self.folder)
        try:
            reporter.stage("run folder", str(self.folder.path))
            summary = run_job(self.recipe, self.folder, reporter, self.resume, self._begun)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {_next_step(self.folder)}") from None
        except PearlError as error:
            # Whatever it is, a run that has begun has something to go on from, and is no mistake in a recipe.
            if isinstance(error, UserError) and not self._has_begun:
                raise
            raise RunFailed(f"{error}\n{_next_step(self.folder)}") from error
        finally:
            reporter.close()
        typer.echo(f"\n{render_summary(summary)}")

    def _begun(self) -> None:
        self.begin()
        self._has_begun = True


def _reporter(recipe: Recipe, folder: RunFolder) -> Reporter:
    from pearl.report.tensorboard import TensorboardReporter

    terminal: Reporter = PlainReporter(recipe.run.steps)
    if sys.stdout and sys.stdout.isatty():
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
