"""Commands that start and stop work: launch, stop."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dofsweep.cli.options import (
    Address,
    Budget,
    ConfigFile,
    CorpusName,
    Db,
    FeatureHeads,
    HeldoutTokens,
    Json,
    Lam,
    Model,
    Preset,
    SeqLen,
    Settings,
    TrainTokens,
    collect_settings,
    print_json,
)

if TYPE_CHECKING:
    from dofsweep.service import Submitted

Detach = Annotated[
    bool, typer.Option("--detach", help="Return the sweep's id at once; the sweep goes on.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(launch)
    app.command()(resume)
    app.command()(stop)


def launch(
    model: Model = None,
    corpus: CorpusName = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="fix, dof, dof_clip, sink_window. Repeatable.")
    ] = None,
    feature_map: Annotated[
        list[str] | None, typer.Option(help="prf, prf_untied. Repeatable.")
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(help="softmax, l2, output, softmax_output, direct. Repeatable."),
    ] = None,
    budget: Budget = None,
    window: Annotated[
        list[str] | None, typer.Option(help="Last tokens seen exactly. Repeatable.")
    ] = None,
    lam: Lam = None,
    seed: Annotated[
        list[str] | None, typer.Option(help="Seed of the initial features. Repeatable.")
    ] = None,
    seq_len: SeqLen = None,
    feature_heads: FeatureHeads = None,
    train_tokens: TrainTokens = None,
    heldout_tokens: HeldoutTokens = None,
    heldout_corpus: Annotated[
        str | None, typer.Option(help="Text to compare on, if not split from the corpus.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name for the sweep.")] = None,
    config: ConfigFile = None,
    preset: Preset = None,
    set_: Settings = None,
    db: Db = None,
    address: Address = None,
    detach: Detach = False,
    as_json: Json = False,
) -> None:
    """Run a sweep: the product of strategies, maps, losses, budgets, λ and seeds.

    Submits one Ray job, follows it, and prints the leaderboard. What is not given takes the
    config's default. Settings without an option of their own go through --set or --config.
    """
    given = {
        "model": model, "corpus": corpus, "strategy": strategy, "feature_map": feature_map,
        "loss": loss, "budget": budget, "window": window, "lam": lam, "seed": seed,
        "seq_len": seq_len, "feature_heads": feature_heads, "train_tokens": train_tokens,
        "heldout_tokens": heldout_tokens, "heldout_corpus": heldout_corpus, "name": name,
    }  # fmt: skip
    settings = collect_settings(config, preset, set_, given)

    from dofsweep import service
    from dofsweep.cli.progress import say
    from dofsweep.store.session import default_home

    sweep = service.submit(
        settings, home=default_home(), db=db, address=address, keep_cluster=detach, say=say
    )
    say(f"sweep {sweep.sweep_id} submitted; Ray dashboard: {sweep.address.url}")
    _see_through(sweep, detach, as_json)


def resume(
    sweep: Annotated[str, typer.Argument(help="Id or name of the sweep.")],
    db: Db = None,
    address: Address = None,
    detach: Detach = False,
    as_json: Json = False,
) -> None:
    """Go on with a sweep that was stopped, interrupted or failed; only what is missing is done."""
    from dofsweep import service
    from dofsweep.cli.progress import say
    from dofsweep.store.session import default_home

    found = service.resume(
        sweep, home=default_home(), db=db, address=address, keep_cluster=detach, say=say
    )
    say(f"sweep {found.sweep_id} resumed; Ray dashboard: {found.address.url}")
    _see_through(found, detach, as_json)


def _see_through(sweep: Submitted, detach: bool, as_json: bool) -> None:
    """Follow a sweep to its end and print its leaderboard; or, detached, say how to look at it."""
    from dofsweep import service
    from dofsweep.cli.progress import follow_with_progress, say
    from dofsweep.errors import SweepFailed

    if detach:
        sweep.store.dispose()
        typer.echo(json.dumps({"sweep": sweep.sweep_id}) if as_json else sweep.sweep_id)
        say(f"look at it:  dofsweep show {sweep.sweep_id}")
        if sweep.own_cluster:
            say("the local cluster stays up; end it:  dofsweep cluster down")
        return
    try:
        row = follow_with_progress(sweep)
        _print_leaderboard(sweep, as_json)
        if row["state"] != "finished":
            raise SweepFailed(f"sweep {sweep.sweep_id} is {row['state']}: {row['error']}")
        say(f"look again:  dofsweep leaderboard {sweep.sweep_id}")
    except KeyboardInterrupt:
        say(f"stopping {sweep.sweep_id}")
        service.stop(sweep.store, sweep.sweep_id, sweep.home)
        raise SweepFailed(
            f"sweep {sweep.sweep_id} was stopped from the keyboard; go on with "
            f"`dofsweep resume {sweep.sweep_id}`"
        ) from None
    finally:
        service.close(sweep)


def _print_leaderboard(sweep: Submitted, as_json: bool) -> None:
    from dofsweep.report.tables import print_leaderboard
    from dofsweep.store.queries import leaderboard

    rows = leaderboard(sweep.store, sweep.sweep_id)
    if as_json:
        print_json(rows)
    elif any(row["heldout_loss"] is not None for row in rows):
        print_leaderboard(rows, sys.stdout)


def stop(
    sweep: Annotated[str, typer.Argument(help="Id or name of the sweep.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Stop a sweep; what it finished stays in the database."""
    from dofsweep import service
    from dofsweep.store.session import Store, default_home

    with Store.open(db) as store:
        home: Path = default_home()
        row = service.stop(store, sweep, home)
        if as_json:
            typer.echo(json.dumps({"sweep": row["id"], "state": row["state"]}))
        else:
            typer.echo(f"{row['id']} is {row['state']}")
