"""Revocations and where each sidecar stands with them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Instant, Record, choice


class Axis(StrEnum):
    """What can be revoked."""

    SUBJECT = "subject"
    MEMBERSHIP = "membership"
    GROUP = "group"
    DOCUMENT = "document"
    DOCUMENT_VERSION = "document_version"
    MODEL = "model"
    ADAPTER = "adapter"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    POLICY = "policy"
    TENANT = "tenant"
    SIDECAR = "sidecar"


class SidecarState(StrEnum):
    """Where a sidecar stands: it may still serve, or it cannot any more."""

    PENDING = "pending"
    FENCED = "fenced"
    LEASE_EXPIRED = "lease_expired"


class Revocation(Record):
    """One revocation, as it was asked for and committed."""

    __tablename__ = "revocations"
    __table_args__ = (UniqueConstraint("asked_by", "idempotency_key"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    axis: Mapped[Axis] = mapped_column(choice(Axis, "axis"))
    tenant: Mapped[str | None] = mapped_column(String(32), index=True)
    """None: it concerns no single tenant."""
    target: Mapped[str] = mapped_column(Text)
    """Canonical JSON of the target's names and ids."""
    reason: Mapped[str] = mapped_column(String(1024))
    asked_by: Mapped[str] = mapped_column(String(256))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    request: Mapped[str] = mapped_column(String(64))
    """SHA-256 of what was asked, so that one key is never two requests."""
    committed_at: Mapped[str] = mapped_column(String(32))
    epoch: Mapped[str] = mapped_column(String(32))
    seq: Mapped[int] = mapped_column()
    components: Mapped[str] = mapped_column(Text)
    """Those destroyed: ids, back to back, sorted."""
    final_at: Mapped[datetime | None] = mapped_column(Instant)
    """When the KEK versions that wrapped the secrets are due to be destroyed themselves."""
    effective_at: Mapped[str | None] = mapped_column(String(32))
    """When the last sidecar was fenced or out of its lease."""


class RevocationSidecar(Record):
    """A sidecar that was enrolled when the revocation was committed."""

    __tablename__ = "revocation_sidecars"

    revocation: Mapped[str] = mapped_column(
        String(32), ForeignKey("revocations.id"), primary_key=True
    )
    sidecar: Mapped[str] = mapped_column(
        String(32), ForeignKey("sidecars.id"), primary_key=True, index=True
    )
    state: Mapped[SidecarState] = mapped_column(choice(SidecarState, "state"))
    at: Mapped[str] = mapped_column(String(32))
    """Of the state; for `pending`, of the commit."""
    loads_fenced: Mapped[int] = mapped_column(BigInteger)
    saves_fenced: Mapped[int] = mapped_column(BigInteger)
    namespaces_dropped: Mapped[int] = mapped_column(BigInteger)
    bytes_reclaimed: Mapped[int] = mapped_column(BigInteger)
