"""The local cluster: ``dofsweep cluster up|down|status``."""

from __future__ import annotations

import json

import typer

from dofsweep.cli.options import Json

app = typer.Typer(help="The local Ray cluster of this machine.", no_args_is_help=True)


@app.command()
def up(as_json: Json = False) -> None:
    """Start the local cluster, to stay up until `cluster down`."""
    from dofsweep.rayrun.local import ensure_cluster, token_path
    from dofsweep.store.session import default_home

    home = default_home()
    cluster, started = ensure_cluster(home, keep=True)
    if as_json:
        typer.echo(json.dumps({"dashboard": cluster.dashboard_url, "started": started}))
        return
    typer.echo(f"dashboard {cluster.dashboard_url} ({'started' if started else 'was up already'})")
    typer.echo(f"the dashboard asks for the token in {token_path(home)}", err=True)


@app.command()
def down(as_json: Json = False) -> None:
    """End the local cluster, with all that runs on it."""
    from dofsweep.rayrun.local import stop_cluster
    from dofsweep.store.session import default_home

    ended = stop_cluster(default_home())
    text = "the local cluster has ended" if ended else "no local cluster was up"
    typer.echo(json.dumps({"ended": ended}) if as_json else text)


@app.command()
def status(as_json: Json = False) -> None:
    """Say whether the local cluster is up, and where its dashboard is."""
    from dofsweep.rayrun.local import find_cluster
    from dofsweep.store.session import default_home

    cluster = find_cluster(default_home())
    url = cluster.dashboard_url if cluster else None
    if as_json:
        typer.echo(json.dumps({"up": cluster is not None, "dashboard": url}))
    else:
        typer.echo(f"up: {url}" if cluster else "down; `dofsweep launch` starts one when needed")
