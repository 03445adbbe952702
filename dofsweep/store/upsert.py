"""Insert rows, or update those whose primary key is there already, on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from dofsweep.store.models import Base


def upsert(
    session: Session,
    model: type[Base],
    rows: Sequence[dict[str, Any]],
    *,
    only_new: frozenset[str] = frozenset(),
) -> None:
    """Write rows so that writing them twice is the same as writing them once.

    Args:
        rows: column name → value, the same names in each.
        only_new: columns that a row which is there already keeps.
    """
    if not rows:
        return
    table = cast(Table, model.__table__)
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    statement = sqlite.insert(table) if on_sqlite else postgresql.insert(table)
    keys = [column.name for column in table.primary_key]
    changed = {name: statement.excluded[name] for name in rows[0] if name not in {*keys, *only_new}}
    session.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), list(rows))
