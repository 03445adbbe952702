"""Which database: from an argument, the environment, or the default file, to one URL."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from dofsweep.errors import StoreError

FILE_SUFFIXES = {".db", ".sqlite", ".sqlite3"}
SQLITE = {"sqlite", "sqlite+pysqlite"}
POSTGRES = {"postgresql", "postgresql+psycopg", "postgres"}
ALLOWED = (
    "use a file such as results.db, sqlite:///FOLDER/results.db, or postgresql://USER@HOST/DATABASE"
)


def default_home() -> Path:
    """Folder of everything dofsweep keeps: $DOFSWEEP_HOME, else ~/.dofsweep."""
    return (
        Path(os.environ.get("DOFSWEEP_HOME") or Path.home() / ".dofsweep").expanduser().absolute()
    )


def resolve_url(url: str | None = None) -> str:
    """The database URL in one form that every process understands the same way.

    Args:
        url: URL or path of an SQLite file; default $DOFSWEEP_DB, else dofsweep.db in the home.
    Returns:
        ``sqlite:////absolute/path`` or ``postgresql+psycopg://…``, with its password.
    Raises:
        StoreError: it is neither.
    """
    given = url or os.environ.get("DOFSWEEP_DB") or str(default_home() / "dofsweep.db")
    if "://" not in given:
        if Path(given).suffix not in FILE_SUFFIXES:
            raise StoreError(f"database {mask(given)!r} is not a URL or a .db file; {ALLOWED}")
        return _sqlite_url(given)
    try:
        parsed = make_url(given)
    except (ArgumentError, ValueError) as err:
        raise StoreError(f"database URL {mask(given)!r} cannot be read; {ALLOWED}") from err
    if parsed.drivername in SQLITE:
        if not parsed.database or parsed.database == ":memory:" or parsed.host or parsed.query:
            raise StoreError(
                f"database URL {mask(given)!r} is not a plain file (three slashes and a path, "
                f"no options); {ALLOWED}"
            )
        return _sqlite_url(parsed.database)
    if parsed.drivername in POSTGRES:
        return _postgres_url(parsed).render_as_string(hide_password=False)
    raise StoreError(f"database URL {mask(given)!r}: unknown scheme {parsed.drivername}; {ALLOWED}")


def _sqlite_url(path: str) -> str:
    """Absolute, as a job's working folder is not ours."""
    if "?" in path:
        raise StoreError(f"database file {path!r}: a question mark is not allowed in its path")
    return f"sqlite:///{Path(path).expanduser().absolute()}"


def _postgres_url(url: URL) -> URL:
    """One spelling of the driver, and a password only where it is masked when printed."""
    password = url.query.get("password")
    if password is not None:
        word = password if isinstance(password, str) else password[-1]
        url = url.difference_update_query(["password"]).set(password=word)
    return url.set(drivername="postgresql+psycopg")


def mask(text: str) -> str:
    """Text with the password of every URL in it replaced by three stars."""
    text = re.sub(r"(://[^:/@\s]*:)[^\s]*@", r"\1***@", text)
    return re.sub(r"([?&]password=)[^&\s]*", r"\1***", text)


def sqlite_path(url: str) -> Path | None:
    """File of a resolved SQLite URL; None for PostgreSQL."""
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
