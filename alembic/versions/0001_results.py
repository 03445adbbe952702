"""The results store: sweeps, trials, spectra, plans, curves, results, and two views.

Revision 0001, the first. A released revision is never edited; a new one is added. A later revision
that changes columns of a view drops the view first and makes it again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

LEADERBOARD = """
CREATE VIEW leaderboard AS
SELECT sweep.id AS sweep, sweep.name AS sweep_name, sweep_trial.id AS trial, sweep_trial.number,
       sweep.model, sweep_trial.strategy, sweep_trial.feature_map, sweep_trial.loss,
       sweep_trial.budget, sweep_trial.window_size, sweep_trial.lam, sweep_trial.seed,
       sweep_trial.init, sweep_trial.lr_features, sweep_trial.lr_weights, sweep_trial.feature_heads,
       sweep_trial.heldout_loss, sweep_trial.heldout_stderr, sweep_trial.n_sequences,
       sweep_trial.n_tokens, sweep_trial.mean_kl, sweep_trial.output_error,
       sweep_trial.state_bytes, sweep_trial.plan_key, sweep_trial.state, sweep_trial.error
FROM sweep_trial JOIN sweep ON sweep.id = sweep_trial.sweep_id
"""
LAYER_PLAN = """
CREATE VIEW layer_plan AS
SELECT sweep_trial.sweep_id AS sweep, sweep_trial.id AS trial, sweep_trial.strategy,
       plan_entry.layer_idx AS layer, MAX(plan_entry.feature_dim) AS feature_dim,
       COUNT(*) AS n_heads
FROM plan_entry JOIN sweep_trial ON sweep_trial.id = plan_entry.trial_id
GROUP BY sweep_trial.sweep_id, sweep_trial.id, sweep_trial.strategy, plan_entry.layer_idx
"""


def upgrade() -> None:
    _sweeps()
    _trials()
    _spectra()
    _rows_of_a_sweep()
    _rows_of_a_trial()
    op.execute(LEADERBOARD)
    op.execute(LAYER_PLAN)


def downgrade() -> None:
    op.execute("DROP VIEW layer_plan")
    op.execute("DROP VIEW leaderboard")
    for table in (
        "training_point", "plan_entry", "eval_result", "eval_item", "timing", "artifact", "event",
        "spectrum", "spectra_set", "sweep_trial", "sweep",
    ):  # fmt: skip
        op.drop_table(table)


def _text(name: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(), nullable=null)


def _time(name: str, *, null: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=null)


def _int(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=null, autoincrement=False)


def _big(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=null)


def _float(name: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=null)


def _parent(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        [column], [target], name=f"fk_{table}_{column}", ondelete="CASCADE"
    )


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _sweeps() -> None:
    op.create_table(
        "sweep",
        _text("id"),
        _text("name"),
        _text("kind"),
        _text("model"),
        _text("state"),
        _text("stage", null=True),
        _int("done"),
        _int("total"),
        _text("detail", null=True),
        sa.Column("error", sa.Text()),
        sa.Column("config", sa.JSON(), nullable=False),
        _text("code_version"),
        sa.Column("versions", sa.JSON(), nullable=False),
        _text("teacher_fingerprint", null=True),
        _text("corpus_fingerprint", null=True),
        _text("spectra_key", null=True),
        _text("job_address", null=True),
        _time("created_at"),
        _time("updated_at"),
        _time("finished_at", null=True),
        _text("lease_holder", null=True),
        _float("lease_expires_at", null=True),
        _key("sweep", "id"),
    )
    op.create_index("ix_sweep_name", "sweep", ["name"])
    op.create_index("ix_sweep_created_at", "sweep", ["created_at"])


def _trials() -> None:
    op.create_table(
        "sweep_trial",
        _text("id"),
        _text("sweep_id"),
        _int("number"),
        _text("strategy"),
        _text("feature_map", null=True),
        _text("loss", null=True),
        _int("budget", null=True),
        _int("window_size"),
        _float("lam", null=True),
        _big("seed", null=True),
        _text("init", null=True),
        _float("lr_features", null=True),
        _float("lr_weights", null=True),
        _text("feature_heads"),
        _text("state"),
        _text("plan_key", null=True),
        _float("heldout_loss", null=True),
        _float("heldout_stderr", null=True),
        _int("n_sequences", null=True),
        _big("n_tokens", null=True),
        _float("mean_kl", null=True),
        _float("output_error", null=True),
        _big("state_bytes", null=True),
        sa.Column("error", sa.Text()),
        _key("sweep_trial", "id"),
        _parent("sweep_trial", "sweep_id", "sweep.id"),
        sa.UniqueConstraint("sweep_id", "number", name="uq_sweep_trial_sweep_id_number"),
    )


def _spectra() -> None:
    op.create_table(
        "spectra_set",
        _text("key"),
        _int("n_spectra"),
        sa.Column("meta", sa.JSON(), nullable=False),
        _time("created_at"),
        _key("spectra_set", "key"),
    )
    op.create_table(
        "spectrum",
        _text("spectra_key"),
        _int("layer_idx"),
        _int("head_idx"),
        sa.Column("eigenvalues", sa.LargeBinary(), nullable=False),
        _int("rank"),
        _float("tail"),
        _int("n_points"),
        sa.Column("resolved", sa.Boolean(), nullable=False),
        _key("spectrum", "spectra_key", "layer_idx", "head_idx"),
        _parent("spectrum", "spectra_key", "spectra_set.key"),
    )


def _rows_of_a_sweep() -> None:
    op.create_table(
        "timing",
        _text("sweep_id"),
        _text("stage"),
        _int("trial_number"),
        _float("seconds"),
        _int("n_students"),
        _big("tokens", null=True),
        _big("peak_bytes", null=True),
        _key("timing", "sweep_id", "stage", "trial_number"),
        _parent("timing", "sweep_id", "sweep.id"),
    )
    op.create_table(
        "artifact",
        _text("sweep_id"),
        _text("kind"),
        _int("trial_number"),
        _text("path"),
        _text("sha256"),
        _big("size_bytes"),
        _key("artifact", "sweep_id", "kind", "trial_number"),
        _parent("artifact", "sweep_id", "sweep.id"),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        _text("sweep_id"),
        _time("at"),
        _text("level"),
        _text("stage", null=True),
        sa.Column("message", sa.Text(), nullable=False),
        _key("event", "id"),
        _parent("event", "sweep_id", "sweep.id"),
    )
    op.create_index("ix_event_sweep_id_id", "event", ["sweep_id", "id"])


def _rows_of_a_trial() -> None:
    op.create_table(
        "plan_entry",
        _text("trial_id"),
        _int("layer_idx"),
        _int("head_idx"),
        _int("feature_dim"),
        _key("plan_entry", "trial_id", "layer_idx", "head_idx"),
        _parent("plan_entry", "trial_id", "sweep_trial.id"),
    )
    op.create_table(
        "training_point",
        _text("trial_id"),
        _int("step"),
        _int("layer_idx"),
        _big("tokens"),
        _float("loss", null=True),
        _key("training_point", "trial_id", "step", "layer_idx"),
        _parent("training_point", "trial_id", "sweep_trial.id"),
    )
    op.create_table(
        "eval_result",
        _text("trial_id"),
        _text("metric"),
        _int("layer_idx"),
        _int("context"),
        _float("value", null=True),
        _int("n", null=True),
        _float("stderr", null=True),
        _key("eval_result", "trial_id", "metric", "layer_idx", "context"),
        _parent("eval_result", "trial_id", "sweep_trial.id"),
    )
    op.create_table(
        "eval_item",
        _text("trial_id"),
        _text("metric"),
        _int("item_idx"),
        _float("value", null=True),
        _key("eval_item", "trial_id", "metric", "item_idx"),
        _parent("eval_item", "trial_id", "sweep_trial.id"),
    )
