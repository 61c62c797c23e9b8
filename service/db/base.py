"""The declarative root and the column types that every room uses.

Instants are stored with their zone and come back in UTC on both databases; enumerations are
text with a CHECK, so that a value nobody knows cannot be stored; names of constraints follow
one convention, so that migrations can address them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import DateTime, Dialect, Enum, MetaData, String
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

from strongroom.errors import Misuse

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Instant(TypeDecorator[datetime]):
    """A moment in UTC, to the microsecond; a naive datetime is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        if value is None:
            return None
        if value.tzinfo is None:
            raise Misuse("a stored instant needs its time zone", field="instant")
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        del dialect
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class Record(DeclarativeBase):
    """The root of every stored row."""

    metadata = MetaData(naming_convention=NAMING)


COMPONENT = String(32)
"""A component id."""

NAMESPACE = String(64)
"""A namespace id."""


def choice(values: type[StrEnum], name: str) -> Enum:
    """Text limited by a CHECK named `name` to the values of an enumeration."""
    return Enum(
        values,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )


def now() -> datetime:
    """This moment in UTC."""
    return datetime.now(UTC)
