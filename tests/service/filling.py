"""Rows for every table there is, as many as wanted: for migrations with data, and for query plans.

Values follow from the row's number, so that uniqueness holds and two fillings are equal; what
refers to another table refers to a row that is there. Only what a CHECK demands is said by name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    Boolean,
    Connection,
    DateTime,
    Enum,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    insert,
    select,
)
from sqlalchemy.types import TypeDecorator

AUDIT: Final = "audit_"
"""The audit's tables are a chain of hashes: rows of no meaning are none of it."""
_FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)
_ONE_ROW: Final = frozenset(("log_counter",))
_GIVEN: Final[dict[tuple[str, str], Callable[[int], Any]]] = {
    ("components", "wrapped"): lambda n: b"w%d" % n if n % 2 else None,
    ("components", "destroyed_at"): lambda n: None if n % 2 else _FIRST,
    ("components", "tenant"): lambda n: None,
    ("policy_rules", "condition"): lambda n: "",
    ("policy_rules", "added_in"): lambda n: 1,
    ("policy_rules", "removed_in"): lambda n: None,
    ("policy_roles", "added_in"): lambda n: 1,
    ("policy_roles", "removed_in"): lambda n: None,
    ("policy_versions", "number"): lambda n: 1,
    ("tenants", "removed_at"): lambda n: None,
    ("sidecars", "revoked_at"): lambda n: None if n % 2 else _FIRST,
}


def filled(metadata: MetaData) -> list[Table]:
    """The tables that `fill` fills, those that others refer to first."""
    return [table for table in metadata.sorted_tables if not table.name.startswith(AUDIT)]


def fill(connection: Connection, metadata: MetaData, rows: int) -> None:
    """Put `rows` rows into every table of `metadata` but the audit's."""
    for table in filled(metadata):
        count = 1 if table.name in _ONE_ROW else rows
        made = [_row(table, number, rows) for number in range(1, count + 1)]
        for start in range(0, count, 500):
            connection.execute(insert(table), made[start : start + 500])


def everything(connection: Connection, tables: list[Table]) -> dict[str, list[dict[str, Any]]]:
    """Every row of `tables`, by table, in an order of its own."""
    return {
        table.name: sorted(
            (dict(row._mapping) for row in connection.execute(select(table))), key=repr
        )
        for table in tables
    }


def _row(table: Table, number: int, rows: int) -> dict[str, Any]:
    return {
        column.name: _GIVEN[table.name, column.name](number)
        if (table.name, column.name) in _GIVEN
        else _value(column.type, _number(table, column.name, number, rows))
        for column in table.columns
    }


def _number(table: Table, column: str, number: int, rows: int) -> int:
    """Keys of several columns differ in the first of them, and repeat every twentieth row."""
    first = next(iter(table.primary_key.columns), None)
    several = len(table.primary_key.columns) > 1
    if several and first is not None and column == first.name and rows > 20:
        return (number - 1) // 20 + 1
    return number


def _value(kind: Any, number: int) -> Any:
    if isinstance(kind, Enum):
        members = list(kind.enum_class) if kind.enum_class else list(kind.enums)
        return members[number % len(members)]
    if isinstance(kind, TypeDecorator):
        kind = kind.impl_instance
    match kind:
        case DateTime():
            return _FIRST + timedelta(seconds=number)
        case Boolean():
            return number % 2 == 0
        case Integer():
            return number
        case LargeBinary():
            return b"%d" % number
        case String():
            return f"{number:0{min(kind.length or 64, 64)}x}"
        case _:
            raise AssertionError(f"no value for {kind!r}")
