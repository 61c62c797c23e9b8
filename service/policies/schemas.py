"""What the rules' routes take and give."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, ConfigDict, Field, StringConstraints

from policy.conditions import (
    MODELS_MAX,
    PURPOSE_CHARS_MAX,
    PURPOSES_MAX,
    Condition,
    Context,
    Day,
    Sensitivity,
    Window,
    decode_condition,
    fields_of,
)
from policy.permissions import Permission
from policy.rules import Effect
from service.db.base import now
from service.schemas import Answer, Body, ComponentIdText, Revision
from strongroom.identity import ComponentId
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


Purpose = Annotated[
    str, StringConstraints(pattern="^[a-z][a-z0-9_-]*$", max_length=PURPOSE_CHARS_MAX)
]
Clock = Annotated[str, StringConstraints(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$")]


class WindowBody(Body):
    """From `start` to before `end`, local time of `zone`; over midnight if it ends earlier."""

    zone: Annotated[str, Field(max_length=64, examples=["Europe/Berlin"])]
    start: Clock
    end: Clock
    days: Annotated[tuple[Day, ...], Field(max_length=7)] = ()
    """None: every day."""


class ConditionBody(Body):
    """When a rule applies: every field that is given must hold."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "purposes": ["support"],
                    "window": {"zone": "Europe/Berlin", "start": "09:00", "end": "17:00"},
                    "sensitivity_max": "internal",
                }
            ]
        }
    )

    purposes: Annotated[tuple[Purpose, ...], Field(max_length=PURPOSES_MAX)] = ()
    models: Annotated[tuple[ComponentIdText, ...], Field(max_length=MODELS_MAX)] = ()
    window: WindowBody | None = None
    sensitivity_max: Sensitivity | None = None
    sensitivity_above: Sensitivity | None = None

    def typed(self) -> Condition:
        """The condition. Raises `Misuse`."""
        window = self.window
        return Condition(
            purposes=self.purposes,
            models=tuple(ComponentId(model) for model in self.models),
            window=None
            if window is None
            else Window(window.zone, window.start, window.end, window.days),
            sensitivity_max=self.sensitivity_max,
            sensitivity_above=self.sensitivity_above,
        )


class ContextBody(Body):
    """What is known at a decision; left out: not known, so that no condition about it allows."""

    purpose: Purpose | None = None
    model: ComponentIdText | None = None
    sensitivity: Sensitivity | None = None
    at: AwareDatetime | None = None

    def typed(self) -> Context:
        """The context."""
        model = None if self.model is None else ComponentId(self.model)
        return Context(self.purpose, model, self.sensitivity, self.at)


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
    condition: ConditionBody | None = None
    """None: always."""


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
                    "condition": {},
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
    condition: dict[str, Any]
    """The fields that are set; empty: always."""
    created_at: datetime

    @classmethod
    def of(cls, row: Any) -> Self:
        """The rule of a stored row."""
        return cls(
            id=row.id,
            subject=row.subject,
            action=row.action,
            resource=row.resource,
            effect=row.effect,
            condition=fields_of(decode_condition(row.condition)),
            created_at=row.created_at,
        )


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
    context: ContextBody | None = None
    """Left out: nothing is known but the time."""
    min_revision: Revision | None = None

    def asked_in(self) -> Context:
        """The context that is asked in: at this moment, unless it names another."""
        context = Context() if self.context is None else self.context.typed()
        return context if context.at is not None else replace(context, at=now())


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
    until: Annotated[
        datetime | None,
        Field(description="When a time window may change it; null: with the next revision."),
    ] = None
    revision: int
