"""``dofsweep db``: the results database itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dofsweep.cli.options import Db, Json

app = typer.Typer(help="Upgrade, check and query the results database.", no_args_is_help=True)


@app.command()
def upgrade(db: Db = None) -> None:
    """Make the tables, or bring them up to the revision this dofsweep needs."""
    from dofsweep.store.session import Store

    with Store(db) as store:
        store.upgrade()
        typer.echo(f"{store.safe_url} is at revision {store.revision()}")


@app.command()
def current(db: Db = None, as_json: Json = False) -> None:
    """Print the revision of the tables, and the one this dofsweep needs."""
    from dofsweep.store.models import REVISIONS
    from dofsweep.store.session import Store

    with Store(db) as store:
        store.require_file()
        found = store.revision()
    facts = {"database": store.safe_url, "revision": found, "needed": REVISIONS[-1]}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(f"{store.safe_url}: revision {found or 'none'}, needed {REVISIONS[-1]}")


@app.command()
def check(db: Db = None) -> None:
    """Compare the tables with those this dofsweep works with."""
    from dofsweep.store.migrate import check as compare
    from dofsweep.store.session import Store

    with Store.open(db) as store:
        compare(store.url)
        typer.echo(f"{store.safe_url} is as it should be")


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help='One SELECT, such as "SELECT * FROM leaderboard".')],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Run one SELECT and print its rows; nothing can be changed."""
    from dofsweep.store.readonly import read_only_query
    from dofsweep.store.session import Store

    columns, rows = read_only_query(Store(db), query)
    shown = [[_shown(value) for value in row] for row in rows]
    if as_json:
        records = [dict(zip(columns, row, strict=True)) for row in shown]
        typer.echo(json.dumps(records, indent=1, default=str))
    elif sys.stdout.isatty():
        _print_table(columns, shown)
    else:
        for line in [columns, *shown]:
            typer.echo("\t".join(_word(value) for value in line))


def _shown(value: Any) -> Any:
    return f"<{len(value)} bytes>" if isinstance(value, bytes | memoryview) else value


def _word(value: Any) -> str:
    """One field of a line of text: no tab or line end inside."""
    return "" if value is None else " ".join(str(value).split())


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_word(value)) for value in row))
    Console().print(table)
