"""Run by Alembic for every migration command, from our code or from the command line.

The database is the ``url`` that ``dofsweep.store.migrate`` hands over, else ``-x url=…``, else the
one that ``dofsweep`` itself would use.
"""

from __future__ import annotations

from typing import Any, Literal

from alembic import context

from dofsweep.store.migrate import migration_connection
from dofsweep.store.models import VERSION_TABLE, Base, UtcDateTime
from dofsweep.store.urls import resolve_url

LOCK = 0x646F6673
"""Number of the PostgreSQL advisory lock that migrations take: "dofs"."""


def is_ours(name: str | None, kind: str, _parent: Any) -> bool:
    """Leave the tables of other programs alone: Optuna may live in the same database."""
    return kind != "table" or name in Base.metadata.tables


def render(kind: str, item: Any, _context: Any) -> str | Literal[False]:
    """A migration must not change when a model does: it names plain types only."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return False


def database_url() -> str:
    given = context.config.attributes.get("url")
    return resolve_url(given or context.get_x_argument(as_dictionary=True).get("url"))


OPTIONS: dict[str, Any] = {
    "target_metadata": Base.metadata,
    "version_table": VERSION_TABLE,
    "include_name": is_ours,
    "render_item": render,
}


def run_offline() -> None:
    """Print the SQL instead of running it."""
    context.configure(url=database_url(), literal_binds=True, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    """Migrate in one transaction: all of it, or nothing, and one process at a time."""
    with migration_connection(database_url()) as connection:
        context.configure(
            connection=connection, render_as_batch=True, transactional_ddl=True, **OPTIONS
        )
        with context.begin_transaction():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")
            context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
