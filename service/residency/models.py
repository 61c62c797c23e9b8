"""What sidecars last said that they hold: one row for a namespace in one tier of one node.

A hint, never proof (DESIGN section 1): nothing is granted, served or certified by it.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import NAMESPACE, Instant, Record, choice
from strongroom.identity import NamespaceId

SIDECAR = String(32)


class Tier(StrEnum):
    """Where ciphertext lies."""

    HOST = "host"
    NVME = "nvme"
    REMOTE = "remote"


class ResidencyRow(Record):
    """`blocks` of `namespace` in `tier` of the node of `sidecar`, `bytes` together."""

    __tablename__ = "residency"
    __table_args__ = (CheckConstraint("blocks > 0 AND bytes >= 0", name="something"),)

    sidecar: Mapped[str] = mapped_column(SIDECAR, ForeignKey("sidecars.id"), primary_key=True)
    namespace: Mapped[NamespaceId] = mapped_column(
        NAMESPACE, ForeignKey("namespaces.id"), primary_key=True, index=True
    )
    tier: Mapped[Tier] = mapped_column(choice(Tier, "tier"), primary_key=True)
    blocks: Mapped[int] = mapped_column(BigInteger)
    bytes: Mapped[int] = mapped_column(BigInteger)


class ResidencyReport(Record):
    """The last report of a sidecar that was taken: number `number` of its `run`."""

    __tablename__ = "residency_reports"

    sidecar: Mapped[str] = mapped_column(SIDECAR, ForeignKey("sidecars.id"), primary_key=True)
    run: Mapped[str] = mapped_column(String(32))
    number: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(Instant)
