"""Every row of a database as JSON Lines, and back.

The tables are read from the database itself, so that a backup is restored with the columns that
it was made with and migrated afterwards. A line is `[table, column...]`, which begins a table, or
`{"r": [value...]}`; bytes are `{"b": base64}`, instants `{"t": RFC 3339}`. One snapshot: no
row is newer than another.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import IO, Any, Final

from sqlalchemy import Column, Connection, MetaData, Table, case, inspect, or_, select, text

from strongroom.errors import Corrupt, Misuse

_BATCH: Final = 500
_NOT_OURS: Final = frozenset(("alembic_version",))

Told = Callable[[int], None]


def tables_of(connection: Connection) -> list[Table]:
    """Every table, those that others refer to first. Partitions are read through their parent."""
    names = set(inspect(connection).get_table_names()) - _NOT_OURS
    if connection.dialect.name == "postgresql":
        children = connection.execute(
            text("SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid")
        )
        names -= set(children.scalars())
    metadata = MetaData()
    metadata.reflect(connection, only=sorted(names))
    return [table for table in metadata.sorted_tables if table.name in names]


def dump(connection: Connection, file: IO[str], told: Told) -> int:
    """Write every row; returns how many. `told` gets the number so far."""
    count = 0
    for table in tables_of(connection):
        names = [column.name for column in table.columns]
        file.write(json.dumps([table.name, *names]) + "\n")
        statement = select(table).execution_options(yield_per=_BATCH)
        for row in connection.execute(_roots_first(table, statement)):
            file.write(json.dumps({"r": [_encode(value) for value in row]}) + "\n")
            count += 1
            if count % _BATCH == 0:
                told(count)
    told(count)
    return count


def load(connection: Connection, file: IO[str], told: Told) -> int:
    """Insert every row into tables that are empty; returns how many."""
    tables = {table.name: table for table in tables_of(connection)}
    for table in tables.values():
        if connection.execute(select(table).limit(1)).first() is not None:
            raise Misuse(f"the database is not empty: {table.name} has rows", field="database_url")
    count = 0
    for table, batch in _batches(file, tables):
        connection.execute(table.insert(), batch)
        count += len(batch)
        told(count)
    return count


def log_entries(file: IO[str]) -> Iterator[str]:
    """The signed log entries in a dump, in order."""
    columns: list[str] = []
    entries: dict[int, str] = {}
    for line in file:
        parsed = _parse(line)
        if isinstance(parsed, list):
            columns = parsed[1:] if parsed[0] == "log_entries" else []
        elif columns:
            row = dict(zip(columns, parsed["r"], strict=True))
            entries[row["position"]] = row["jws"]
    for position in sorted(entries):
        yield entries[position]


def _batches(
    file: IO[str], tables: dict[str, Table]
) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
    table: Table | None = None
    names: list[str] = []
    batch: list[dict[str, Any]] = []
    for line in file:
        parsed = _parse(line)
        if isinstance(parsed, list):
            if table is not None and batch:
                yield table, batch
            table, names, batch = tables.get(parsed[0]), parsed[1:], []
            if table is None or not set(names) <= {column.name for column in table.columns}:
                raise Corrupt(f"the database has no such table: {parsed[0]}", field="backup")
            continue
        if table is None or len(parsed["r"]) != len(names):
            raise Corrupt("a row of the backup fits no table", field="backup")
        values = [_decode(value) for value in parsed["r"]]
        batch.append(dict(zip(names, values, strict=True)))
        if len(batch) == _BATCH:
            yield table, batch
            batch = []
    if table is not None and batch:
        yield table, batch


def _roots_first(table: Table, statement: Any) -> Any:
    """Rows that refer to no other row of their own table come first."""
    keys = list(table.primary_key.columns)
    own: list[Column[Any]] = [
        column
        for column in table.columns
        for key in column.foreign_keys
        if key.column.table is table
    ]
    order: list[Any] = []
    if own and len(keys) == 1:
        root = [or_(column.is_(None), column == keys[0]) for column in own]
        order = [case((condition, 0), else_=1) for condition in root]
    return statement.order_by(*order, *keys)


def _encode(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes() | memoryview():
            return {"b": base64.b64encode(value).decode("ascii")}
        case datetime():
            return {"t": value.astimezone(UTC).isoformat()}
        case _:
            raise Misuse("a column of the database has a type that no backup knows")


def _decode(value: Any) -> object:
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return base64.b64decode(content) if kind == "b" else datetime.fromisoformat(content)


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise Corrupt("a line of the backup cannot be read", field="backup") from error
