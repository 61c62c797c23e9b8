"""What an operator sends and sees about sidecars. What a sidecar says is `strongroom.control`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field

from service.schemas import Answer, Body, ComponentIdText, Name
from service.sidecars.models import Sidecar

_ID = "0123456789abcdef0123456789abcdef"


class JoinTokenBody(Body):
    """Who may be served by the sidecar that enrols with this token."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tenants": [_ID]}]})

    tenants: Annotated[list[ComponentIdText], Field(default_factory=list, max_length=1000)]
    """Empty: every tenant."""
    name: Name | None = None
    """Whom it is meant for: kept in the audit."""
    life_s: Annotated[int, Field(ge=1, le=30 * 24 * 3600, strict=True)] | None = None
    """Seconds; None: as the service is set."""


class JoinTokenAnswer(Answer):
    """A join token, shown this once. It enrols one sidecar."""

    join_token: str
    tenants: list[str]
    expires_at: datetime


class SidecarAnswer(Answer):
    """A sidecar and how far it has come."""

    id: str
    name: str
    tenants: list[str]
    """Empty: every tenant."""
    enrolled_at: datetime
    revoked_at: datetime | None
    keys_changed_at: datetime | None
    """None: its keys are those of its enrolment."""
    leased_at: datetime | None
    epoch: str
    applied_seq: int
    fenced_seq: int
    reclaimed_seq: int

    @classmethod
    def of(cls, sidecar: Sidecar, tenants: list[str]) -> SidecarAnswer:
        """From its row."""
        return cls(
            id=sidecar.id,
            name=sidecar.name,
            tenants=tenants,
            enrolled_at=sidecar.enrolled_at,
            revoked_at=sidecar.revoked_at,
            keys_changed_at=sidecar.keys_changed_at,
            leased_at=sidecar.leased_at,
            epoch=sidecar.epoch,
            applied_seq=sidecar.applied_seq,
            fenced_seq=sidecar.fenced_seq,
            reclaimed_seq=sidecar.reclaimed_seq,
        )


class SidecarPage(Answer):
    """Some sidecars."""

    items: list[SidecarAnswer]
    next_cursor: str | None
