"""What tenancy's routes take and give."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from service.schemas import Answer, Body, ComponentIdText, Name
from service.tenancy.models import GroupKind

_ID = "0123456789abcdef0123456789abcdef"
_AT = "2026-01-31T12:00:00Z"
REASON_CHARS_MAX: Final = 256


class TenantBody(Body):
    """A tenant to be created."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "acme"}]})

    name: Name


class TenantAnswer(Answer):
    """A tenant. `revision` counts the states of its authorization."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "name": "acme",
                    "revision": 1,
                    "review_required": False,
                    "created_at": _AT,
                }
            ]
        }
    )

    id: str
    name: str
    revision: int
    review_required: bool
    """The database was restored: nothing is granted until an operator has reviewed the rules."""
    created_at: datetime


class TenantPage(Answer):
    """Some tenants, and the cursor that goes on."""

    items: list[TenantAnswer]
    next_cursor: str | None = None


class ReviewBody(Body):
    """What was looked at, and by whom: kept in the audit."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"reason": "rules compared with the directory"}]}
    )

    reason: Annotated[str, Field(min_length=1, max_length=REASON_CHARS_MAX)]


class PrincipalBody(Body):
    """A subject to be created; its private group is made with it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "alice"}]})

    name: Name


class PrincipalAnswer(Answer):
    """A subject and its private group."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": _ID, "name": "alice", "tenant": _ID, "private_group": _ID, "created_at": _AT}
            ]
        }
    )

    id: str
    name: str
    tenant: str
    private_group: str
    created_at: datetime


class PrincipalPage(Answer):
    """Some principals, and the cursor that goes on."""

    items: list[PrincipalAnswer]
    next_cursor: str | None = None


class GroupBody(Body):
    """An access group to be created."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "legal"}]})

    name: Name


class GroupAnswer(Answer):
    """An access group. Its id is what documents and spans name."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": _ID, "name": "legal", "tenant": _ID, "kind": "named", "created_at": _AT}
            ]
        }
    )

    id: str
    name: str
    tenant: str
    kind: GroupKind
    created_at: datetime


class GroupPage(Answer):
    """Some groups, and the cursor that goes on."""

    items: list[GroupAnswer]
    next_cursor: str | None = None


class MembershipBody(Body):
    """A principal to be put into a named group."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"group": _ID, "principal": "alice"}]}
    )

    group: ComponentIdText
    principal: Name


class MembershipAnswer(Answer):
    """A membership, and the tenant's revision from which it counts."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"group": _ID, "principal": "alice", "revision": 2}]}
    )

    group: str
    principal: str
    revision: int


class MemberAnswer(Answer):
    """One member of a group."""

    group: str
    principal: str


class MemberPage(Answer):
    """Some members, and the cursor that goes on."""

    items: list[MemberAnswer]
    next_cursor: str | None = None


class RevisionAnswer(Answer):
    """A change was made; grants of an older revision are dead."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"revision": 3}]})

    revision: int
