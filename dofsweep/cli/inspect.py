"""Commands about teachers and this machine: models, dof, plan, doctor."""

from __future__ import annotations

import sys
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
    from dofsweep.config import SweepConfig
    from dofsweep.records import HeadSpectrum
    from dofsweep.teacher.resolve import TeacherRef


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(models)
    app.command()(dof)
    app.command()(plan)
    app.command()(doctor)


def models(as_json: Json = False) -> None:
    """List the teachers that have a short name; any hub id, folder or .gguf file will do too."""
    from dofsweep.report.tables import print_models
    from dofsweep.store.session import default_home
    from dofsweep.teacher.catalog import catalog_rows

    rows = catalog_rows(default_home())
    if as_json:
        print_json(rows)
    else:
        print_models(rows, sys.stdout)


def _spectra(
    settings: SweepConfig, db: str | None, address: str | None
) -> tuple[TeacherRef, list[HeadSpectrum]]:
    """Spectra from the store or from a job, with its progress shown."""
    from dofsweep.cli.progress import say, watcher
    from dofsweep.service import measure_spectra
    from dofsweep.store.session import default_home

    with watcher() as watch:
        return measure_spectra(
            settings, home=default_home(), db=db, address=address, say=say, watch=watch
        )


def dof(
    model: Model = None,
    corpus: CorpusName = None,
    lam: Lam = None,
    seq_len: SeqLen = None,
    train_tokens: TrainTokens = None,
    heldout_tokens: HeldoutTokens = None,
    feature_heads: FeatureHeads = None,
    config: ConfigFile = None,
    preset: Preset = None,
    set_: Settings = None,
    db: Db = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Degrees of freedom of every layer and feature head (Table 2 of the paper).

    Spectra come from the store when the same teacher and text were seen before.
    """
    given = {"model": model, "corpus": corpus, "lam": lam, "seq_len": seq_len,
             "feature_heads": feature_heads,
             "train_tokens": train_tokens, "heldout_tokens": heldout_tokens}  # fmt: skip
    settings = collect_settings(config, preset, set_, given)

    from dofsweep.core.spectrum import dof_table
    from dofsweep.report.tables import print_dof

    ref, spectra = _spectra(settings, db, address)
    tables = dof_table(spectra, settings.lam)
    if as_json:
        rows = [
            {"model": ref.name, "lam": lam, "layer": i, "head": h, "dof": float(value)}
            for lam, table in zip(settings.lam, tables, strict=True)
            for i, heads in enumerate(table)
            for h, value in enumerate(heads)
        ]
        print_json(rows)
        return
    for value, table in zip(settings.lam, tables, strict=True):
        print_dof(ref.name, value, settings, table, sys.stdout)


def plan(
    model: Model = None,
    corpus: CorpusName = None,
    budget: Budget = None,
    lam: Lam = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="fix, dof, dof_clip. Repeatable.")
    ] = None,
    seq_len: SeqLen = None,
    train_tokens: TrainTokens = None,
    heldout_tokens: HeldoutTokens = None,
    feature_heads: FeatureHeads = None,
    config: ConfigFile = None,
    preset: Preset = None,
    set_: Settings = None,
    db: Db = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Feature dimension of every layer for each strategy, budget and λ (Table 1 of the paper)."""
    given = {"model": model, "corpus": corpus, "budget": budget, "lam": lam,
             "strategy": strategy, "seq_len": seq_len, "feature_heads": feature_heads,
             "train_tokens": train_tokens, "heldout_tokens": heldout_tokens}  # fmt: skip
    settings = collect_settings(config, preset, set_, given)

    from dofsweep.methods.base import student_state_bytes
    from dofsweep.report.tables import print_plans
    from dofsweep.service import plans_for

    ref, spectra = _spectra(settings, db, address)
    plans = plans_for(settings, ref, spectra)
    if as_json:
        rows = [
            {
                "model": ref.name,
                "strategy": name,
                "budget": c,
                "lam": value,
                "feature_dims": [list(layer) for layer in made.dims],
                "mean_dim": made.mean_dim,
                "state_bytes": student_state_bytes(made, ref.shape),
            }
            for name, c, value, made in plans
        ]
        print_json(rows)
        return
    print_plans(ref, plans, sys.stdout)


def doctor(db: Db = None, address: Address = None, as_json: Json = False) -> None:
    """Check this machine, the database, the cluster and the hub; say what to do about each."""
    from dofsweep.report.doctor import check_all
    from dofsweep.report.tables import print_checks
    from dofsweep.store.session import default_home

    checks = check_all(default_home(), db, address)
    if as_json:
        print_json([check.as_dict() for check in checks])
    else:
        print_checks(checks, sys.stdout)
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)
