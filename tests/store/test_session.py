"""Opening a database: which one, and what is said when it cannot be used."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres import free_port
from samples import create
from sqlalchemy import make_url, text

from dofsweep.errors import StoreError
from dofsweep.store import migrate
from dofsweep.store.models import VERSION_TABLE
from dofsweep.store.queries import get_sweep
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store, default_home, resolve_url
from dofsweep.store.urls import mask


def test_the_default_is_a_file_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_url() == f"sqlite:///{tmp_path}/home/dofsweep.db"
    monkeypatch.delenv("DOFSWEEP_HOME")
    assert default_home() == Path.home() / ".dofsweep"
    monkeypatch.setenv("DOFSWEEP_DB", f"{tmp_path}/env.db")
    assert resolve_url() == f"sqlite:///{tmp_path}/env.db"
    assert resolve_url(f"{tmp_path}/given.db") == f"sqlite:///{tmp_path}/given.db"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("results.db", "sqlite:///{cwd}/results.db"),
        ("a b/é.sqlite", "sqlite:///{cwd}/a b/é.sqlite"),
        ("~/x.sqlite3", "sqlite:///{home}/x.sqlite3"),
        ("sqlite:///x.db", "sqlite:///{cwd}/x.db"),
        ("sqlite:////tmp/x", "sqlite:////tmp/x"),
        ("sqlite+pysqlite:////tmp/x.db", "sqlite:////tmp/x.db"),
        ("postgres://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql://u:p%40w@h:5433/d", "postgresql+psycopg://u:p%40w@h:5433/d"),
        ("postgresql+psycopg://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql://u@h/d?password=p&x=1", "postgresql+psycopg://u:p@h/d?x=1"),
    ],
)
def test_urls_have_one_form(given: str, expected: str) -> None:
    url = resolve_url(given)
    assert url == expected.format(cwd=Path.cwd(), home=Path.home())
    assert resolve_url(url) == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("results.txt", "not a URL or a .db file"),
        ("mysql://u:hunter2@h/d", "unknown scheme mysql"),
        ("postgresql+psycopg2://u:hunter2@h/d", "unknown scheme"),
        ("postgresql://u:hunter2@h:port/d", "cannot be read"),
        ("postgresql://u:hun@ter2@h:port/d", "cannot be read"),
        ("://u:hunter2@h", "cannot be read"),
        ("sqlite://", "not a plain file"),
        ("sqlite:///:memory:", "not a plain file"),
        ("sqlite:///x.db?mode=ro", "not a plain file"),
        ("what?.db", "question mark"),
    ],
)
def test_other_urls_are_refused_without_their_password(given: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        resolve_url(given)
    assert "ter2" not in str(caught.value)
    assert caught.value.__cause__ is None or "ter2" not in str(caught.value.__cause__)


@given(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=20))
def test_passwords_are_masked_everywhere(password: str) -> None:
    url = make_url("postgresql://u@host:5432/d").set(password=f"§{password}")
    resolved = resolve_url(url.render_as_string(hide_password=False))
    assert make_url(resolved).password == f"§{password}"
    assert mask(resolved) == "postgresql+psycopg://u:***@host:5432/d"
    assert mask(f"x://u:§{password}@h is bad") == "x://u:***@h is bad"


def test_a_missing_file_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no database at .*none.db: run `dofsweep launch`"):
        Store.open(f"{tmp_path}/sub/none.db")
    assert not (tmp_path / "sub").exists()


def test_the_file_is_for_its_owner_and_in_wal_mode(
    tmp_path: Path, open_store: Callable[..., Store]
) -> None:
    path = tmp_path / "new" / "results.db"
    old = os.umask(0)
    try:
        store = open_store(str(path), create=True)
    finally:
        os.umask(old)
    with store.session() as session:
        session.execute(text("UPDATE sweep SET name = 'x'"))
        beside = sorted(path.parent.iterdir())
        assert [f.name for f in beside] == ["results.db", "results.db-shm", "results.db-wal"]
        assert {stat.S_IMODE(f.stat().st_mode) for f in beside} == {0o600}
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == 60_000
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_empty_database_is_not_filled_by_reading(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).touch()
    with pytest.raises(StoreError, match="no dofsweep tables yet: run `dofsweep db upgrade`"):
        Store.open(url)


def test_a_revision_that_is_not_known_asks_for_the_newer_program(
    url: str, open_store: Callable[..., Store]
) -> None:
    store = open_store(url, create=True)
    with store.session() as session:
        session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    for make in (False, True):
        with pytest.raises(StoreError, match="revision 9999.*install the newer dofsweep"):
            Store.open(url, create=make)
    with pytest.raises(StoreError, match="newer dofsweep"):
        migrate.upgrade(url)


def test_an_older_revision_asks_for_an_upgrade(
    url: str, open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(url, create=True)
    monkeypatch.setattr("dofsweep.store.session.REVISIONS", ("0001", "0002"))
    for make in (False, True):
        with pytest.raises(StoreError, match="at revision 0001.*run `dofsweep db upgrade`"):
            Store.open(url, create=make)


def test_tables_of_the_same_names_by_another_program_are_left_alone(url: str) -> None:
    stranger = Store(url)
    with stranger.session() as session:
        session.execute(text("CREATE TABLE event (x INTEGER)"))
    try:
        with pytest.raises(StoreError, match="tables named event"):
            Store.open(url, create=True)
        with stranger.reading() as session:
            assert session.execute(text("SELECT x FROM event")).all() == []
    finally:
        stranger.dispose()


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("these are my notes, and no database at all\n" * 100)
    for make in (False, True):
        with pytest.raises(StoreError, match="not a database"):
            Store.open(str(path), create=make)
    assert path.read_text().startswith("these are my notes")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").mkdir()
    with pytest.raises(StoreError, match="check that the file"):
        Store.open(f"{tmp_path}/x.db", create=True)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # permissions would not stop root; a file in the way does
    with pytest.raises(StoreError, match="cannot write the database .*; give a file"):
        Store.open(f"{tmp_path}/file/results.db", create=True)


@pytest.mark.postgres
def test_a_server_that_is_not_there_is_one_line_without_the_password() -> None:
    with pytest.raises(StoreError, match="Connection refused.*start the server") as caught:
        Store.open(f"postgresql://me:hunter2@127.0.0.1:{free_port()}/d", create=True)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.postgres
def test_a_server_that_does_not_answer_is_given_up_on() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(StoreError, match="timeout"):
            Store.open(f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/d", create=True)
    assert 3 < time.monotonic() - started < 20


@pytest.mark.postgres
def test_a_database_that_is_not_there_is_named(pg_server: str) -> None:
    url = make_url(pg_server).set(database="nowhere").render_as_string(hide_password=False)
    with pytest.raises(StoreError, match='"nowhere" does not exist; create it'):
        Store.open(url, create=True)


def test_two_writers_take_turns(store: Store, repo: SweepRepository) -> None:
    """A transaction that reads before it writes must wait, not fail, and not write over another."""
    create(repo)
    inside = threading.Event()
    add = text("UPDATE sweep SET done = done + 1")

    def slow() -> None:
        with store.session() as session:
            session.scalar(text("SELECT done FROM sweep"))
            inside.set()
            time.sleep(0.5)
            session.execute(add)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow)
        assert inside.wait(30)
        with store.session() as session:
            session.scalar(text("SELECT done FROM sweep"))
            session.execute(add)
        first.result(30)
    assert get_sweep(store, "sw-1")["done"] == 2
