"""The invalidation log over HTTP, for auditors. Sidecars follow it by their own routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.errors import Forbidden
from service.auth.scope import permitted
from service.log import store
from service.runtime import RuntimeDep
from service.schemas import Answer

router = APIRouter(prefix="/v1/log", tags=["log"])

_PAGE_MAX = 1000


class LogAnswer(Answer):
    """Entries as signed JWS, in order, and where the log stands."""

    epoch: str
    head_seq: int
    head_hash: str
    entries: list[str] = Field(examples=[["eyJhbGciOi..."]])


@router.get("", summary="Read the invalidation log")
async def read_log(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.LOG_READ))],
    epoch: Annotated[
        str | None, Query(pattern="^[0-9a-f]{32}$", description="None: the one in force.")
    ] = None,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=_PAGE_MAX)] = 100,
) -> LogAnswer:
    """Each entry chains to the one before by its hash, from the epoch's first on."""
    if actor.tenant is not None:
        raise Forbidden("the log names every tenant", field="tenant")
    async with runtime.sessions() as session:
        head = await store.head(session)
        entries = await store.page(session, epoch or head.epoch, after, limit)
    return LogAnswer(
        epoch=head.epoch,
        head_seq=head.seq,
        head_hash=head.hash,
        entries=[entry.jws for entry in entries],
    )
