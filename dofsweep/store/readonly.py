"""A user's own SELECT, on a connection that cannot write."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from sqlalchemy import make_url

from dofsweep.errors import StoreError
from dofsweep.store.engine import BUSY_S, CONNECT_S, one_line
from dofsweep.store.session import Store
from dofsweep.store.urls import sqlite_path

Rows = tuple[list[str], list[tuple[Any, ...]]]

_READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


def read_only_query(store: Store, sql: str) -> Rows:
    """Run one SELECT.

    Args:
        sql: one statement; anything that writes is refused by the database.
    Returns:
        Names of the columns, and the rows.
    Raises:
        StoreError: no database, or it refuses the statement; the message holds its words.
    """
    store.require_file()
    path = sqlite_path(store.url)
    try:
        return _ask_sqlite(sql, path) if path else _ask_postgres(sql, store.url)
    except (sqlite3.Error, sqlite3.Warning, psycopg.Error) as err:
        raise StoreError(
            f"database {store.safe_url} refuses the query: {one_line(err)}; one SELECT on tables "
            "and views such as leaderboard, layer_plan, sweep, sweep_trial is allowed"
        ) from None


def _ask_sqlite(sql: str, path: Path) -> Rows:
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S)
    try:
        # mode=ro still lets VACUUM INTO and PRAGMA do things
        connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY
        )
        cursor = connection.execute(sql)
        return [column[0] for column in cursor.description or ()], cursor.fetchall()
    finally:
        connection.close()


def _ask_postgres(sql: str, url: str) -> Rows:
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address, connect_timeout=CONNECT_S) as connection:
        connection.read_only = True
        # Prepared, so that it is one statement: "COMMIT; DELETE …" would leave the transaction.
        cursor = connection.execute(sql.encode(), prepare=True)
        if cursor.description is None:
            return [], []
        return [column.name for column in cursor.description], cursor.fetchall()
