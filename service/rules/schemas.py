"""What the rules' routes take and give."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from policy.permissions import Permission
from policy.rules import Effect
from service.schemas import Answer, Body, Revision
from strongroom.limits import NAME_CHARS_MAX

_ID = "0123456789abcdef0123456789abcdef"
_AT = "2026-01-31T12:00:00Z"

Party = Annotated[
    str,
    StringConstraints(
        pattern="^((user|role):[A-Za-z0-9][A-Za-z0-9._@-]*|group:[0-9a-f]{32})$", max_length=136
    ),
]
"""`user:<name>`, `group:<id>` or `role:<name>`; `policy.rules` has the last word."""
RoleName = Annotated[
    str, StringConstraints(pattern="^role:[A-Za-z0-9][A-Za-z0-9._@-]*$", max_length=136)
]
Resource = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z_]+:([A-Za-z0-9][A-Za-z0-9._@-]*|\*)$", max_length=NAME_CHARS_MAX + 64
    ),
]
"""`<kind>:<id>` or `<kind>:*`, the kind being the action's."""


class RuleBody(Body):
    """A rule to be added."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "subject": "user:alice",
                    "action": "group:read",
                    "resource": f"group:{_ID}",
                    "effect": "deny",
                }
            ]
        }
    )

    subject: Party
    action: Permission
    resource: Resource
    effect: Effect


class RuleAnswer(Answer):
    """A rule, and the tenant's revision from which it counts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "subject": "user:alice",
                    "action": "group:read",
                    "resource": f"group:{_ID}",
                    "effect": "deny",
                    "created_at": _AT,
                }
            ]
        }
    )

    id: str
    subject: str
    action: str
    resource: str
    effect: Effect
    created_at: datetime


class RulePage(Answer):
    """Some rules, and the cursor that goes on."""

    items: list[RuleAnswer]
    next_cursor: str | None = None


class RoleBody(Body):
    """A role to be assigned. A role may be given to another role."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"subject": "user:alice", "role": "role:reader"}]}
    )

    subject: Party
    role: RoleName


class RoleAnswer(Answer):
    """A role assignment."""

    id: str
    subject: str
    role: str
    created_at: datetime


class RolePage(Answer):
    """Some role assignments, and the cursor that goes on."""

    items: list[RoleAnswer]
    next_cursor: str | None = None


class DecisionBody(Body):
    """A question: may `subject` do `action` to `resource`?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "subject": "user:alice",
                    "action": "group:read",
                    "resource": f"group:{_ID}",
                    "min_revision": 3,
                }
            ]
        }
    )

    subject: Party
    action: Permission
    resource: Resource
    min_revision: Revision | None = None


class DecisionAnswer(Answer):
    """The decision at `revision`, explained."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "allowed": False,
                    "reason": "denied by: deny user:alice group:read on group:*",
                    "rule": "deny user:alice group:read on group:*",
                    "revision": 3,
                }
            ]
        }
    )

    allowed: bool
    reason: str
    rule: Annotated[str | None, Field(description="The rule that decided, if one did.")] = None
    revision: int
