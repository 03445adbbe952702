"""Sweeps whose driver is gone: a driver that was killed cannot say so itself."""

from __future__ import annotations

import time

from sqlalchemy import select, update

from dofsweep.store.lease import holder_is_dead
from dofsweep.store.models import SweepRow
from dofsweep.store.session import Store, database_now
from dofsweep.store.writes import ACTIVE_STATES, time_now

GRACE_S = 600.0
"""How long a sweep may wait for its driver to take the lease."""


def mark_interrupted(store: Store) -> None:
    """Mark each sweep that is said to be under way, and is not, as interrupted."""
    active = select(SweepRow).where(SweepRow.state.in_(ACTIVE_STATES))
    with store.reading() as session:
        rows = session.scalars(active).all()
        now = database_now(session) if rows else time.time()
        gone = [(row, reason) for row in rows if (reason := _why_gone(row, now))]
    for row, reason in gone:
        with store.session() as session:
            session.execute(
                update(SweepRow)
                .where(
                    SweepRow.id == row.id,
                    SweepRow.state.in_(ACTIVE_STATES),
                    # somebody may have taken or renewed it since it was read
                    SweepRow.lease_holder.is_not_distinct_from(row.lease_holder),
                    SweepRow.lease_expires_at.is_not_distinct_from(row.lease_expires_at),
                    SweepRow.updated_at == row.updated_at,
                )
                .values(state="interrupted", error=reason, finished_at=time_now(session))
                .execution_options(synchronize_session=False)
            )


def _why_gone(row: SweepRow, now: float) -> str | None:
    if row.lease_holder is None:
        if now - row.updated_at.timestamp() <= GRACE_S:
            return None
        return f"no driver took it within {GRACE_S:.0f} s; see `dofsweep logs {row.id}`"
    host, pid = row.lease_holder.rsplit(":", 3)[:2]
    if holder_is_dead(row.lease_holder):
        return f"its driver, process {pid}, is gone; `dofsweep resume {row.id}` goes on"
    if (row.lease_expires_at or 0.0) < now:
        return f"its driver on {host} has not been heard of; `dofsweep resume {row.id}` goes on"
    return None
