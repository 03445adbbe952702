"""Engines for the two databases, and what goes wrong with them in words for the user."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError

from dofsweep.errors import StoreError
from dofsweep.store.urls import mask, sqlite_path

BUSY_S = 60.0
"""How long a writer waits for another one on SQLite."""
CONNECT_S = 5
"""How long a PostgreSQL server may take to answer."""
WRITE = "dofsweep_write"
"""Execution option of a transaction that will write."""


def make_engine(url: str, *, migrating: bool = False) -> Engine:
    """Engine for a resolved URL.

    Args:
        migrating: leave foreign keys unchecked on SQLite, where altering a table means copying and
            dropping it; and keep views while that happens.
    """
    if sqlite_path(url) is None:
        return create_engine(
            url,
            pool_pre_ping=True,
            pool_size=2,
            connect_args={"connect_timeout": CONNECT_S, "application_name": "dofsweep"},
        )
    engine = create_engine(url, connect_args={"timeout": BUSY_S})

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # we say when a transaction begins, see below
        connection.execute(f"PRAGMA foreign_keys = {'OFF' if migrating else 'ON'}")
        if migrating:
            connection.execute("PRAGMA legacy_alter_table = ON")

    @event.listens_for(engine, "begin")
    def begins(connection: Connection) -> None:
        # A transaction that reads first and writes later cannot wait for another writer: SQLite
        # refuses it at once. So one that will write takes its turn at the start.
        writes = migrating or connection.get_execution_options().get(WRITE)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def sqlite_creation(path: Path) -> Iterator[None]:
    """Make an SQLite file, readable by its owner alone, in WAL mode, one process at a time.

    Switching to WAL does not wait for a busy file as other statements do: without the lock, 4 of
    360 switches failed with six processes at once.

    The body runs under the lock. An existing file keeps its content and its mode.

    Raises:
        StoreError: the folder cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as err:
        raise StoreError(_unwritable(path, err)) from err
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _make_file(path)
        yield
    finally:
        os.close(folder)


def _make_file(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as err:
        raise StoreError(_unwritable(path, err)) from err
    with database_errors(str(path)):
        connection = sqlite3.connect(path, timeout=BUSY_S)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()


def _unwritable(path: Path, err: OSError) -> str:
    return (
        f"cannot write the database {path}: {err.strerror}; "
        "give a file in a folder of yours with --db, or set DOFSWEEP_HOME"
    )


@contextmanager
def database_errors(where: str, *, any_error: bool = False) -> Iterator[None]:
    """Turn failures that a user can meet into a StoreError of one line.

    Args:
        where: the database, without its password.
        any_error: also take errors that in our own queries would be our mistakes, such as a file
            that is not a database or a role that may not create tables.
    """
    try:
        yield
    except (DatabaseError, sqlite3.DatabaseError) as err:
        ours = isinstance(err, DatabaseError) and not isinstance(err, OperationalError)
        if ours and not any_error:
            raise
        raise StoreError(f"database {where}: {one_line(err)}") from None


def one_line(err: Exception) -> str:
    """What the database said, on one line, without a password, and what to do about it."""
    cause: Any = err.orig if isinstance(err, DBAPIError) else err
    said = mask(" ".join(str(cause).split())).partition(" LINE ")[0][:300]
    for words, step in _STEPS.items():
        if words in said:
            return f"{said}; {step}"
    return said


_STEPS = {
    "password authentication failed": "check user and password in the URL (--db or DOFSWEEP_DB)",
    "no password supplied": "put the password into the URL, or into ~/.pgpass",
    'FATAL: database "': "create it on the server, or correct the URL (--db or DOFSWEEP_DB)",
    'FATAL: role "': "create it on the server, or correct the URL (--db or DOFSWEEP_DB)",
    "permission denied for schema": "grant the user CREATE on that schema",
    "Connection refused": "start the server, or correct host and port (--db or DOFSWEEP_DB)",
    "timeout expired": "check that the server can be reached from here",
    "resolve host": "correct the host in the URL (--db or DOFSWEEP_DB)",
    "database is locked": "another program holds it; end that program and try again",
    "readonly database": "the file or its folder cannot be written to; check the owner and mode",
    "unable to open database file": "check that the file and its folder can be read and written",
    "not a database": "the file is something else; give another one with --db",
    "disk is full": "free some space and run `dofsweep resume`",
}
