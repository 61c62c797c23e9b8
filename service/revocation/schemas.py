"""What is sent and seen about revocations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field

from policy.certificates import COMPONENTS_MAX, Finality
from service.revocation import store
from service.revocation.models import Axis, Revocation, RevocationSidecar, SidecarState
from service.schemas import Answer, Body, ComponentIdText

_ID = "0123456789abcdef0123456789abcdef"


class RevocationBody(Body):
    """What to revoke, and why."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "axis": "document",
                    "target": _ID,
                    "tenant": _ID,
                    "reason": "erasure asked for by its author",
                }
            ]
        }
    )

    axis: Axis
    target: Annotated[str, Field(min_length=1, max_length=128)]
    """A subject's name (also for a membership), or the id of what is revoked."""
    tenant: ComponentIdText | None = None
    """Whose it is; needed where the caller belongs to no tenant and the axis is a tenant's."""
    group: ComponentIdText | None = None
    """The group of a membership."""
    reason: Annotated[str, Field(min_length=1, max_length=256)]
    wait: bool = True
    """Answer once it is in force, which is within one serving lease."""


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
