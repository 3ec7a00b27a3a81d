"""`pearl compare`: a recipe on virtual time under several policies and seeds, in processes side by side.

Each run is what `pearl simulate` does with the same policy and seed, whatever runs beside it. A policy that cannot do it (its
GPUs never come, say) leaves its column empty and the others as they are.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import typer

from pearl.cli.packages import pip_command
from pearl.cli.progress import NotShown, Shown, shown_here
from pearl.cli.recipes import load_arguments
from pearl.cli.simulate import CHECKS, leave_to_the_journal, simulate_into_folder
from pearl.config.elastic import ElasticConfig
from pearl.config.load import LoadedRecipe, dump_toml
from pearl.errors import ConfigError, PearlError, RunFailed, RunFolderError, UserError
from pearl.report.run_folder import new_folder
from pearl.sim.comparison import Outcome, comparison_json, comparison_text
from pearl.sim.plot import can_plot, plot_fleets
from pearl.sim.simulate import Simulation
from pearl.units import format_duration

POLICIES: tuple[str, ...] = get_args(ElasticConfig.model_fields["policy"].annotation)
MOST_SEEDS = 1000
GRACE_S = 5.0
"""For simulations to end in order after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One run of a comparison, to be simulated in a process of its own."""

    arguments: tuple[str, ...]
    policy: str
    """`static:SHAPE`: with a shape of its own."""
    seed: int
    place: Path

    @property
    def loaded(self) -> LoadedRecipe:
        policy, _, shape = self.policy.partition(":")
        overrides = [f'elastic.policy="{policy}"', f"run.seed={self.seed}"]
        if shape:
            overrides.append(f'elastic.shape="{shape}"')
        return load_arguments([*self.arguments, *overrides], checks=CHECKS)


def compare(arguments: Sequence[str], policies: str, *, seeds: int = 1, jobs: int | None = None, as_json: bool) -> None:
    """Simulate a recipe under several policies, and print them side by side.

    Raises:
        UserError: the recipe is not fine, a policy is none, or the folder cannot be made; nothing is left behind.
        RunFailed: a policy could not do it; printed when the others were.
        KeyboardInterrupt: Ctrl-C; the folder has what happened until then.
    """
    names = _policies(policies)
    if not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(f"--seeds: got {seeds}, want 1..{MOST_SEEDS}")
    first_seed = load_arguments(arguments).recipe.run.seed
    planned = [
        _Job(arguments=tuple(arguments), policy=name, seed=first_seed + number, place=Path())
        for number in range(seeds)
        for name in names
    ]
    # All that can be known to be wrong is found before there is a folder.
    for job in planned[: len(names)]:
        Simulation(job.loaded.recipe)
    recipe = planned[0].loaded.recipe
    folder = new_folder(recipe.run.root, f"{recipe.run.name}-compare")
    shown = shown_here(quiet=as_json)
    try:
        work = [
            _Job(
                arguments=job.arguments,
                policy=job.policy,
                seed=job.seed,
                place=folder / "runs" / f"{job.policy.replace(':', '-')}-seed{job.seed}",
            )
            for job in planned
        ]
        columns = _simulate(work, names, shown, jobs or os.cpu_count() or 1)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; what was simulated until then is in {folder}") from None
    finally:
        shown.close()
    _tell(columns, folder, recipe.run.name, dump_toml(recipe), as_json=as_json)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError("--policies: got none, want some of " + ", ".join(POLICIES))
    for name in names:
        policy, colon, _ = name.partition(":")
        if policy not in POLICIES or (colon and policy != "static"):
            raise ConfigError(f"--policies: got {name!r}, want some of {', '.join(POLICIES)}, or static:SHAPE")
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"--policies: got {twice[0]!r} twice, want each once")
    return names


def _simulate(work: Sequence[_Job], names: Sequence[str], shown: Shown, jobs: int) -> dict[str, list[Outcome] | str]:
    """Policy -> its runs in order of seeds, or why one of them failed."""
    at_once = min(jobs, len(work))
    shown.say(f"{len(work)} simulations of {', '.join(names)}, {at_once} at a time")
    outcomes: dict[_Job, Outcome | str] = {}
    for job, found in _here(work) if at_once == 1 else _in_processes(work, at_once):
        outcomes[job] = found
        shown.say(f"{job.policy}, seed {job.seed}: {_said(found)}")
        shown.now(len(outcomes) / len(work), f"{len(outcomes)} of {len(work)} simulations")
    columns: dict[str, list[Outcome] | str] = {}
    for name in names:
        found_all = [outcomes[job] for job in work if job.policy == name]
        failed = [found for found in found_all if isinstance(found, str)]
        columns[name] = failed[0] if failed else [found for found in found_all if not isinstance(found, str)]
    return columns


def _here(work: Sequence[_Job]) -> Iterator[tuple[_Job, Outcome | str]]:
    for job in work:
        yield job, _run(job)


def _in_processes(work: Sequence[_Job], at_once: int) -> Iterator[tuple[_Job, Outcome | str]]:
    """As they end."""
    # Not forked: threads of this process, such as the one that draws progress, would be in an unknown state there.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, mp_context=context) as pool:
        try:
            with _ctrl_c_ignored():
                futures: dict[Future[Outcome | str], _Job] = {pool.submit(_run_apart, job): job for job in work}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _end_processes()
            raise


def _end_processes() -> None:
    """Those that still run: in order where they have heard of it, else (they were starting) at once."""
    until_s = time.monotonic() + GRACE_S
    for process in multiprocessing.active_children():
        process.join(max(0.0, until_s - time.monotonic()))
        if process.is_alive():
            process.terminate()


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C, which would end them amid their imports, until `_run_apart`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run_apart(job: _Job) -> Outcome | str:
    """In a process of its own: Ctrl-C, which a terminal tells to all of a command's processes, ends the run in order."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _run(job)
    except KeyboardInterrupt:
        return "stopped"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(job: _Job) -> Outcome | str:
    """The run, or why it failed."""
    began_s = time.monotonic()
    leave_to_the_journal()
    try:
        done = simulate_into_folder(job.loaded, NotShown(), place=job.place)
    except UserError:
        raise
    except PearlError as error:
        return str(error).splitlines()[0]
    tally = done.run.tally
    return Outcome(
        figures=done.figures,
        timeline=tuple(tally.timeline),
        steps_s=tuple(step.at_s for step in tally.steps),
        availability=done.run.availability,
        wall_s=time.monotonic() - began_s,
    )


def _said(found: Outcome | str) -> str:
    if isinstance(found, str):
        return f"failed: {found}"
    figures = found.figures
    return (
        f"{figures.tokens_per_s:,.0f} tokens/s over {format_duration(figures.seconds)}, {figures.steps} steps, "
        f"simulated in {format_duration(found.wall_s)}"
    )


def _tell(columns: Mapping[str, list[Outcome] | str], folder: Path, name: str, recipe: str, *, as_json: bool) -> None:
    document = {"folder": str(folder), "policies": comparison_json(columns)}
    text = json.dumps(document, indent=2, allow_nan=False)
    try:
        (folder / "comparison.json").write_text(text + "\n", encoding="utf-8")
        (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be written: {error.strerror or error}") from error
    first_seeds = [found[0] for found in columns.values() if not isinstance(found, str)]
    plot = _plot(first_seeds, folder, name)
    if as_json:
        typer.echo(text)
        if not can_plot():
            typer.echo(plot, err=True)
    else:
        figures = {
            policy: found if isinstance(found, str) else [outcome.figures for outcome in found]
            for policy, found in columns.items()
        }
        typer.echo(f"\n{comparison_text(figures)}\n\nfolder  {folder}\nplot    {plot}")
    if failed := [f"{policy}: {why}" for policy, why in columns.items() if isinstance(why, str)]:
        raise RunFailed("\n".join(failed))


def _plot(outcomes: Sequence[Outcome], folder: Path, name: str) -> str:
    if not outcomes:
        return "none, because no policy came to an end"
    if not can_plot():
        return f"none, because matplotlib is not installed; for it: {pip_command('report')}"
    _, picture = plot_fleets(outcomes, folder, f"{name}: what the GPUs do")
    return str(picture)
