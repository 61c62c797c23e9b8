"""What is asked to be revoked, and whether the caller may ask for it.

An operator may revoke everything. Whoever belongs to a tenant may revoke what is that
tenant's: not the tenant itself, not what all tenants share, not a sidecar. What a caller may
not revoke and what does not exist give the same error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from service.auth.actor import Actor
from service.revocation.models import Axis
from strongroom.canonical import canonical_json
from strongroom.errors import Missing, Misuse
from strongroom.identity import ComponentId, parse_component_id

ARTEFACTS: Final = frozenset((Axis.MODEL, Axis.ADAPTER, Axis.TOKENIZER, Axis.TEMPLATE, Axis.POLICY))
_OPERATOR_ONLY: Final = frozenset((Axis.TENANT, Axis.SIDECAR))
_TARGET_CHARS_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class Ask:
    """`target` is a subject's name, or the id of what is revoked; `group` is a membership's.

    `tenant` None: whatever tenant it belongs to, which only an operator may leave open.
    """

    axis: Axis
    target: str
    tenant: ComponentId | None
    group: str | None
    reason: str

    def describe(self) -> dict[str, str]:
        """What was asked, as status and certificate show it."""
        told = {str(self.axis): self.target}
        if self.axis is Axis.MEMBERSHIP:
            told = {"subject": self.target, "group": self.group or ""}
        return told

    def digest(self) -> str:
        """SHA-256 that tells two requests under one idempotency key apart."""
        asked = {
            "axis": str(self.axis),
            "tenant": self.tenant or "",
            "target": self.describe(),
            "reason": self.reason,
        }
        return hashlib.sha256(canonical_json(asked)).hexdigest()


def key_of(actor: Actor, idempotency_key: str | None) -> str | None:
    """An idempotency key as it is stored: one tenant's `boss` is not another's."""
    if idempotency_key is None:
        return None
    return hashlib.sha256(f"{actor.tenant or ''}\n{idempotency_key}".encode()).hexdigest()


def nothing_there() -> Missing:
    """The one error for what does not exist and for what is not the caller's."""
    return Missing("there is nothing here that you can revoke", field="target")


def check_ask(
    actor: Actor, axis: Axis, target: str, tenant: str | None, group: str | None, reason: str
) -> Ask:
    """An ask that `actor` may make, as far as that can be said without the database."""
    if not 0 < len(target) <= _TARGET_CHARS_MAX:
        raise Misuse("a target has 1 to 128 characters", field="target", limit=_TARGET_CHARS_MAX)
    if (axis is Axis.MEMBERSHIP) != (group is not None):
        raise Misuse("a membership names its group, nothing else does", field="group")
    if axis in _OPERATOR_ONLY and actor.tenant is not None:
        raise nothing_there()
    scope = tenant if tenant is not None else actor.tenant
    if axis is Axis.TENANT:
        scope = target
    if axis is Axis.SUBJECT and scope is None:
        raise Misuse("a subject's name says nothing without its tenant", field="tenant")
    if actor.tenant is not None and scope != actor.tenant:
        raise nothing_there()
    if axis is Axis.SIDECAR:
        scope = None
    checked = None if scope is None else parse_component_id(scope, "tenant")
    return Ask(axis, target, checked, group, reason)
