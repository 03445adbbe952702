"""Queries of users, and ``dofsweep db``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from samples import all_rows, write_all
from sqlalchemy import text
from typer.testing import CliRunner

from dofsweep.cli.db import app
from dofsweep.errors import StoreError
from dofsweep.store.readonly import read_only_query
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store

WRITES = [
    "DELETE FROM sweep",
    "UPDATE sweep SET name = 'x'",
    "INSERT INTO event (sweep_id, at, level, message) VALUES ('sw-1', '2026-01-01', 'i', 'm')",
    "DROP VIEW leaderboard",
    "CREATE TABLE x (y INTEGER)",
    "SELECT 1; DELETE FROM sweep",
    "COMMIT; DELETE FROM sweep",
    "BEGIN; DELETE FROM sweep; COMMIT",
]


@pytest.mark.parametrize("sql", WRITES)
def test_nothing_can_be_written(store: Store, repo: SweepRepository, sql: str) -> None:
    write_all(repo)
    before = all_rows(store)
    with pytest.raises(StoreError, match="refuses the query: .*one SELECT"):
        read_only_query(store, sql)
    assert all_rows(store) == before


@pytest.mark.parametrize(
    "sql",
    ["VACUUM INTO '{folder}/copy.db'", "ATTACH '{folder}/new.db' AS x", "PRAGMA user_version = 7"],
)
def test_sqlite_writes_no_other_file_either(tmp_path: Path, sql: str) -> None:
    store = Store.open(f"{tmp_path}/results.db", create=True)
    with pytest.raises(StoreError, match="refuses the query"):
        read_only_query(store, sql.format(folder=tmp_path))
    assert {f.name.partition("-")[0] for f in tmp_path.iterdir()} == {"results.db"}
    with store.reading() as session:
        assert session.scalar(text("PRAGMA user_version")) == 0
    store.dispose()


def test_a_select_is_answered_while_somebody_writes(store: Store, repo: SweepRepository) -> None:
    write_all(repo)
    with store.session() as session:
        session.execute(text("UPDATE sweep SET name = 'other'"))
        columns, rows = read_only_query(
            store, "SELECT name, '100 %' AS part FROM sweep WHERE name LIKE 'd%'"
        )
    assert columns == ["name", "part"]
    assert rows == [("demo", "100 %")]


def test_a_wrong_statement_is_told_in_the_words_of_the_database(store: Store) -> None:
    with pytest.raises(StoreError, match="no_such_table") as caught:
        read_only_query(store, "SELECT *\nFROM no_such_table")
    assert "\n" not in str(caught.value)


def test_db_upgrade_check_current_and_sql(url: str) -> None:
    runner = CliRunner()
    missing = runner.invoke(app, ["check", "--db", url])
    assert isinstance(missing.exception, StoreError)
    assert "dofsweep db upgrade" in str(missing.exception)
    for _ in range(2):
        done = runner.invoke(app, ["upgrade", "--db", url])
        assert done.exit_code == 0, done.exception
        assert done.stdout.endswith("is at revision 0001\n")
    assert runner.invoke(app, ["check", "--db", url]).exit_code == 0
    facts = json.loads(runner.invoke(app, ["current", "--json", "--db", url]).stdout)
    assert (facts["revision"], facts["needed"]) == ("0001", "0001")
    store = Store.open(url)
    write_all(SweepRepository(store))
    store.dispose()
    query = "SELECT trial, feature_dim, lam FROM layer_plan JOIN leaderboard USING (trial) " + (
        "ORDER BY layer"
    )
    plain = runner.invoke(app, ["sql", query, "--db", url])
    assert plain.stdout.splitlines() == [
        "trial\tfeature_dim\tlam",
        "sw-1.2\t277\t0.00390625",
        "sw-1.2\t64\t0.00390625",
    ]
    rows = json.loads(runner.invoke(app, ["sql", query, "--json", "--db", url]).stdout)
    assert rows[0] == {"trial": "sw-1.2", "feature_dim": 277, "lam": 2**-8}
    blob = "SELECT eigenvalues, created_at FROM spectrum JOIN spectra_set ON spectra_key = key"
    rows = json.loads(runner.invoke(app, ["sql", blob, "--json", "--db", url]).stdout)
    assert rows[0]["eigenvalues"] == "<24 bytes>"


def test_the_command_imports_nothing_heavy() -> None:
    heavy = ["sqlalchemy", "alembic", "psycopg", "torch", "ray", "rich.console"]
    code = f"import sys, dofsweep.cli.db; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
