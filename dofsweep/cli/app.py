"""The ``dofsweep`` command. Modules here import only typer and our own light modules at the top:
``dofsweep --help`` must answer at once, and torch, ray and transformers take seconds to import."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dofsweep import __version__
from dofsweep.cli import cluster, db, inspect, launch, results
from dofsweep.errors import DofsweepError

app = typer.Typer(
    name="dofsweep",
    help="Sweeps that turn softmax transformers into linear-attention students.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
launch.register(app)
results.register(app)
inspect.register(app)
app.add_typer(db.app, name="db")
app.add_typer(cluster.app, name="cluster")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dofsweep {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Sweeps that turn softmax transformers into linear-attention students."""


def main() -> None:
    """Entry point: an error of ours is one line on stderr and its exit code, never a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except DofsweepError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(err.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away; nothing is left to say
        sys.exit(0)


if __name__ == "__main__":
    main()
