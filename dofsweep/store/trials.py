"""Plans, curves, results, timings and artifacts of trials in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select

from dofsweep.records import TrainingPoint, TrialResult
from dofsweep.store.models import (
    NONE,
    ArtifactRow,
    EvalItemRow,
    EvalResultRow,
    PlanEntryRow,
    TimingRow,
    TrainingPointRow,
    TrialRow,
)
from dofsweep.store.upsert import upsert
from dofsweep.store.writes import TRIAL_STATES, Writes, change_sweep, change_trial, finite, whole

MEANS = {"kl": "mean_kl", "output_error": "output_error"}
"""Metrics of a layer whose mean over layers, the record without one, is a trial's own column."""


class TrialWrites(Writes):
    """Writes that belong to one trial, or to one stage of a sweep."""

    def save_plan(
        self,
        sweep_id: str,
        number: int,
        plan_key: str,
        dims: Sequence[Sequence[int]],
        state_bytes: int,
        window_size: int = 0,
    ) -> None:
        """Write a trial's plan in the place of an earlier one.

        Args:
            plan_key: hash of the plan; equal plans share one training run.
            dims: feature dimension of each layer and feature head.
            state_bytes: recurrent state of the whole student for one sequence.
            window_size: last tokens that every layer sees exactly.
        """
        with self.store.session() as session:
            id_ = change_trial(
                session,
                sweep_id,
                number,
                plan_key=plan_key,
                state_bytes=int(state_bytes),
                window_size=int(window_size),
            )
            rows = [
                {"trial_id": id_, "layer_idx": layer, "head_idx": head, "feature_dim": int(dim)}
                for layer, heads in enumerate(dims)
                for head, dim in enumerate(heads)
            ]
            session.execute(delete(PlanEntryRow).where(PlanEntryRow.trial_id == id_))
            if rows:
                session.execute(insert(PlanEntryRow), rows)

    def set_trial_state(
        self, sweep_id: str, number: int, state: str, error: str | None = None
    ) -> None:
        """Say where a trial stands: pending, running, finished or failed."""
        assert state in TRIAL_STATES, state
        with self.store.session() as session:
            change_trial(session, sweep_id, number, state=state, error=error)

    def finished_trials(self, sweep_id: str) -> set[int]:
        """Numbers of the trials that are finished."""
        with self.store.reading() as session:
            return set(
                session.scalars(
                    select(TrialRow.number).where(
                        TrialRow.sweep_id == sweep_id, TrialRow.state == "finished"
                    )
                )
            )

    def save_training(self, sweep_id: str, number: int, points: Sequence[TrainingPoint]) -> None:
        """Write points of a trial's training curve; a step and layer has one point."""
        with self.store.session() as session:
            id_ = change_trial(session, sweep_id, number)
            rows = [
                {
                    "trial_id": id_,
                    "step": int(point.step),
                    "layer_idx": int(point.layer_idx),
                    "tokens": int(point.tokens),
                    "loss": finite(point.loss),
                }
                for point in points
            ]
            upsert(session, TrainingPointRow, rows)

    def save_result(
        self, sweep_id: str, result: TrialResult, *, state_bytes: int | None = None
    ) -> None:
        """Write what the evaluation of a trial found.

        Args:
            state_bytes: memory of a sequence, where no plan gives it (the teacher's cache).
        """
        means = {r.metric: r.value for r in result.records if r.layer_idx is None}
        figures: dict[str, Any] = {
            "heldout_loss": finite(result.heldout_loss),
            "heldout_stderr": finite(result.heldout_stderr),
            "n_sequences": int(result.n_sequences),
            "n_tokens": int(result.n_tokens),
        }
        figures |= {column: finite(means.get(metric)) for metric, column in MEANS.items()}
        if state_bytes is not None:
            figures["state_bytes"] = int(state_bytes)
        with self.store.session() as session:
            id_ = change_trial(session, sweep_id, result.number, **figures)
            rows = [
                {
                    "trial_id": id_,
                    "metric": record.metric,
                    "layer_idx": NONE if record.layer_idx is None else int(record.layer_idx),
                    "context": NONE if record.context is None else int(record.context),
                    "value": finite(record.value),
                    "n": whole(record.n),
                    "stderr": finite(record.stderr),
                }
                for record in result.records
            ]
            upsert(session, EvalResultRow, rows)
            items = [
                {"trial_id": id_, "metric": "heldout_loss", "item_idx": i, "value": finite(loss)}
                for i, loss in enumerate(result.sequence_losses)
            ]
            upsert(session, EvalItemRow, items)

    def save_timing(
        self,
        sweep_id: str,
        stage: str,
        *,
        seconds: float,
        tokens: int | None = None,
        trial_number: int | None = None,
        n_students: int = 1,
        peak_bytes: int | None = None,
    ) -> None:
        """Write how long a stage took; a repeated stage keeps its last time.

        Args:
            n_students: that shared the stage, where it is written for each of them.
        """
        row = {
            "sweep_id": sweep_id,
            "stage": stage,
            "trial_number": NONE if trial_number is None else trial_number,
            "seconds": float(seconds),
            "n_students": n_students,
            "tokens": whole(tokens),
            "peak_bytes": whole(peak_bytes),
        }
        with self.store.session() as session:
            change_sweep(session, sweep_id)
            upsert(session, TimingRow, [row])

    def save_artifact(
        self,
        sweep_id: str,
        kind: str,
        *,
        path: str,
        sha256: str,
        size_bytes: int,
        trial_number: int | None = None,
    ) -> None:
        """Write where a file of a sweep, or of one of its trials, lies."""
        row = {
            "sweep_id": sweep_id,
            "kind": kind,
            "trial_number": NONE if trial_number is None else trial_number,
            "path": str(path),
            "sha256": sha256,
            "size_bytes": int(size_bytes),
        }
        with self.store.session() as session:
            change_sweep(session, sweep_id)
            upsert(session, ArtifactRow, [row])

    def artifacts(self, sweep_id: str) -> list[dict[str, Any]]:
        """Files of a sweep: kind, trial_number (None: of the sweep), path, sha256, size_bytes."""
        query = (
            select(ArtifactRow)
            .where(ArtifactRow.sweep_id == sweep_id)
            .order_by(ArtifactRow.kind, ArtifactRow.trial_number)
        )
        with self.store.reading() as session:
            return [
                {
                    "kind": row.kind,
                    "trial_number": None if row.trial_number == NONE else row.trial_number,
                    "path": row.path,
                    "sha256": row.sha256,
                    "size_bytes": row.size_bytes,
                }
                for row in session.scalars(query)
            ]
