"""The audit trail over HTTP. A caller of one tenant sees that tenant's events, and no other's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime
from sqlalchemy import ColumnElement

from policy.audit_heads import verify_head
from policy.permissions import Permission
from service.audit import questions, store
from service.audit.questions import Filter
from service.audit.schemas import (
    ConsistencyAnswer,
    DenialAnswer,
    DenialsAnswer,
    DerivedAnswer,
    DerivedPage,
    EventAnswer,
    EventPage,
    HeadAnswer,
    InclusionAnswer,
    VerifyAnswer,
    VerifyBody,
)
from service.audit.signed import SignedHead
from service.audit.verify import Broken, Intact, verify_chain
from service.auth.actor import Actor
from service.auth.errors import Forbidden
from service.auth.scope import in_scope, permitted
from service.cursors import CursorQuery, ListingDep
from service.revocation import store as revocations
from service.runtime import Runtime, RuntimeDep
from strongroom.errors import Missing, Misuse

router = APIRouter(prefix="/v1/audit", tags=["audit"])

_EXPORT_PAGE = 500
_PAGE_MAX = 1000
Reader = Annotated[Actor, Depends(permitted(Permission.AUDIT_READ))]
Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Text = Annotated[str | None, Query(max_length=256)]
TenantQuery = Annotated[
    str | None, Query(pattern="^[0-9a-f]{32}$", description="None: every tenant you may see.")
]
Since = Annotated[AwareDatetime | None, Query(description="From this moment on.")]
Until = Annotated[AwareDatetime | None, Query(description="Before this moment.")]


def _tenant_of(actor: Actor, tenant: str | None) -> str | None:
    """The tenant whose events are read; None only for callers who belong to none."""
    if tenant is None:
        return actor.tenant
    return in_scope(actor, tenant).tenant


async def _installation(actor: Reader) -> Actor:
    """What is about the chain as a whole is not for one tenant's callers."""
    if actor.tenant is not None:
        raise Forbidden("the chain as a whole belongs to the installation", field="tenant")
    return actor


Keeper = Annotated[Actor, Depends(_installation)]


async def _filter(
    actor: Reader,
    tenant: TenantQuery = None,
    kind: Text = None,
    actor_id: Annotated[str | None, Query(alias="actor", max_length=256)] = None,
    subject: Text = None,
    target: Text = None,
    outcome: Text = None,
    reason: Text = None,
    reference: Annotated[
        str | None, Query(pattern="^([0-9a-f]{32}|[0-9a-f]{64})$", description="An id.")
    ] = None,
    since: Since = None,
    until: Until = None,
) -> Filter:
    return Filter(
        tenant=_tenant_of(actor, tenant),
        kind=kind,
        actor=actor_id,
        subject=subject,
        target=target,
        outcome=outcome,
        reason=reason,
        reference=reference,
        since=since,
        until=until,
    )


FilterDep = Annotated[Filter, Depends(_filter)]


@dataclass(frozen=True, slots=True)
class EventPaging:
    """At most `limit` events after `place`; `cursor` makes a place into one."""

    limit: int
    place: bytes | None
    newest_first: bool
    cursor: Callable[[bytes], str]


async def _paging(
    listing: ListingDep,
    limit: Annotated[int, Query(ge=1, le=_PAGE_MAX, description="Events in one page.")] = 100,
    cursor: CursorQuery = None,
    order: Annotated[Literal["asc", "desc"], Query(description="Of the chain.")] = "asc",
) -> EventPaging:
    return EventPaging(limit, listing.place(cursor), order == "desc", listing.cursor)


EventPagingDep = Annotated[EventPaging, Depends(_paging)]


@router.get("/events", summary="Read events")
async def read_events(runtime: RuntimeDep, wanted: FilterDep, paging: EventPagingDep) -> EventPage:
    """Those that fit every filter, in order. A `kind` that ends in a dot is a prefix."""
    return await _page(runtime, wanted.where(), paging)


@router.get(
    "/events.jsonl",
    summary="Export events",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
async def export_events(runtime: RuntimeDep, actor: Reader, wanted: FilterDep) -> StreamingResponse:
    """The same as JSON Lines, all of them. The export is itself an event."""
    async with runtime.changes.begin(actor) as change:
        await change.audit("audit.exported", tenant=wanted.tenant)
    return StreamingResponse(
        _lines(runtime, wanted.where()),
        media_type="application/jsonl",
        headers={"Content-Disposition": 'attachment; filename="audit.jsonl"'},
    )


@router.get("/accesses", summary="Who accessed this?")
async def who_accessed(
    runtime: RuntimeDep,
    wanted: FilterDep,
    paging: EventPagingDep,
    document: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")] = None,
) -> EventPage:
    """Grants, key leases and accesses of a tenant or of one document (or one version of it),
    between two moments.
    """
    conditions = [questions.accesses(), *wanted.where()]
    if document is not None:
        async with runtime.sessions() as session:
            versions = await questions.versions_of(session, document, wanted.tenant)
        conditions.append(questions.about(versions))
    return await _page(runtime, conditions, paging)


@router.get("/derived", summary="What was derived from this document?")
async def derived_from(
    runtime: RuntimeDep,
    actor: Reader,
    document: Annotated[str, Query(pattern="^[0-9a-f]{32}$")],
    paging: EventPagingDep,
    tenant: TenantQuery = None,
) -> DerivedPage:
    """Every namespace that depends on one of its versions, and whether it is retired."""
    after = None if paging.place is None else paging.place.hex()
    async with runtime.sessions() as session:
        versions = await questions.versions_of(session, document, _tenant_of(actor, tenant))
        found, last = await questions.derived(session, versions, after, paging.limit)
    return DerivedPage(
        items=[DerivedAnswer.of(each) for each in found],
        next_cursor=None if last is None else paging.cursor(bytes.fromhex(last)),
    )


@router.get("/revocations/{revocation}/accesses", summary="Was it served after its revocation?")
async def accessed_after(
    runtime: RuntimeDep, actor: Reader, revocation: Id, paging: EventPagingDep
) -> EventPage:
    """Served accesses that depended on what was revoked, since it was in force: always none."""
    async with runtime.sessions() as session:
        row = await revocations.get(session, revocation, actor.tenant)
    return await _page(runtime, questions.after_revocation(row), paging)


@router.get("/denials", summary="What was denied, and why?")
async def denied(runtime: RuntimeDep, wanted: FilterDep) -> DenialsAnswer:
    """Counted by kind and reason."""
    async with runtime.sessions() as session:
        found = await questions.denials(session, wanted.where())
    return DenialsAnswer(items=[DenialAnswer.model_validate(each) for each in found])


@router.get("/cross-tenant-hits", summary="Was one tenant served another's?")
async def cross_tenant_hits(
    runtime: RuntimeDep, wanted: FilterDep, paging: EventPagingDep
) -> EventPage:
    """Served accesses of a namespace that is not the tenant's own: always none."""
    return await _page(runtime, [*questions.cross_tenant(), *wanted.where()], paging)


@router.post("/heads", status_code=HTTPStatus.CREATED, summary="Sign a head")
async def sign_head(runtime: RuntimeDep, keeper: Keeper) -> HeadAnswer:
    """The tree as it is now, signed: keep it where the database's keeper cannot reach it."""
    async with runtime.changes.begin(keeper) as change:
        head = await store.sign_head(change.session, runtime.signer, change.at)
        await change.audit("audit.head_signed", details={"size": head.size})
    return _head(head)


@router.get("/heads/latest", summary="Read the latest signed head")
async def latest_head(runtime: RuntimeDep, keeper: Keeper) -> HeadAnswer:
    """Of the largest tree that was signed."""
    del keeper
    async with runtime.sessions() as session:
        head = await store.latest_head(session)
    if head is None:
        raise Missing("no head was signed yet", field="head")
    return _head(head)


@router.get("/proofs/inclusion", summary="Prove that an event is in the tree")
async def prove_inclusion(
    runtime: RuntimeDep,
    keeper: Keeper,
    seq: Annotated[int, Query(ge=0)],
    size: Annotated[int, Query(ge=1)],
) -> InclusionAnswer:
    """RFC 9162 section 2.1.3, for the tree of `size` events."""
    del keeper
    async with runtime.sessions() as session:
        await _has_size(runtime, size)
        path = await store.inclusion_proof(session, seq, size)
        leaf = (await store.event(session, seq)).hash()
    return InclusionAnswer(size=size, index=seq, leaf=leaf, path=[step.hex() for step in path])


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


@router.post("/verify", summary="Verify the chain")
async def verify(runtime: RuntimeDep, keeper: Keeper, body: VerifyBody) -> VerifyAnswer:
    """Recompute every event's hash, the chain and the tree, and hold them against the signed
    heads, and against one that was kept elsewhere if it is given.
    """
    kept = None if body.head is None else verify_head(body.head, runtime.verifier)
    async with runtime.database.snapshots() as session:
        verdict = await verify_chain(session, runtime.verifier, kept)
    async with runtime.changes.begin(keeper) as change:
        await change.audit(
            "audit.verified", outcome="ok" if isinstance(verdict, Intact) else "alarm"
        )
    match verdict:
        case Intact(events, root, _):
            return VerifyAnswer(intact=True, events=events, root=root, broken_at=None, reason=None)
        case Broken(seq, reason):
            return VerifyAnswer(intact=False, events=seq, root=None, broken_at=seq, reason=reason)


async def _page(
    runtime: Runtime, conditions: Sequence[ColumnElement[bool]], paging: EventPaging
) -> EventPage:
    after = None if paging.place is None else int.from_bytes(paging.place)
    async with runtime.sessions() as session:
        found = await questions.events(
            session, conditions, after, paging.limit, newest_first=paging.newest_first
        )
    cursor = None
    if found.last_seq is not None:
        cursor = paging.cursor(found.last_seq.to_bytes(8))
    return EventPage(items=[EventAnswer.of(event) for event in found.events], next_cursor=cursor)


async def _lines(runtime: Runtime, conditions: Sequence[ColumnElement[bool]]) -> AsyncIterator[str]:
    after: int | None = None
    while True:
        # A session a page: a slow reader holds no transaction open.
        async with runtime.sessions() as session:
            found = await questions.events(session, conditions, after, _EXPORT_PAGE)
        for event in found.events:
            yield EventAnswer.of(event).model_dump_json() + "\n"
        if found.last_seq is None:
            return
        after = found.last_seq


async def _has_size(runtime: Runtime, size: int) -> None:
    async with runtime.sessions() as session:
        most, _, _ = await store.counter(session)
    if size > most:
        raise Misuse("the tree is not that large", field="size", limit=most)


def _head(head: SignedHead) -> HeadAnswer:
    return HeadAnswer(size=head.size, root=head.root, at=head.at, jws=head.jws)
