"""Who does something: a value that every change and every audit event carries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from strongroom.identity import ComponentId


class ActorKind(StrEnum):
    """What kind of party acts."""

    OPERATOR = "operator"
    TENANT_ADMIN = "tenant_admin"
    AUDITOR = "auditor"
    GATEWAY = "gateway"
    SUBJECT = "subject"
    SIDECAR = "sidecar"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Actor:
    """An authenticated party. `tenant` None: it belongs to the installation, not to a tenant."""

    kind: ActorKind
    id: str
    tenant: ComponentId | None = None
    roles: frozenset[str] = frozenset()


SYSTEM = Actor(ActorKind.SYSTEM, "system")
"""The service itself: start-up, replay, rotation."""
