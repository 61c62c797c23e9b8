"""Every room's tables in one metadata: what migrations compare with, and tests create."""

from __future__ import annotations

import importlib
import re
from collections.abc import MutableMapping
from typing import Any, Final

from sqlalchemy import MetaData

from service.db.base import Record

ROOMS: Final = (
    "keys",
    "tenancy",
    "registry",
    "rules",
    "grants",
    "log",
    "journal",
    "audit",
    "sidecars",
    "revocation",
    "residency",
)
"""The rooms that have a `models` module."""


_PARTITION: Final = re.compile(r"audit_(?:events|references)_(?:\d{4}_\d{2}|default)")


def is_modelled(name: str | None, kind: str, parents: MutableMapping[Any, str | None]) -> bool:
    """For a comparison: whether a table is one that models speak of. Partitions come and go."""
    table = name if kind == "table" else parents.get("table_name")
    return table is None or _PARTITION.fullmatch(table) is None


def complete_metadata() -> MetaData:
    """The metadata with every room's tables in it."""
    for room in ROOMS:
        importlib.import_module(f"service.{room}.models")
    return Record.metadata
