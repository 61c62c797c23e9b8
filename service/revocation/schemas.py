"""What is sent and seen about revocations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, ConfigDict, Field, JsonValue

from policy.certificates import COMPONENTS_MAX, Finality
from service.revocation import store
from service.revocation.ask import Ask
from service.revocation.models import (
    Axis,
    Revocation,
    RevocationSidecar,
    ScheduledRevocation,
    ScheduleState,
    SidecarState,
)
from service.revocation.schedule import ask_of
from service.revocation.survey import GrantsHit, Survey
from service.schemas import Answer, Body, ComponentIdText

DEADLINE_S_MAX = 300.0
_ID = "0123456789abcdef0123456789abcdef"


_EXAMPLE: dict[str, JsonValue] = {
    "axis": "document",
    "target": _ID,
    "tenant": _ID,
    "reason": "erasure asked for by its author",
}


class AskBody(Body):
    """What to revoke, and why."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    axis: Axis
    target: Annotated[str, Field(min_length=1, max_length=128)]
    """A subject's name (also for a membership), or the id of what is revoked."""
    tenant: ComponentIdText | None = None
    """Whose it is; needed where the caller belongs to no tenant and the axis is a tenant's."""
    group: ComponentIdText | None = None
    """The group of a membership."""
    reason: Annotated[str, Field(min_length=1, max_length=256)]


class RevocationBody(AskBody):
    """What to revoke at once, and how long to wait for the sidecars."""

    wait: bool = True
    """Answer once it is in force, which is within one serving lease."""
    deadline_s: Annotated[float, Field(gt=0, le=DEADLINE_S_MAX)] | None = None
    """Answer 202 after so long at the latest. None: after one serving lease at the latest."""


class ScheduleBody(AskBody):
    """What to revoke later, and when."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [_EXAMPLE | {"at": "2027-01-31T18:00:00+01:00"}]}
    )

    at: AwareDatetime
    """A time to come, with its zone; within ten years."""


class ScheduledAnswer(Answer):
    """A revocation that is to come, or what became of it."""

    id: str
    """Also of the revocation, once it is carried out."""
    axis: Axis
    tenant: str | None
    target: dict[str, str]
    reason: str
    asked_by: str
    created_at: datetime
    due_at: datetime
    state: ScheduleState
    ended_at: datetime | None
    """When it was carried out, cancelled or failed."""
    failure: str
    """Why it failed: `missing`, there was nothing to revoke any more; `conflict`."""
    revocation: str | None
    """Where the revocation is, once it is carried out."""

    @classmethod
    def of(cls, row: ScheduledRevocation) -> ScheduledAnswer:
        """From its row."""
        done = row.state is ScheduleState.CARRIED_OUT
        return cls(
            id=row.id,
            axis=row.axis,
            tenant=row.tenant,
            target=ask_of(row).describe(),
            reason=row.reason,
            asked_by=row.asked_by,
            created_at=row.created_at,
            due_at=row.due_at,
            state=row.state,
            ended_at=row.ended_at,
            failure=row.failure,
            revocation=f"/v1/revocations/{row.id}" if done else None,
        )


class ScheduledPage(Answer):
    """Some scheduled revocations."""

    items: list[ScheduledAnswer]
    next_cursor: str | None


class ConcernedSidecar(Answer):
    """A sidecar that may hold what is revoked, and would be waited for."""

    sidecar: str
    name: str
    leased_at: datetime | None
    """When it last asked whether it may serve; None: never."""


class PreviewAnswer(Answer):
    """What a revocation would take if it were carried out now."""

    axis: Axis
    tenant: str | None
    target: dict[str, str]
    components: list[str]
    """Those whose secrets would be destroyed; empty where they are too many to list."""
    components_total: int
    namespaces: int
    """That can be derived now, and could not be after."""
    subjects: int
    """Who could read it by their groups."""
    grants: GrantsHit
    sidecars: list[ConcernedSidecar]
    blocks: int | None
    """None: unknown."""
    bytes: int | None
    """None: unknown."""
    held_note: str
    """Why they are unknown, or how far they can be believed."""

    @classmethod
    def of(cls, ask: Ask, found: Survey) -> PreviewAnswer:
        """From what was counted."""
        total = len(found.components)
        return cls(
            axis=ask.axis,
            tenant=found.tenant,
            target=ask.describe(),
            components=[*found.components] if total <= COMPONENTS_MAX else [],
            components_total=total,
            namespaces=found.namespaces,
            subjects=found.subjects,
            grants=found.grants,
            sidecars=[
                ConcernedSidecar(sidecar=each.id, name=each.name, leased_at=each.leased_at)
                for each in found.sidecars
            ],
            blocks=None if found.held is None else found.held.blocks,
            bytes=None if found.held is None else found.held.bytes,
            held_note=found.held_note,
        )


class SidecarStandingAnswer(Answer):
    """Where one sidecar stands, and since when."""

    sidecar: str
    name: str
    state: SidecarState
    at: str
    loads_fenced: int
    saves_fenced: int
    namespaces_dropped: int
    bytes_reclaimed: int

    @classmethod
    def of(cls, row: RevocationSidecar, name: str) -> SidecarStandingAnswer:
        """From its row."""
        return cls(
            sidecar=row.sidecar,
            name=name,
            state=row.state,
            at=row.at,
            loads_fenced=row.loads_fenced,
            saves_fenced=row.saves_fenced,
            namespaces_dropped=row.namespaces_dropped,
            bytes_reclaimed=row.bytes_reclaimed,
        )


class ErasureAnswer(Answer):
    """`pending`: due at `at`. `final`: since `at` no backup can bring a secret back."""

    state: Finality
    at: datetime | None


class RevocationAnswer(Answer):
    """A revocation: committed, and perhaps in force."""

    id: str
    axis: Axis
    tenant: str | None
    target: dict[str, str]
    reason: str
    state: str = Field(examples=["committed", "in_force"])
    committed_at: str
    in_force_at: str | None
    epoch: str
    seq: int
    components: list[str]
    """Those destroyed; empty where they are too many to list."""
    components_total: int
    final: ErasureAnswer
    sidecars: list[SidecarStandingAnswer]
    certificate: str
    """Where the certificate is, once it is in force."""

    @classmethod
    def of(
        cls,
        row: Revocation,
        erased: store.Erased,
        standings: Sequence[tuple[RevocationSidecar, str]],
    ) -> RevocationAnswer:
        """From its rows."""
        destroyed = store.components_of(row)
        return cls(
            id=row.id,
            axis=row.axis,
            tenant=row.tenant,
            target=json.loads(row.target),
            reason=row.reason,
            state="committed" if row.effective_at is None else "in_force",
            committed_at=row.committed_at,
            in_force_at=row.effective_at,
            epoch=row.epoch,
            seq=row.seq,
            components=[*destroyed] if len(destroyed) <= COMPONENTS_MAX else [],
            components_total=len(destroyed),
            final=ErasureAnswer(state=erased.state, at=erased.at),
            sidecars=[SidecarStandingAnswer.of(*standing) for standing in standings],
            certificate=f"/v1/revocations/{row.id}/certificate",
        )


class RevocationSummary(Answer):
    """A revocation in a list."""

    id: str
    axis: Axis
    tenant: str | None
    target: dict[str, str]
    reason: str
    committed_at: str
    in_force_at: str | None


class RevocationPage(Answer):
    """Some revocations."""

    items: list[RevocationSummary]
    next_cursor: str | None
