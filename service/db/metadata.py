"""Every room's tables in one metadata: what migrations compare with, and tests create."""

from __future__ import annotations

import importlib
from typing import Final

from sqlalchemy import MetaData

from service.db.base import Record

ROOMS: Final = (
    "keys",
    "tenancy",
    "registry",
    "rules",
    "grants",
    "log",
    "audit",
    "sidecars",
    "revocation",
)
"""The rooms that have a `models` module."""


def complete_metadata() -> MetaData:
    """The metadata with every room's tables in it."""
    for room in ROOMS:
        importlib.import_module(f"service.{room}.models")
    return Record.metadata
