"""Everything that is read from the results store for people, as plain dicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from sqlalchemy import RowMapping, func, select, text
from sqlalchemy.orm import Session

from dofsweep.errors import StoreError
from dofsweep.store.models import (
    NONE,
    Base,
    EvalResultRow,
    PlanEntryRow,
    SweepRow,
    TimingRow,
    TrainingPointRow,
    TrialRow,
)
from dofsweep.store.reconcile import mark_interrupted
from dofsweep.store.session import Store

LISTED = ("id", "name", "kind", "model", "state", "stage", "done", "total", "created_at", "error")

_LEADERBOARD = """
SELECT * FROM leaderboard {where}
ORDER BY sweep, CASE WHEN heldout_loss IS NULL THEN 1 ELSE 0 END, heldout_loss, number
"""


def list_sweeps(store: Store) -> list[dict[str, Any]]:
    """All sweeps, newest first: the columns LISTED and n_trials; times as ISO text, UTC.

    A sweep whose driver is gone is marked interrupted.
    """
    mark_interrupted(store)
    with store.reading() as session:
        query = (
            select(SweepRow, func.count(TrialRow.id))
            .outerjoin(TrialRow, TrialRow.sweep_id == SweepRow.id)
            .group_by(*SweepRow.__table__.primary_key)
            .order_by(SweepRow.created_at.desc(), SweepRow.id.desc())
        )
        return [
            {name: _plain(getattr(sweep, name)) for name in LISTED} | {"n_trials": n_trials}
            for sweep, n_trials in session.execute(query)
        ]


def get_sweep(store: Store, id_or_name: str) -> dict[str, Any]:
    """One sweep: its columns, n_trials, and timings (stage, trial_number, seconds, tokens,
    peak_bytes), those of the sweep before those of its trials.

    Args:
        id_or_name: its id, or a name; the newest sweep of that name.
    Raises:
        StoreError: there is none; the message names those most alike.
    """
    mark_interrupted(store)
    with store.reading() as session:
        sweep = _find(session, id_or_name)
        n_trials = session.scalar(
            select(func.count()).select_from(TrialRow).where(TrialRow.sweep_id == sweep.id)
        )
        timings = session.scalars(
            select(TimingRow)
            .where(TimingRow.sweep_id == sweep.id)
            .order_by(TimingRow.trial_number, TimingRow.stage)
        )
        return _columns(sweep) | {"n_trials": n_trials, "timings": [_timing(t) for t in timings]}


def leaderboard(store: Store, sweep: str | None = None) -> list[dict[str, Any]]:
    """Rows of the view ``leaderboard``, ``ppl`` and ``gap_closed``, by sweep, best loss first.

    ``gap_closed`` is the share of the way from the untrained student of the same map, budget and
    window to the teacher, in held-out loss; None where there is no such student.

    Args:
        sweep: id or name; None for all sweeps.
    Raises:
        StoreError: there is no such sweep.
    """
    with store.reading() as session:
        if sweep is None:
            rows = session.execute(text(_LEADERBOARD.format(where=""))).mappings().all()
        else:
            query = text(_LEADERBOARD.format(where="WHERE sweep = :sweep"))
            found = _find(session, sweep).id
            rows = session.execute(query, {"sweep": found}).mappings().all()
    ends = {_end(row): row["heldout_loss"] for row in rows if row["loss"] is None}
    return [
        dict(row) | {"ppl": _perplexity(row), "gap_closed": _gap_closed(row, ends)} for row in rows
    ]


def plan_of(store: Store, trial_id: str) -> list[list[int]]:
    """Feature dimensions of a trial's plan, by layer and feature head; [] if it has none."""
    query = (
        select(PlanEntryRow)
        .where(PlanEntryRow.trial_id == trial_id)
        .order_by(PlanEntryRow.layer_idx, PlanEntryRow.head_idx)
    )
    plan: list[list[int]] = []
    with store.reading() as session:
        _require_trial(session, trial_id)
        for entry in session.scalars(query):
            if entry.layer_idx == len(plan):
                plan.append([])
            plan[entry.layer_idx].append(entry.feature_dim)
    return plan


def training_curve(store: Store, trial_id: str) -> list[dict[str, Any]]:
    """Points of a trial's training: step, tokens, layer, loss; by layer and step."""
    query = (
        select(TrainingPointRow)
        .where(TrainingPointRow.trial_id == trial_id)
        .order_by(TrainingPointRow.layer_idx, TrainingPointRow.step)
    )
    with store.reading() as session:
        _require_trial(session, trial_id)
        return [
            {"step": p.step, "tokens": p.tokens, "layer": p.layer_idx, "loss": p.loss}
            for p in session.scalars(query)
        ]


def layer_results(store: Store, trial_id: str, metric: str) -> list[dict[str, Any]]:
    """One metric of a trial by layer: layer, value, n, stderr."""
    query = (
        select(EvalResultRow)
        .where(
            EvalResultRow.trial_id == trial_id,
            EvalResultRow.metric == metric,
            EvalResultRow.layer_idx != NONE,
        )
        .order_by(EvalResultRow.layer_idx)
    )
    with store.reading() as session:
        _require_trial(session, trial_id)
        return [
            {"layer": r.layer_idx, "value": r.value, "n": r.n, "stderr": r.stderr}
            for r in session.scalars(query)
        ]


def _find(session: Session, id_or_name: str) -> SweepRow:
    newest = select(SweepRow).order_by(SweepRow.created_at.desc(), SweepRow.id.desc()).limit(1)
    for column in (SweepRow.id, SweepRow.name):
        if found := session.scalar(newest.where(column == id_or_name)):
            return found
    known = {word for pair in session.execute(select(SweepRow.id, SweepRow.name)) for word in pair}
    if not known:
        raise StoreError(
            f"no sweep {id_or_name!r}: this database holds none yet; start one with "
            "`dofsweep launch`"
        )
    near = get_close_matches(id_or_name, sorted(known), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise StoreError(f"no sweep {id_or_name!r}; {hint}`dofsweep ls` shows all")


def _require_trial(session: Session, trial_id: str) -> None:
    if session.get(TrialRow, trial_id) is None:
        raise StoreError(f"no trial {trial_id!r}; `dofsweep leaderboard --json` shows all")


def _columns(row: Base) -> dict[str, Any]:
    return {name: _plain(getattr(row, name)) for name in row.__table__.columns.keys()}  # noqa: SIM118


def _timing(row: TimingRow) -> dict[str, Any]:
    columns = _columns(row)
    del columns["sweep_id"]
    return columns | {"trial_number": None if row.trial_number == NONE else row.trial_number}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return dict(value) if isinstance(value, Mapping) else value


def _end(row: RowMapping, strategy: str | None = None) -> tuple[Any, ...]:
    """What a teacher, or an untrained student, is the upper or lower end of."""
    strategy = strategy or row["strategy"]
    if strategy == "teacher":
        return row["sweep"], strategy
    return row["sweep"], strategy, row["feature_map"], row["budget"], row["window_size"]


def _gap_closed(row: RowMapping, ends: dict[tuple[Any, ...], float | None]) -> float | None:
    start, goal = ends.get(_end(row, "untrained")), ends.get(_end(row, "teacher"))
    loss = row["heldout_loss"]
    if row["loss"] is None or loss is None or start is None or goal is None or start <= goal:
        return None
    return float((start - loss) / (start - goal))


def _perplexity(row: RowMapping) -> float | None:
    loss = row["heldout_loss"]
    return math.exp(loss) if loss is not None and loss < 700.0 else None
