"""Heads, proofs and verification over HTTP: about the chain as a whole, for the installation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from policy.audit_heads import AuditHeadClaims, verify_head
from service.audit import store
from service.audit.asking import Keeper
from service.audit.schemas import (
    ConsistencyAnswer,
    HeadAnswer,
    HeadPage,
    InclusionAnswer,
    VerifyAnswer,
    VerifyBody,
    VerifyProgress,
)
from service.audit.signed import SignedHead
from service.audit.verify import Broken, Intact, Progress, verify_chain
from service.auth.actor import Actor
from service.cursors import ListingDep
from service.http_page import PagingDep
from service.runtime import Runtime, RuntimeDep
from strongroom.errors import Missing, Misuse

_LINES_MAX = 64
router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.post("/heads", status_code=HTTPStatus.CREATED, summary="Sign a head")
async def sign_head(runtime: RuntimeDep, keeper: Keeper) -> HeadAnswer:
    """The tree as it is now, signed: keep it where the database's keeper cannot reach it."""
    async with runtime.changes.begin(keeper) as change:
        head = await store.sign_head(change.session, runtime.signer, change.at)
        await change.audit("audit.head_signed", details={"size": head.size})
    return head_answer(head)


@router.get("/heads", summary="List signed heads")
async def list_heads(
    runtime: RuntimeDep, keeper: Keeper, paging: PagingDep, listing: ListingDep
) -> HeadPage:
    """Every head that was signed, the smallest tree first."""
    del keeper
    after = -1 if paging.place is None else int.from_bytes(paging.place)
    async with runtime.sessions() as session:
        heads = await store.heads_after(session, after, paging.limit + 1)
    more, heads = len(heads) > paging.limit, heads[: paging.limit]
    return HeadPage(
        items=[head_answer(head) for head in heads],
        next_cursor=listing.cursor(heads[-1].size.to_bytes(8)) if more else None,
    )


@router.get("/heads/latest", summary="Read the latest signed head")
async def latest_head(runtime: RuntimeDep, keeper: Keeper) -> HeadAnswer:
    """Of the largest tree that was signed."""
    del keeper
    async with runtime.sessions() as session:
        head = await store.latest_head(session)
    if head is None:
        raise Missing("no head was signed yet", field="head")
    return head_answer(head)


@router.get("/proofs/inclusion", summary="Prove that an event is in the tree")
async def prove_inclusion(
    runtime: RuntimeDep,
    keeper: Keeper,
    seq: Annotated[int, Query(ge=0)],
    size: Annotated[int, Query(ge=1)],
) -> InclusionAnswer:
    """RFC 9162 section 2.1.3, for the tree of `size` events. A purged event has its proof too."""
    del keeper
    async with runtime.sessions() as session:
        await _has_size(runtime, size)
        path = await store.inclusion_proof(session, seq, size)
        leaf = await store.leaf(session, seq)
    return InclusionAnswer(
        size=size, index=seq, leaf=leaf.hex(), path=[step.hex() for step in path]
    )


@router.get("/proofs/consistency", summary="Prove that the tree only grew")
async def prove_consistency(
    runtime: RuntimeDep,
    keeper: Keeper,
    old_size: Annotated[int, Query(ge=0)],
    size: Annotated[int, Query(ge=0)],
) -> ConsistencyAnswer:
    """RFC 9162 section 2.1.4, between two sizes."""
    del keeper
    async with runtime.sessions() as session:
        await _has_size(runtime, size)
        path = await store.consistency_proof(session, old_size, size)
    return ConsistencyAnswer(size=size, old_size=old_size, path=[step.hex() for step in path])


@router.post(
    "/verify",
    summary="Verify the chain",
    response_model=VerifyAnswer,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
async def verify(
    runtime: RuntimeDep,
    keeper: Keeper,
    body: VerifyBody,
    progress: Annotated[
        bool, Query(description="Answer JSON Lines: how far it is, the verdict last.")
    ] = False,
) -> VerifyAnswer | Response:
    """Recompute every event's hash, the chain and the tree, and hold them against the signed
    heads, and against those that were kept elsewhere if they are given.
    """
    given = body.heads if body.head is None else [body.head, *body.heads]
    kept = [verify_head(jws, runtime.verifier) for jws in given]
    if progress:
        return StreamingResponse(_progress(runtime, keeper, kept), media_type="application/jsonl")
    return await _verified(runtime, keeper, kept, lambda _done, _of: None)


async def _verified(
    runtime: Runtime, keeper: Actor, kept: list[AuditHeadClaims], progress: Progress
) -> VerifyAnswer:
    async with runtime.database.snapshots() as session:
        verdict = await verify_chain(session, runtime.verifier, kept, progress)
    async with runtime.changes.begin(keeper) as change:
        await change.audit(
            "audit.verified", outcome="ok" if isinstance(verdict, Intact) else "alarm"
        )
    match verdict:
        case Intact(events, root, _, purged):
            return VerifyAnswer(
                intact=True,
                events=events,
                root=root,
                broken_at=None,
                reason=None,
                purged=purged,
            )
        case Broken(seq, reason):
            return VerifyAnswer(intact=False, events=seq, root=None, broken_at=seq, reason=reason)


async def _progress(
    runtime: Runtime, keeper: Actor, kept: list[AuditHeadClaims]
) -> AsyncIterator[str]:
    """Lines as the verification goes on. Whoever goes away ends it."""
    lines: asyncio.Queue[VerifyProgress | None] = asyncio.Queue(_LINES_MAX)

    def told(done: int, total: int) -> None:
        # A reader that is slower than the verification misses lines, never the verdict.
        if not lines.full():
            lines.put_nowait(VerifyProgress(events=done, total=total))

    async def work() -> None:
        try:
            verdict = await _verified(runtime, keeper, kept, told)
            await lines.put(
                VerifyProgress(events=verdict.events, total=verdict.events, verdict=verdict)
            )
        finally:
            await lines.put(None)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        while (line := await lines.get()) is not None:
            yield line.model_dump_json() + "\n"


async def _has_size(runtime: Runtime, size: int) -> None:
    async with runtime.sessions() as session:
        most, _, _ = await store.counter(session)
    if size > most:
        raise Misuse("the tree is not that large", field="size", limit=most)


def head_answer(head: SignedHead) -> HeadAnswer:
    """A head as it is shown."""
    return HeadAnswer(size=head.size, root=head.root, at=head.at, jws=head.jws)
