"""`pearl simulate`: a recipe on virtual time, with a run folder like that of a real run."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import typer

from pearl.cli.progress import Aim, Follower, Shown, shown_here
from pearl.cli.recipes import load_arguments
from pearl.config.check import check_plan, check_simulation
from pearl.config.load import LoadedRecipe
from pearl.config.recipe import Recipe
from pearl.errors import PearlError, RunFailed, UserError
from pearl.pipeline.training_loop import StepOutcome
from pearl.report.live import JobSummary, MultiReporter, Reporter, StepReport
from pearl.report.plain_journal import PlainJournal
from pearl.report.run_folder import RunFolder
from pearl.report.summary import write_summary
from pearl.sim.simulate import Simulated, Simulation
from pearl.sim.summary import Figures, figures_json, figures_of, summary_text

CHECKS = (check_simulation, check_plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A simulation that came to its end."""

    run: Simulated
    figures: Figures
    folder: Path


def run_simulation(arguments: Sequence[str], *, as_json: bool) -> None:
    """Simulate a recipe, and print what it came to: progress and a summary, or one JSON object and nothing else.

    Raises:
        UserError: the recipe is not fine, a file that it names is not, or the run folder cannot be made; nothing is left behind.
        RunFailed: as a real run does.
        KeyboardInterrupt: Ctrl-C; the run folder has what happened until then.
    """
    loaded = load_arguments(arguments, checks=CHECKS)
    leave_to_the_journal()
    shown = shown_here(quiet=as_json)
    try:
        done = simulate_into_folder(loaded, shown)
    finally:
        shown.close()
    if as_json:
        typer.echo(json.dumps({"folder": str(done.folder), **figures_json(done.figures)}, indent=2, allow_nan=False))
    else:
        typer.echo(f"\n{summary_text(done.run, done.figures)}\nrun folder    {done.folder}")


def leave_to_the_journal() -> None:
    """Losses that a simulation was asked for are no news: who wants to know them reads its journal."""
    logging.getLogger("pearl").setLevel(logging.ERROR)


def simulate_into_folder(loaded: LoadedRecipe, shown: Shown, *, place: Path | None = None) -> Finished:
    """Simulate a recipe into a run folder, under `run.root` or at a place; raises as `run_simulation`."""
    recipe = loaded.recipe
    with RunFolder.create(recipe, loaded.origins, place=place, world="simulated") as folder:
        try:
            return _Simulating(recipe, folder, shown).do()
        except UserError:
            folder.discard()
            raise


class _Simulating:
    def __init__(self, recipe: Recipe, folder: RunFolder, shown: Shown) -> None:
        self._recipe, self._folder = recipe, folder
        self._journal = PlainJournal(folder.journal)
        aim = Aim(steps=recipe.run.steps, duration_s=recipe.simulation.duration_s)
        self._follower = Follower(self._journal, shown, aim)
        self._simulation = Simulation(recipe, self._follower)
        timeline = self._simulation.tally.timeline
        self._follower.fleet = lambda: timeline[-1] if timeline else None
        self._curves: Reporter = MultiReporter(_curves(folder))

    def do(self) -> Finished:
        """Run it, and write its summary, however it ends."""
        try:
            run = self._simulation.run(self._step)
        except KeyboardInterrupt:
            self._end("interrupted")
            where = f"{self._simulation.now_s:,.0f} virtual seconds are in {self._folder.path}"
            raise KeyboardInterrupt(f"stopped; {where}") from None
        except PearlError as error:
            if isinstance(error, UserError):
                self._journal.close()
                raise
            self._end("failed")
            raise RunFailed(f"{error}\nwhat happened until then is in {self._folder.path}") from error
        return Finished(run=run, figures=self._end("finished"), folder=self._folder.path)

    def _step(self, outcome: StepOutcome, report: StepReport) -> None:
        self._follower.step(outcome, report.tokens_per_s)
        self._curves.step(report)

    def _end(self, how: str) -> Figures:
        self._journal.close()
        self._curves.close()
        run = self._simulation.so_far()
        figures = figures_of(run, self._recipe)
        write_summary(_job_summary(self._folder.path, run), {"ended": how, "simulation": figures_json(figures)})
        return figures


def _curves(folder: RunFolder) -> tuple[Reporter, ...]:
    """TensorBoard files, where it is installed: it belongs to the train extra."""
    if find_spec("tensorboard") is None:
        return ()
    from pearl.report.tensorboard import TensorboardReporter

    return (TensorboardReporter(folder.metrics),)


def _job_summary(folder: Path, run: Simulated) -> JobSummary:
    totals, seconds = run.totals, max(run.seconds, 1e-9)
    return JobSummary(
        folder=folder,
        steps=totals.steps,
        new_steps=totals.steps,
        wall_s=run.seconds,
        success_before=None,
        success_after=None,
        trained_tokens=totals.trained_tokens,
        tokens_per_s=totals.generated_tokens / seconds,
        stale_token_frac=totals.stale_tokens / max(totals.trained_tokens, 1),
        staleness_max=totals.staleness_max,
        trainer_idle_frac=min(1.0, totals.wait_s / seconds),
        rollout_idle_frac=1 - min(1.0, totals.busy_s / max(totals.rollout_s, 1e-9)),
        faults={name: count for name, count in sorted(run.tally.ends.items()) if _is_fault(name)},
        restarts=run.restarts,
    )


def _is_fault(status: str) -> bool:
    return status not in ("done", "cancelled") and not status.startswith("truncated")
