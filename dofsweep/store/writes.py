"""What all writes to the results store share."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from dofsweep.errors import StoreError
from dofsweep.store.models import SweepRow, TrialRow
from dofsweep.store.session import Store, database_now

ACTIVE_STATES = ("submitted", "running")
END_STATES = ("finished", "failed", "stopped", "interrupted")
TRIAL_STATES = ("pending", "running", "finished", "failed")


class Writes:
    """Writes to one database; every method of a subclass is one transaction."""

    def __init__(self, store: Store) -> None:
        self.store = store


def trial_id(sweep_id: str, number: int) -> str:
    """Id of a trial: ``sweep_id.number``."""
    return f"{sweep_id}.{number}"


def finite(value: float | None) -> float | None:
    """A figure as both databases keep it; NULL when it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def whole(value: int | None) -> int | None:
    """A plain int, also from NumPy's kinds of them."""
    return None if value is None else int(value)


def time_now(session: Session) -> datetime:
    """Now, by the database's clock."""
    return datetime.fromtimestamp(database_now(session), UTC)


def unknown_sweep(sweep_id: str) -> StoreError:
    return StoreError(f"no sweep {sweep_id!r} in this database; `dofsweep ls` shows what it holds")


def change_sweep(session: Session, sweep_id: str, **values: Any) -> None:
    """Change columns of a sweep; this also holds its row until the transaction ends.

    Raises:
        StoreError: there is no such sweep.
    """
    changed = session.execute(
        update(SweepRow)
        .where(SweepRow.id == sweep_id)
        .values(updated_at=time_now(session), **values)
        .returning(SweepRow.id)
        .execution_options(synchronize_session=False)
    )
    if changed.first() is None:
        raise unknown_sweep(sweep_id)


def change_trial(session: Session, sweep_id: str, number: int, **values: Any) -> str:
    """Change columns of a trial, and hold its row until the transaction ends.

    Returns:
        The trial's id.
    Raises:
        StoreError: there is no such trial.
    """
    id_ = trial_id(sweep_id, number)
    changed = session.execute(
        update(TrialRow)
        .where(TrialRow.id == id_)
        .values(**(values or {"number": number}))
        .returning(TrialRow.id)
        .execution_options(synchronize_session=False)
    )
    if changed.first() is None:
        raise StoreError(f"no trial {id_!r} in this database; add it to its sweep first")
    return id_
