"""Everything that is written to the results store, in short transactions that may be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import case, select, update

from dofsweep.records import TrialSpec
from dofsweep.store.lease import holder_is_dead
from dofsweep.store.models import EventRow, SweepRow, TrialRow
from dofsweep.store.session import database_now
from dofsweep.store.spectra import SpectraWrites
from dofsweep.store.trials import TrialWrites
from dofsweep.store.upsert import upsert
from dofsweep.store.writes import (
    ACTIVE_STATES,
    END_STATES,
    change_sweep,
    finite,
    time_now,
    trial_id,
    unknown_sweep,
)


class SweepRepository(TrialWrites, SpectraWrites):
    """Writes of one database. Every method is one transaction.

    Every method but ``event`` may be repeated, and leaves the same rows as calling it once. All
    raise StoreError when the database cannot be reached, or knows no such sweep or trial.
    """

    # -- sweeps ------------------------------------------------------------------------------

    def create_sweep(
        self,
        *,
        id: str,
        name: str,
        kind: str,
        model: str,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        code_version: str,
        job_address: str | None = None,
    ) -> None:
        """Write a sweep's row, in state submitted; of one that exists only what is given changes.

        Args:
            kind: "sweep" or "spectra".
            config: all settings, as JSON.
            versions: library name → version.
            job_address: dashboard of the cluster that runs it.
        """
        assert kind in {"sweep", "spectra"}, kind
        with self.store.session() as session:
            now = time_now(session)
            row = {
                "id": id,
                "name": name,
                "kind": kind,
                "model": model,
                "state": "submitted",
                "done": 0,
                "total": 0,
                "config": dict(config),
                "versions": dict(versions),
                "code_version": code_version,
                "job_address": job_address,
                "created_at": now,
                "updated_at": now,
            }
            fresh = frozenset({"state", "done", "total", "created_at"})
            upsert(session, SweepRow, [row], only_new=fresh)

    def add_trials(self, sweep_id: str, trials: Sequence[TrialSpec], feature_heads: str) -> None:
        """Write the trials of a sweep; one that exists keeps its state and its figures."""
        rows = [
            {
                "id": trial_id(sweep_id, trial.number),
                "sweep_id": sweep_id,
                "number": trial.number,
                "strategy": trial.strategy,
                "feature_map": trial.feature_map,
                "loss": trial.loss,
                "budget": trial.budget,
                "window_size": trial.window,
                "lam": finite(trial.lam),
                "seed": trial.seed,
                "init": trial.init,
                "lr_features": trial.lr_features,
                "lr_weights": trial.lr_weights,
                "feature_heads": feature_heads,
                "state": "pending",
            }
            for trial in trials
        ]
        with self.store.session() as session:
            change_sweep(session, sweep_id)
            upsert(session, TrialRow, rows, only_new=frozenset({"state"}))

    def set_state(self, sweep_id: str, state: str, *, error: str | None = None) -> None:
        """Say where a sweep stands; ``submitted`` also makes it free for a new driver."""
        assert state in ACTIVE_STATES + END_STATES, state
        with self.store.session() as session:
            ended = time_now(session) if state in END_STATES else None
            free: dict[str, Any] = {}
            if state == "submitted":
                free = {"lease_holder": None, "lease_expires_at": None}
            change_sweep(session, sweep_id, state=state, error=error, finished_at=ended, **free)

    def set_fingerprints(
        self,
        sweep_id: str,
        *,
        teacher: str | None = None,
        corpus: str | None = None,
        spectra_key: str | None = None,
    ) -> None:
        """Say what a sweep works on; what is None stays as it is."""
        values = {
            "teacher_fingerprint": teacher,
            "corpus_fingerprint": corpus,
            "spectra_key": spectra_key,
        }
        with self.store.session() as session:
            known = {name: value for name, value in values.items() if value is not None}
            change_sweep(session, sweep_id, **known)

    def progress(self, sweep_id: str, stage: str, done: int, total: int, detail: str = "") -> None:
        """Say how far a stage has come: ``done`` of ``total``, 0 while the total is unknown."""
        with self.store.session() as session:
            change_sweep(
                session, sweep_id, stage=stage, done=int(done), total=int(total), detail=detail
            )

    def event(self, sweep_id: str, level: str, stage: str | None, message: str) -> None:
        """Add a line to a sweep's history."""
        with self.store.session() as session:
            change_sweep(session, sweep_id)
            session.add(
                EventRow(
                    sweep_id=sweep_id,
                    at=time_now(session),
                    level=level,
                    stage=stage,
                    message=message,
                )
            )

    def events(self, sweep_id: str, after_id: int = 0) -> list[dict[str, Any]]:
        """Lines of a sweep's history after one that was seen, oldest first."""
        query = (
            select(EventRow)
            .where(EventRow.sweep_id == sweep_id, EventRow.id > after_id)
            .order_by(EventRow.id)
        )
        with self.store.reading() as session:
            return [
                {
                    "id": row.id,
                    "at": row.at.isoformat(),
                    "level": row.level,
                    "stage": row.stage,
                    "message": row.message,
                }
                for row in session.scalars(query)
            ]

    # -- leases ------------------------------------------------------------------------------

    def acquire_lease(self, sweep_id: str, holder: str, ttl_s: float) -> bool:
        """Become the one driver of a sweep.

        Args:
            holder: from ``lease_holder``.
            ttl_s: seconds until the lease expires unless it is renewed.
        Returns:
            True if the sweep was free, its lease expired, already this holder's, or its holder a
            process of this host that is dead.
        """
        with self.store.session() as session:
            now = database_now(session)
            row = session.scalar(select(SweepRow).where(SweepRow.id == sweep_id).with_for_update())
            if row is None:
                raise unknown_sweep(sweep_id)
            held = row.lease_holder not in {None, holder} and (row.lease_expires_at or 0.0) > now
            if held and not holder_is_dead(str(row.lease_holder)):
                return False
            row.lease_holder = holder
            row.lease_expires_at = now + ttl_s
            return True

    def renew_lease(self, sweep_id: str, holder: str, ttl_s: float) -> bool:
        """Keep a lease; False if another driver has taken it, and this one must end.

        A driver that only slept, and was called interrupted meanwhile, is running again.
        """
        with self.store.session() as session:
            slept = SweepRow.state == "interrupted"
            renewed = session.execute(
                update(SweepRow)
                .where(SweepRow.id == sweep_id, SweepRow.lease_holder == holder)
                .values(
                    lease_expires_at=database_now(session) + ttl_s,
                    state=case((slept, "running"), else_=SweepRow.state),
                    error=case((slept, None), else_=SweepRow.error),
                    finished_at=case((slept, None), else_=SweepRow.finished_at),
                )
                .returning(SweepRow.id)
                .execution_options(synchronize_session=False)
            )
            return renewed.first() is not None

    def release_lease(self, sweep_id: str, holder: str) -> None:
        """Give a lease back; one that another holds is left alone."""
        with self.store.session() as session:
            session.execute(
                update(SweepRow)
                .where(SweepRow.id == sweep_id, SweepRow.lease_holder == holder)
                .values(lease_holder=None, lease_expires_at=None)
            )
