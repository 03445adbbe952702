"""Tables of the results store.

The schema is an interface: people query it. Tables are narrow, every constraint has a name (SQLite
can only alter tables whose constraints are named), and what makes a row unique is its primary key,
so that writing it twice leaves one row. No table is called studies, trials, study_* or trial_*:
those names belong to Optuna, which may live in the same database.

Conventions: times are UTC, sizes are bytes, ``-1`` stands for "none" inside a key, where NULL would
not be unique, and a figure that is not finite is stored as NULL.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

VERSION_TABLE = "dofsweep_alembic_version"
"""Ours alone: Optuna and MLflow keep theirs in ``alembic_version``."""
REVISIONS = ("0001",)
"""Every revision of the schema, oldest first; the last is the one this program works with."""
NONE = -1
"""No layer, or no trial, inside a key."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time in UTC, also on SQLite, which keeps no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        assert value is None or value.tzinfo is not None, "a time without a zone"
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map = {
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        float: Double,
        str: String,
    }


def _sweep_key() -> Mapped[str]:
    return mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), primary_key=True)


def _trial_key() -> Mapped[str]:
    return mapped_column(ForeignKey("sweep_trial.id", ondelete="CASCADE"), primary_key=True)


def _key() -> Mapped[int]:
    return mapped_column(primary_key=True, autoincrement=False)


class SweepRow(Base):
    """One request of a user, and how far it has come."""

    __tablename__ = "sweep"
    __table_args__ = (Index(None, "name"), Index(None, "created_at"))

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    """May be reused; a lookup by name finds the newest."""
    kind: Mapped[str]
    """sweep | spectra"""
    model: Mapped[str]
    state: Mapped[str]
    """submitted | running | finished | failed | stopped | interrupted"""
    stage: Mapped[str | None]
    done: Mapped[int]
    total: Mapped[int]
    """``done`` of ``total`` units of the stage; 0 while unknown."""
    detail: Mapped[str | None]
    error: Mapped[str | None] = mapped_column(Text)
    config: Mapped[dict[str, Any]]
    code_version: Mapped[str]
    versions: Mapped[dict[str, Any]]
    """Library name → version."""
    teacher_fingerprint: Mapped[str | None]
    corpus_fingerprint: Mapped[str | None]
    spectra_key: Mapped[str | None]
    """The spectra used; no foreign key, as it is known before they are measured."""
    job_address: Mapped[str | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    lease_holder: Mapped[str | None]
    lease_expires_at: Mapped[float | None]
    """Seconds since 1970 by the database's clock."""


class TrialRow(Base):
    """One student of a sweep, or its teacher: what it is, and its main figures."""

    __tablename__ = "sweep_trial"
    __table_args__ = (UniqueConstraint("sweep_id", "number"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    """``sweep_id.number``"""
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"))
    number: Mapped[int]
    strategy: Mapped[str]
    feature_map: Mapped[str | None]
    loss: Mapped[str | None]
    budget: Mapped[int | None]
    window_size: Mapped[int]
    """Last tokens that every layer sees exactly; 0 for none."""
    lam: Mapped[float | None]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    init: Mapped[str | None]
    """Distribution of the initial features: orthogonal | gaussian"""
    lr_features: Mapped[float | None]
    lr_weights: Mapped[float | None]
    """Peak learning rates, before any polish."""
    feature_heads: Mapped[str]
    """kv | query"""
    state: Mapped[str]
    """pending | running | finished | failed"""
    plan_key: Mapped[str | None]
    heldout_loss: Mapped[float | None]
    """Nats per token."""
    heldout_stderr: Mapped[float | None]
    n_sequences: Mapped[int | None]
    n_tokens: Mapped[int | None] = mapped_column(BigInteger)
    mean_kl: Mapped[float | None]
    """Nats per attention row, mean over layers, heads and rows."""
    output_error: Mapped[float | None]
    """Squared error of the attention outputs, relative to the teacher's, mean over layers."""
    state_bytes: Mapped[int | None] = mapped_column(BigInteger)
    error: Mapped[str | None] = mapped_column(Text)


class SpectraSetRow(Base):
    """The spectra of all heads of one teacher on one sample of text."""

    __tablename__ = "spectra_set"

    key: Mapped[str] = mapped_column(primary_key=True)
    """Hash of everything the spectra depend on."""
    n_spectra: Mapped[int]
    """How many heads the set is made of."""
    meta: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class SpectrumRow(Base):
    """Spectrum of one head, in the units of its set's gram scale."""

    __tablename__ = "spectrum"

    spectra_key: Mapped[str] = mapped_column(
        ForeignKey("spectra_set.key", ondelete="CASCADE"), primary_key=True
    )
    layer_idx: Mapped[int] = _key()
    head_idx: Mapped[int] = _key()
    eigenvalues: Mapped[bytes] = mapped_column(LargeBinary)
    """The ``rank`` largest, descending, float64, little-endian."""
    rank: Mapped[int]
    tail: Mapped[float]
    n_points: Mapped[int]
    resolved: Mapped[bool]


class PlanEntryRow(Base):
    """Feature dimension of one feature head of one student."""

    __tablename__ = "plan_entry"

    trial_id: Mapped[str] = _trial_key()
    layer_idx: Mapped[int] = _key()
    head_idx: Mapped[int] = _key()
    feature_dim: Mapped[int]


class TrainingPointRow(Base):
    """Mean loss of one layer of one student around one step."""

    __tablename__ = "training_point"

    trial_id: Mapped[str] = _trial_key()
    step: Mapped[int] = _key()
    layer_idx: Mapped[int] = _key()
    tokens: Mapped[int] = mapped_column(BigInteger)
    loss: Mapped[float | None]


class EvalResultRow(Base):
    """One measured figure of one trial, of one layer or (-1) of the whole model."""

    __tablename__ = "eval_result"

    trial_id: Mapped[str] = _trial_key()
    metric: Mapped[str] = mapped_column(primary_key=True)
    layer_idx: Mapped[int] = _key()
    context: Mapped[int] = _key()
    """c where the value is over tokens with c to 2c - 1 tokens before them; -1 for all tokens."""
    value: Mapped[float | None]
    n: Mapped[int | None]
    """Independent items behind the value."""
    stderr: Mapped[float | None]


class EvalItemRow(Base):
    """One item behind a figure of a trial, for paired comparisons: a held-out sequence's loss."""

    __tablename__ = "eval_item"

    trial_id: Mapped[str] = _trial_key()
    metric: Mapped[str] = mapped_column(primary_key=True)
    item_idx: Mapped[int] = _key()
    value: Mapped[float | None]


class TimingRow(Base):
    """How long a stage took, of one trial or (-1) of the sweep."""

    __tablename__ = "timing"

    sweep_id: Mapped[str] = _sweep_key()
    stage: Mapped[str] = mapped_column(primary_key=True)
    trial_number: Mapped[int] = _key()
    seconds: Mapped[float]
    n_students: Mapped[int]
    """Students that shared these seconds."""
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    peak_bytes: Mapped[int | None] = mapped_column(BigInteger)


class ArtifactRow(Base):
    """A file that a sweep made, of one trial or (-1) of the sweep."""

    __tablename__ = "artifact"

    sweep_id: Mapped[str] = _sweep_key()
    kind: Mapped[str] = mapped_column(primary_key=True)
    trial_number: Mapped[int] = _key()
    path: Mapped[str]
    sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)


class EventRow(Base):
    """One line of a sweep's history."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "sweep_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    level: Mapped[str]
    stage: Mapped[str | None]
    message: Mapped[str] = mapped_column(Text)
