"""Commands that read results: ls, show, leaderboard, logs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dofsweep.cli.options import Db, Json, print_json

SweepArgument = Annotated[str, typer.Argument(help="Id or name of the sweep.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("ls")(list_)
    app.command()(show)
    app.command()(leaderboard)
    app.command()(logs)


def list_(db: Db = None, as_json: Json = False) -> None:
    """List the sweeps, newest first."""
    from dofsweep.report.tables import print_sweeps
    from dofsweep.store.queries import list_sweeps
    from dofsweep.store.session import Store

    with Store.open(db) as store:
        rows = list_sweeps(store)
    if as_json:
        print_json(rows)
    else:
        print_sweeps(rows, sys.stdout)


def show(sweep: SweepArgument, db: Db = None, as_json: Json = False) -> None:
    """Show one sweep: state, settings, timings, trials."""
    from dofsweep.report.tables import print_sweep
    from dofsweep.store.queries import get_sweep
    from dofsweep.store.queries import leaderboard as read_leaderboard
    from dofsweep.store.session import Store

    with Store.open(db) as store:
        row = get_sweep(store, sweep)
        trials = read_leaderboard(store, row["id"])
    if as_json:
        print_json(row | {"trials": trials})
    else:
        print_sweep(row, trials, sys.stdout)


def leaderboard(
    sweep: Annotated[
        str | None, typer.Argument(help="Id or name of a sweep; all sweeps if left out.")
    ] = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Compare teacher and students by held-out next-token loss."""
    from dofsweep.report.tables import print_leaderboard
    from dofsweep.store.queries import leaderboard as read_leaderboard
    from dofsweep.store.session import Store

    with Store.open(db) as store:
        rows = read_leaderboard(store, sweep)
    if as_json:
        print_json(rows)
    else:
        print_leaderboard(rows, sys.stdout)


def logs(sweep: SweepArgument, db: Db = None, as_json: Json = False) -> None:
    """Print what the sweep's driver logged."""
    from dofsweep import service
    from dofsweep.driver import log_path
    from dofsweep.store.queries import get_sweep
    from dofsweep.store.session import Store, default_home

    home = default_home()
    with Store.open(db) as store:
        row = get_sweep(store, sweep)
    path = log_path(home, row["id"])
    text = path.read_text() if path.exists() else service.jobs_of(row, home).logs(row["id"])
    if as_json:
        print_json({"sweep": row["id"], "lines": text.splitlines()})
    else:
        typer.echo(text, nl=False)
