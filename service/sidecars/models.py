"""Sidecars, the tokens they join with, what they acknowledged, and how far their spools are."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import COMPONENT, Instant, Record
from strongroom.identity import ComponentId
from strongroom.limits import NAME_CHARS_MAX

SIDECAR = String(32)


class JoinToken(Record):
    """A token that one sidecar may enrol with, once. Only its SHA-256 is kept."""

    __tablename__ = "join_tokens"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    every_tenant: Mapped[bool] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(Instant)
    expires_at: Mapped[datetime] = mapped_column(Instant)
    used_at: Mapped[datetime | None] = mapped_column(Instant)


class JoinTokenTenant(Record):
    """A tenant that the sidecar will be enrolled for."""

    __tablename__ = "join_token_tenants"

    digest: Mapped[str] = mapped_column(ForeignKey("join_tokens.digest"), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("tenants.id"), primary_key=True
    )


class Sidecar(Record):
    """An enrolled sidecar. It is live until it is revoked."""

    __tablename__ = "sidecars"

    id: Mapped[str] = mapped_column(SIDECAR, primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    signing_key: Mapped[str] = mapped_column(String(43))
    """Ed25519 public key, base64url."""
    hpke_key: Mapped[str] = mapped_column(String(43))
    """X25519 public key, base64url."""
    every_tenant: Mapped[bool] = mapped_column()
    enrolled_at: Mapped[datetime] = mapped_column(Instant)
    revoked_at: Mapped[datetime | None] = mapped_column(Instant)
    keys_changed_at: Mapped[datetime | None] = mapped_column(Instant)
    """When its keys were exchanged last; None: they are those of its enrolment."""
    leases: Mapped[int] = mapped_column(BigInteger)
    """Serving leases that were granted; names the last one (see `service.sidecars.expiry`)."""
    leased_at: Mapped[datetime | None] = mapped_column(Instant)
    """When the last one was granted: for people, no deadline hangs on it."""
    epoch: Mapped[str] = mapped_column(String(32))
    applied_seq: Mapped[int] = mapped_column()
    """How far the sidecar said that it had applied the log of `epoch`."""
    fenced_seq: Mapped[int] = mapped_column()
    reclaimed_seq: Mapped[int] = mapped_column()


class FormerKey(Record):
    """A signing key that a sidecar had before: it is taken for none again."""

    __tablename__ = "sidecar_former_keys"

    signing_key: Mapped[str] = mapped_column(String(43), primary_key=True)
    sidecar: Mapped[str] = mapped_column(SIDECAR, ForeignKey("sidecars.id"))
    replaced_at: Mapped[datetime] = mapped_column(Instant)


class SidecarTenant(Record):
    """A tenant whose namespaces the sidecar may lease."""

    __tablename__ = "sidecar_tenants"

    sidecar: Mapped[str] = mapped_column(SIDECAR, ForeignKey("sidecars.id"), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("tenants.id"), primary_key=True
    )


class Spool(Record):
    """How far the service has taken a sidecar's audit spool."""

    __tablename__ = "spools"

    sidecar: Mapped[str] = mapped_column(SIDECAR, ForeignKey("sidecars.id"), primary_key=True)
    spool: Mapped[str] = mapped_column(String(64), primary_key=True)
    next_count: Mapped[int] = mapped_column(BigInteger)
    prev: Mapped[str] = mapped_column(String(64))
    """The hash of the last event taken."""
