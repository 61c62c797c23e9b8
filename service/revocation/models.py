"""Revocations, those that are still to come, and where each sidecar stands with them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, UniqueConstraint, text
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


class ScheduleState(StrEnum):
    """What became of a revocation that was asked for ahead of its time."""

    SCHEDULED = "scheduled"
    CARRIED_OUT = "carried_out"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """At its time there was nothing to revoke any more."""


class ScheduledRevocation(Record):
    """A revocation that is to be carried out at `due_at`, under the same id."""

    __tablename__ = "scheduled_revocations"
    __table_args__ = (
        UniqueConstraint("asked_by", "idempotency_key"),
        Index("ix_scheduled_revocations_state_due_at", "state", "due_at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    axis: Mapped[Axis] = mapped_column(choice(Axis, "axis"))
    tenant: Mapped[str | None] = mapped_column(String(32), index=True)
    """Whose it is; None: it concerns no single tenant."""
    target: Mapped[str] = mapped_column(String(128))
    group: Mapped[str | None] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(String(256))
    actor_kind: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(256))
    actor_tenant: Mapped[str | None] = mapped_column(String(32))
    asked_by: Mapped[str] = mapped_column(String(256))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    request: Mapped[str] = mapped_column(String(128))
    """What was asked, and for when."""
    created_at: Mapped[datetime] = mapped_column(Instant)
    due_at: Mapped[datetime] = mapped_column(Instant)
    state: Mapped[ScheduleState] = mapped_column(choice(ScheduleState, "state"))
    ended_at: Mapped[datetime | None] = mapped_column(Instant)
    failure: Mapped[str] = mapped_column(String(64))
    """The code of what stood against it; empty unless it failed."""


class Revocation(Record):
    """One revocation, as it was asked for and committed."""

    __tablename__ = "revocations"
    __table_args__ = (
        UniqueConstraint("asked_by", "idempotency_key"),
        Index(
            "ix_revocations_open",
            "seq",
            sqlite_where=text("effective_at IS NULL"),
            postgresql_where=text("effective_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    axis: Mapped[Axis] = mapped_column(choice(Axis, "axis"))
    tenant: Mapped[str | None] = mapped_column(String(32), index=True)
    """None: it concerns no single tenant."""
    target: Mapped[str] = mapped_column(Text)
    """Canonical JSON of the target's names and ids."""
    reason: Mapped[str] = mapped_column(String(1024))
    asked_by: Mapped[str] = mapped_column(String(256))
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    """SHA-256 over the caller's tenant and the key that it sent."""
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
