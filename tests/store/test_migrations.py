"""Migrations on both databases, also beside Optuna's tables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import alembic
import optuna
import pytest
from alembic import command
from alembic.script import ScriptDirectory
from optuna.storages import RDBStorage
from samples import all_rows, write_all
from sqlalchemy import Engine, inspect, text

from dofsweep.errors import StoreError
from dofsweep.store import migrate
from dofsweep.store.engine import make_engine
from dofsweep.store.models import REVISIONS, VERSION_TABLE, Base
from dofsweep.store.queries import list_sweeps
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store
from dofsweep.store.urls import resolve_url

REPO = Path(__file__).resolve().parents[2]


@contextmanager
def engine_of(url: str) -> Iterator[Engine]:
    engine = make_engine(resolve_url(url), migrating=True)
    try:
        yield engine
    finally:
        engine.dispose()


def tables(url: str) -> set[str]:
    with engine_of(url) as engine:
        found = inspect(engine)
        return {*found.get_table_names(), *found.get_view_names()}


OURS = {*Base.metadata.tables, "leaderboard", "layer_plan"}


def test_up_and_down_and_up_again(url: str) -> None:
    migrate.upgrade(url)
    migrate.check(url)
    assert tables(url) == OURS | {VERSION_TABLE}
    migrate.downgrade(url, "base")
    assert tables(url) == {VERSION_TABLE}
    migrate.upgrade(url)
    migrate.upgrade(url)
    migrate.check(url)
    assert tables(url) == OURS | {VERSION_TABLE}


def test_check_notices_a_table_changed_by_hand(url: str) -> None:
    migrate.upgrade(url)
    with engine_of(url) as engine, engine.begin() as connection:
        connection.execute(text("ALTER TABLE timing ADD COLUMN surprise INTEGER"))
    with pytest.raises(StoreError, match="surprise"):
        migrate.check(url)


def test_the_constant_names_the_revisions_of_the_folder() -> None:
    scripts = ScriptDirectory.from_config(migrate.alembic_config("sqlite:///unused.db"))
    assert tuple(s.revision for s in scripts.walk_revisions())[::-1] == REVISIONS


def test_every_constraint_has_the_name_of_the_convention(url: str) -> None:
    """SQLite cannot alter a table with an unnamed constraint, so none may creep in."""
    migrate.upgrade(url)
    with engine_of(url) as engine:
        found = inspect(engine)
        for name, table in Base.metadata.tables.items():
            assert found.get_pk_constraint(name)["name"] == f"pk_{name}"
            keys = {key["name"] for key in found.get_foreign_keys(name)}
            assert keys == {key.name for key in table.foreign_key_constraints}
            indexes = {
                i["name"] for i in found.get_indexes(name) if "duplicates_constraint" not in i
            }
            assert indexes == {index.name for index in table.indexes}


def optuna_study(url: str) -> optuna.Study:
    storage = RDBStorage(resolve_url(url))
    return optuna.create_study(storage=storage, study_name="s", load_if_exists=True)


def finish_a_trial(study: optuna.Study) -> None:
    study.optimize(lambda trial: trial.suggest_float("lam", 0, 1), n_trials=1)


@pytest.mark.parametrize("first", ["optuna", "dofsweep"])
def test_optuna_may_live_in_the_same_database(
    url: str, first: str, open_store: Callable[..., Store]
) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if first == "optuna":
        finish_a_trial(optuna_study(url))
        open_store(url, create=True)
    else:
        open_store(url, create=True)
        finish_a_trial(optuna_study(url))
    before = tables(url)
    assert {"studies", "trials", "alembic_version", *OURS} <= before
    migrate.check(url)
    migrate.upgrade(url)
    assert list_sweeps(open_store(url)) == []
    assert len(optuna_study(url).trials) == 1
    migrate.downgrade(url, "base")
    assert tables(url) == before - OURS
    study = optuna_study(url)
    finish_a_trial(study)
    assert len(study.trials) == 2


SECOND = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade():
    with op.batch_alter_table("sweep_trial") as batch:
        batch.add_column(sa.Column("spectra_key", sa.String()))
        batch.create_foreign_key(
            "fk_sweep_trial_spectra_key", "spectra_set", ["spectra_key"], ["key"]
        )


def downgrade():
    with op.batch_alter_table("sweep_trial") as batch:
        batch.drop_constraint("fk_sweep_trial_spectra_key", type_="foreignkey")
        batch.drop_column("spectra_key")
"""


def test_a_later_revision_can_add_a_foreign_key_and_keeps_all_rows(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_store: Callable[..., Store]
) -> None:
    scripts = shutil.copytree(REPO / "alembic", tmp_path / "alembic")
    (scripts / "versions" / "0002_second.py").write_text(SECOND)
    store = open_store(url, create=True)
    write_all(SweepRepository(store))
    before = all_rows(store)
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "script_location", lambda: scripts)
        for _ in range(2):
            with pytest.raises(StoreError, match="not up to date.*run `dofsweep db upgrade`"):
                migrate.check(url)
            migrate.upgrade(url)
            with engine_of(url) as engine:
                keys = {key["name"] for key in inspect(engine).get_foreign_keys("sweep_trial")}
            assert keys == {"fk_sweep_trial_sweep_id", "fk_sweep_trial_spectra_key"}
            assert all_rows(store) == before
            migrate.downgrade(url, "0001")
            assert all_rows(store) == before
    assert tables(url) == OURS | {VERSION_TABLE}
    migrate.check(url)


def test_a_broken_migration_changes_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(url)
    before = tables(url)
    scripts = shutil.copytree(REPO / "alembic", tmp_path / "alembic")
    broken = SECOND.replace("spectra_set", "no_such_table")
    broken = re.sub(
        r"def upgrade\(\):\n",
        "def upgrade():\n    op.create_table('half', sa.Column('x', sa.Integer()))\n"
        "    op.execute('SELECT * FROM no_such_table')\n",
        broken,
    )
    (scripts / "versions" / "0002_second.py").write_text(broken)
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "script_location", lambda: scripts)
        with pytest.raises(StoreError, match="no_such_table"):
            migrate.upgrade(url)
    assert tables(url) == before
    migrate.check(url)


def test_the_alembic_command_works_from_the_root_of_the_checkout(tmp_path: Path) -> None:
    ours, given = f"{tmp_path}/ours.db", f"{tmp_path}/given.db"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "alembic", *arguments],
            cwd=REPO,
            env=os.environ | {"DOFSWEEP_DB": ours},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-x", f"url={given}", "upgrade", "head")
    migrate.check(given)
    assert not Path(ours).exists()
    migrate.upgrade(ours)
    assert run("current").strip() == f"{REVISIONS[-1]} (head)"


def test_offline_mode_prints_the_statements(capsys: pytest.CaptureFixture[str]) -> None:
    config = migrate.alembic_config(resolve_url("postgresql://nobody@127.0.0.1:9/none"))
    config.output_buffer = sys.stdout
    command.upgrade(config, "head", sql=True)
    printed = capsys.readouterr().out
    assert "CREATE TABLE sweep_trial" in printed
    assert "CREATE VIEW leaderboard" in printed


def test_the_folder_of_migrations_does_not_hide_the_library() -> None:
    assert not (REPO / "alembic" / "__init__.py").exists()
    assert Path(alembic.__file__).parent != REPO / "alembic"
