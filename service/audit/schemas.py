"""What is seen of the audit trail."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, ConfigDict, Field

from service.audit.events import ACCESS_PREFIX, AuditEvent, Category
from service.audit.questions import Derived
from service.schemas import Answer, Body, ComponentIdText


class EventAnswer(Answer):
    """One event, and its hash."""

    seq: int
    at: str
    occurred_at: str
    category: Category
    kind: str = Field(examples=["access.lookup"])
    actor_kind: str
    actor: str
    tenant: str | None
    subject: str
    target: str
    outcome: str
    reason: str
    request: str
    """Of an access: the engine's request, its grant's jti, and what was moved."""
    grant: str
    tokens: int
    bytes: int
    tier: str
    details: dict[str, Any]
    references: list[str]
    prev: str
    hash: str

    @classmethod
    def of(cls, event: AuditEvent) -> EventAnswer:
        """From an event."""
        draft = event.draft
        details = json.loads(draft.details)
        is_access = draft.kind.startswith(ACCESS_PREFIX)
        return cls(
            seq=event.seq,
            at=event.at,
            occurred_at=draft.occurred_at or event.at,
            category=event.category,
            kind=draft.kind,
            actor_kind=draft.actor_kind,
            actor=draft.actor,
            tenant=draft.tenant,
            subject=draft.subject,
            target=draft.target,
            outcome=draft.outcome,
            reason=draft.reason,
            request=draft.target if is_access else "",
            grant=str(details.get("grant", "")),
            tokens=int(details.get("tokens", 0)),
            bytes=int(details.get("bytes", 0)),
            tier=str(details.get("tier", "")),
            details=details,
            references=list(draft.references),
            prev=event.prev,
            hash=event.hash(),
        )


class EventPage(Answer):
    """Some events, in the order of the chain."""

    items: list[EventAnswer]
    next_cursor: str | None


class DerivedAnswer(Answer):
    """A namespace that depends on the document. Retired, nothing in it can be opened again."""

    namespace: str
    document_versions: list[str]
    created_at: datetime
    retired: bool
    retired_components: list[str]
    retired_at: datetime | None
    revocations: list[str]
    """Those that retired it: their certificates prove that it is gone."""

    @classmethod
    def of(cls, found: Derived) -> DerivedAnswer:
        """From what was found."""
        return cls(
            namespace=found.namespace,
            document_versions=[*found.document_versions],
            created_at=found.created_at,
            retired=found.retired,
            retired_components=[*found.retired_components],
            retired_at=found.retired_at,
            revocations=[*found.revocations],
        )


class DerivedPage(Answer):
    """Some of what was derived from a document."""

    items: list[DerivedAnswer]
    next_cursor: str | None


class DenialAnswer(Answer):
    """How often something was denied for one reason."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    kind: str
    reason: str
    count: int


class DenialsAnswer(Answer):
    """Denials by reason."""

    items: list[DenialAnswer]


class HeadAnswer(Answer):
    """A signed head: keep it elsewhere, and hold it against the chain later."""

    size: int
    root: str
    at: str
    jws: str


class HeadPage(Answer):
    """Some signed heads."""

    items: list[HeadAnswer]
    next_cursor: str | None


class ProofAnswer(Answer):
    """An RFC 9162 proof; hexadecimal."""

    size: int
    path: list[str]


class InclusionAnswer(ProofAnswer):
    """That an event is in the tree of `size` events."""

    index: int
    leaf: str


class ConsistencyAnswer(ProofAnswer):
    """That the tree of `size` events continues the one of `old_size`."""

    old_size: int


class VerifyBody(Body):
    """Heads that were kept elsewhere, if there are any."""

    head: Annotated[str, Field(max_length=4096)] | None = None
    heads: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=1000)] = Field(
        default_factory=list
    )


class VerifyAnswer(Answer):
    """`intact`, or the first event that does not fit and why."""

    intact: bool
    events: int
    root: str | None
    broken_at: int | None
    reason: str | None
    purged: int = 0
    """Events of which the leaf hashes alone are left."""


class VerifyProgress(Answer):
    """A line of `POST /v1/audit/verify?progress=true`; the last one has the verdict."""

    events: int
    total: int
    verdict: VerifyAnswer | None = None


class HoldBody(Body):
    """What is held, and why. A caller of one tenant holds that tenant's events."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [{"since": "2026-01-01T00:00:00Z", "reason": "matter 2026-17"}]
        },
    )

    tenant: ComponentIdText | None = None
    """None: every event of the installation."""
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    reason: Annotated[str, Field(min_length=1, max_length=1024)]


class HoldAnswer(Answer):
    """A legal hold. It stands until it is released."""

    id: str
    tenant: str | None
    since: str | None
    until: str | None
    reason: str
    placed_by: str
    placed_at: str
    released_by: str | None
    released_at: str | None


class HoldPage(Answer):
    """Some legal holds."""

    items: list[HoldAnswer]
    next_cursor: str | None


class ReportAnswer(Answer):
    """What happened on one day (UTC). Both of the first two are to be 0."""

    day: str
    tenant: str | None
    cross_tenant_hits: int
    accesses_after_revocation: int
    denied: int
    denials: list[DenialAnswer]
    alarms: int
    holds: int
    oldest_unacknowledged: UnacknowledgedAnswer | None
    tree_size: int | None
    last_head: HeadAnswer | None


class UnacknowledgedAnswer(Answer):
    """The oldest entry of the log that a live sidecar has not fenced yet."""

    epoch: str
    seq: int
    at: str
    kind: str
    sidecar: str
