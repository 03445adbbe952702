"""The door to the results store: open it, and work in short transactions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import inspect, select, text
from sqlalchemy.orm import Session

from dofsweep.errors import StoreError
from dofsweep.store.engine import WRITE, database_errors, make_engine
from dofsweep.store.models import REVISIONS, VERSION_TABLE, Base
from dofsweep.store.urls import default_home, mask, resolve_url, sqlite_path

__all__ = ["Store", "database_now", "default_home", "resolve_url"]


class Store:
    """One results database.

    Attributes:
        url: the full URL, with its password: never print it.
        safe_url: the URL for printing.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url = resolve_url(url)
        self.safe_url = mask(self.url)
        engine = make_engine(self.url)
        self._engine = engine
        self._writer = engine.execution_options(**{WRITE: True})
        self._reader = engine
        if sqlite_path(self.url) is None:  # SQLite's readers have one view anyway
            self._reader = engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )

    @classmethod
    def open(cls, url: str | None = None, *, create: bool = False) -> Store:
        """Open a database that is ready for work.

        Args:
            url: see ``resolve_url``.
            create: make the tables in a database that holds none of ours; it may be missing.
        Raises:
            StoreError: it is missing, of another revision, or cannot be reached.
        """
        store = cls(url)
        try:
            store._make_ready(create)
        except BaseException:
            store.dispose()
            raise
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def _make_ready(self, create: bool) -> None:
        if not create:
            self.require_file()
        path = sqlite_path(self.url)
        revision = None if path and not path.exists() else self.revision()
        if revision is None and create:
            self.upgrade()
            revision = self.revision()
        if revision == REVISIONS[-1]:
            return
        if revision is None:
            raise StoreError(
                f"database {self.safe_url} holds no dofsweep tables yet: run `dofsweep db upgrade`"
            )
        if revision in REVISIONS:
            raise StoreError(
                f"database {self.safe_url} is at revision {revision}, this dofsweep needs "
                f"{REVISIONS[-1]}: run `dofsweep db upgrade`"
            )
        raise StoreError(
            f"database {self.safe_url} is at revision {revision}, which this dofsweep does not "
            f"know (newest {REVISIONS[-1]}): install the newer dofsweep that wrote it"
        )

    def require_file(self) -> None:
        """Raise StoreError if this is an SQLite file that does not exist."""
        path = sqlite_path(self.url)
        if path and not path.exists():
            raise StoreError(
                f"no database at {path}: run `dofsweep launch` or `dofsweep db upgrade`"
            )

    def revision(self) -> str | None:
        """Revision of the schema; None for a database without our tables.

        Raises:
            StoreError: it cannot be read, or holds tables of ours without a revision.
        """
        with database_errors(self.safe_url, any_error=True), Session(self._engine) as session:
            tables = set(inspect(session.connection()).get_table_names())
            if VERSION_TABLE in tables:
                found = session.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
                if found is not None:
                    return str(found)
        if taken := sorted(tables & set(Base.metadata.tables)):
            raise StoreError(
                f"database {self.safe_url} has tables named {', '.join(taken)} that dofsweep did "
                "not make: use a database of its own"
            )
        return None

    def upgrade(self) -> None:
        """Bring the schema up to date; see ``dofsweep.store.migrate.upgrade``."""
        from dofsweep.store import migrate  # Alembic takes half a second to import

        migrate.upgrade(self.url)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One write transaction: committed at the end, rolled back on an error.

        Keep it short, with no work but the writing inside: on SQLite all other writers wait.

        Raises:
            StoreError: the database cannot be reached or written to.
        """
        with (
            database_errors(self.safe_url),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent view of the database for reading; never waits for writers."""
        with database_errors(self.safe_url), Session(self._reader) as session:
            yield session

    def dispose(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def database_now(session: Session) -> float:
    """Seconds since 1970 by the clock that all users of a database share.

    Drivers and readers may be on machines whose clocks differ; PostgreSQL's own decides. SQLite
    is used from one machine, so that machine's does.
    """
    if session.get_bind().dialect.name == "sqlite":
        return time.time()
    return float(session.scalar(select(text("extract(epoch FROM clock_timestamp())"))) or 0.0)
