"""`pearl`: the commands and how errors end them.

Exit status: 0 done; 1 the run failed, something essential is missing, or what there is to say cannot be written; 2 a mistake
in a recipe or on the command line; 130 stopped with Ctrl-C. Nothing heavy is imported before a command needs it: `pearl
--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import pearl
from pearl.cli.output import guarded_output, stdout_may_be_closed
from pearl.errors import PearlError, UserError

_ARGUMENTS = "RECIPE.toml|a.b=c"


class _Commands(TyperGroup):
    """Ends a command with a message instead of a traceback where the message is all there is to know."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _end(str(error), 2) from None
        except PearlError as error:
            raise _end(str(error), 1) from None
        except KeyboardInterrupt as interrupt:
            raise _end(str(interrupt) or "stopped", 130) from None


def _end(text: str, status: int) -> typer.Exit:
    typer.echo(text, err=True)
    return typer.Exit(status)


app = typer.Typer(
    name="pearl",
    cls=_Commands,
    help="Asynchronous agentic reinforcement learning on a rollout fleet that changes shape.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Show and check recipes.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
plan_app = typer.Typer(help="See what a policy would do with a fleet.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(plan_app, name="plan")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pearl {pearl.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar=_ARGUMENTS, help="Recipe files, later ones win, and values to override.", show_default=False
    ),
]


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=_ARGUMENTS, help="Recipe files, later ones win, and values to override.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on with the run in this folder instead; takes overrides of run.steps and cluster.* only.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model as a recipe says."""
    from pearl.cli.train import begin, go_on

    stdout_may_be_closed()
    if resume is None:
        begin(arguments or [])
    else:
        go_on(resume, arguments or [])


@app.command()
def profile(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face checkpoint.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the profile goes; by default MODEL.profile.json, here.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    quick: Annotated[
        bool, typer.Option("--quick", help="A coarse grid and few values: a rough profile, fast.")
    ] = False,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Longest context of the grid, in tokens; by default the model's, at most 2048.",
            show_default=False,
        ),
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Largest batch of the grid.")] = 64,
    kv_gib: Annotated[
        float | None,
        typer.Option(
            "--kv-gib", help="Memory for KV; by default most of what a GPU has free, 1 on a CPU.", show_default=False
        ),
    ] = None,
) -> None:
    """Measure how fast a model is on this machine."""
    from pearl.cli.profile import ProfileOptions, run_profile

    stdout_may_be_closed()
    run_profile(
        ProfileOptions(
            model=model,
            out=out,
            device=device,
            dtype=dtype,
            quick=quick,
            max_context_tokens=max_context,
            max_sequences=max_sequences,
            kv_gib=kv_gib,
        )
    )


@config_app.command("show")
def config_show(
    arguments: _Arguments, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> None:
    """Print every value of a recipe with the place where it was set."""
    from pearl.cli.config import as_json_text, as_toml_text
    from pearl.cli.recipes import load_arguments

    loaded = load_arguments(arguments)
    typer.echo(as_json_text(loaded) if as_json else as_toml_text(loaded))


@config_app.command("check")
def config_check(arguments: _Arguments) -> None:
    """Check a recipe; every mistake is named, one a line."""
    from pearl.cli.config import check_text
    from pearl.cli.recipes import load_arguments

    typer.echo(check_text(arguments, load_arguments(arguments)))


@plan_app.command("explain")
def plan_explain(
    arguments: _Arguments,
    serving: Annotated[
        str,
        typer.Option(
            metavar="SHAPE", help="What serves already, e.g. 2P4D@tp2; by default nothing does.", show_default=False
        ),
    ] = "",
    training: Annotated[bool, typer.Option("--training", help="While training uses its GPUs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the shapes considered with their predicted times, the choice, the plan, and why."""
    from pearl.cli.plan import explain

    typer.echo(explain(arguments, serving=serving, training=training, as_json=as_json))


@app.command()
def simulate(
    arguments: _Arguments, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> None:
    """Run a recipe on virtual time: the code of a real run, on simulated GPUs."""
    from pearl.cli.simulate import run_simulation

    run_simulation(arguments, as_json=as_json)


@app.command()
def compare(
    arguments: _Arguments,
    policies: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Policies of [elastic], e.g. pearl,roll; static:SHAPE is a fleet of that shape.",
            show_default=False,
        ),
    ],
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Simulate each policy with so many seeds, run.seed the first of them.")
    ] = 1,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Simulations at a time; by default one per core.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Simulate a recipe under several policies, side by side."""
    from pearl.cli.compare import compare as compare_policies

    compare_policies(arguments, policies, seeds=seeds, jobs=jobs, as_json=as_json)


@app.command()
def doctor() -> None:
    """Check this machine for what training needs."""
    from pearl.cli.doctor import examine, is_healthy, report_text

    findings = examine()
    typer.echo(report_text(findings))
    if not is_healthy(findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `pearl` command."""
    with guarded_output():
        try:
            app()
        except KeyboardInterrupt:
            # Before or after a command: during imports, or while Python shuts down.
            typer.echo("stopped", err=True)
            sys.exit(130)


if __name__ == "__main__":
    main()
