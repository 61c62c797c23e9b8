"""Which permissions come with the role in a caller's token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.tokens import Role

_AUDITOR: Final = frozenset(
    (
        Permission.TENANT_READ,
        Permission.RULE_READ,
        Permission.DECISION_READ,
        Permission.ARTEFACT_READ,
        Permission.DOCUMENT_READ,
        Permission.REVOCATION_READ,
        Permission.SIDECAR_READ,
        Permission.KEY_READ,
        Permission.LOG_READ,
        Permission.AUDIT_READ,
    )
)
_TENANT_ADMIN: Final = (_AUDITOR - {Permission.SIDECAR_READ, Permission.LOG_READ}) | {
    Permission.TENANT_WRITE,
    Permission.RULE_WRITE,
    Permission.ARTEFACT_WRITE,
    Permission.DOCUMENT_WRITE,
    Permission.GRANT_CREATE,
    Permission.GRANT_ACT_AS,
    Permission.TOKEN_ISSUE,
    Permission.REVOCATION_CREATE,
    Permission.AUDIT_HOLD,
}

ROLES: Final[Mapping[Role, frozenset[Permission]]] = MappingProxyType(
    {
        Role.OPERATOR: frozenset(Permission),
        Role.TENANT_ADMIN: _TENANT_ADMIN,
        Role.AUDITOR: _AUDITOR,
        Role.GATEWAY: frozenset((Permission.GRANT_CREATE, Permission.ARTEFACT_READ)),
        Role.SUBJECT: frozenset((Permission.GRANT_CREATE,)),
    }
)


def permissions_of(actor: Actor) -> frozenset[Permission]:
    """What the roles of `actor` allow together; scope is another question."""
    return permissions_with(role for role in Role if role.value in actor.roles)


def permissions_with(roles: Iterable[Role]) -> frozenset[Permission]:
    """What `roles` allow together."""
    return frozenset(permission for role in roles for permission in ROLES[role])
