"""The questions of compliance over HTTP. A caller of one tenant sees that tenant's events alone.

Each answers a page, or with `format` everything as a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import StreamingResponse

from service.audit import export, questions
from service.audit.asking import (
    STREAMS,
    EventPaging,
    EventPagingDep,
    FilterDep,
    FormatQuery,
    Reader,
    TenantQuery,
    answer,
    stream,
    tenant_of,
)
from service.audit.events import Category
from service.audit.export import Format
from service.audit.report import report_of
from service.audit.schemas import (
    DenialAnswer,
    DenialsAnswer,
    DerivedAnswer,
    DerivedPage,
    EventPage,
    ReportAnswer,
)
from service.audit.search import Search
from service.revocation import store as revocations
from service.runtime import Runtime, RuntimeDep

router = APIRouter(prefix="/v1/audit", tags=["audit"])

_EXPORT_PAGE = 1000
Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.get("/events", summary="Read events", response_model=EventPage, responses=STREAMS)
async def read_events(
    runtime: RuntimeDep, actor: Reader, wanted: FilterDep, paging: EventPagingDep
) -> EventPage | Response:
    """Those that fit every filter, in order. A `kind` that ends in a dot is a prefix."""
    return await answer(runtime, actor, "events", wanted.search(), paging)


@router.get(
    "/events.jsonl",
    summary="Export events",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
async def export_events(runtime: RuntimeDep, actor: Reader, wanted: FilterDep) -> StreamingResponse:
    """The same as JSON Lines, all of them, in the order of the chain where no id is asked for."""
    search = wanted.search()
    if search.candidates is None:
        search = Search(search.conditions, None, in_chain_order=True)
    paging = EventPaging(1, None, "asc", lambda _: "", Format.JSONL)
    return await stream(runtime, actor, "events", search, paging)


@router.get("/accesses", summary="Who accessed this?", response_model=EventPage, responses=STREAMS)
async def who_accessed(
    runtime: RuntimeDep,
    actor: Reader,
    wanted: FilterDep,
    paging: EventPagingDep,
    document: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")] = None,
) -> EventPage | Response:
    """Grants, key leases and accesses of a tenant or of one document (or one version of it),
    between two moments.
    """
    candidates = None
    if document is not None:
        async with runtime.sessions() as session:
            versions = await questions.versions_of(session, document, wanted.tenant)
            candidates = await questions.depending_on(session, versions)
    search = wanted.search(candidates).also(questions.accesses())
    return await answer(runtime, actor, "accesses", search, paging)


@router.get("/key-uses", summary="Who used this key?", response_model=EventPage, responses=STREAMS)
async def who_used_key(
    runtime: RuntimeDep,
    actor: Reader,
    wanted: FilterDep,
    paging: EventPagingDep,
    key: Annotated[
        str | None,
        Query(
            pattern="^([0-9a-f]{32}|[0-9a-f]{64})$",
            description="A component's or a namespace's id; without it, every key's.",
        ),
    ] = None,
) -> EventPage | Response:
    """Leases of a namespace's key, and what was done with a component's secret or a key that wraps
    it.
    """
    candidates = None
    if key is not None:
        async with runtime.sessions() as session:
            candidates = await questions.depending_on(session, [key], Category.KEY)
    search = wanted.search(candidates).also(questions.is_category(Category.KEY))
    return await answer(runtime, actor, "key-uses", search, paging)


@router.get(
    "/derived",
    summary="What was derived from this document?",
    response_model=DerivedPage,
    responses=STREAMS,
)
async def derived_from(
    runtime: RuntimeDep,
    actor: Reader,
    document: Annotated[str, Query(pattern="^[0-9a-f]{32}$")],
    paging: EventPagingDep,
    tenant: TenantQuery = None,
) -> DerivedPage | Response:
    """Every namespace that depends on one of its versions, whether it is retired, and by which
    revocation: its certificate is the proof that nothing of it can be read.
    """
    mine = tenant_of(actor, tenant)
    if paging.format is not Format.JSON:
        async with runtime.sessions() as session:
            await questions.versions_of(session, document, mine)
        rows = export.of_rows(paging.format, DerivedAnswer, _derived(runtime, document, mine))
        return export.response(paging.format, "derived", rows)
    after = None if paging.place is None else paging.place.hex()
    async with runtime.sessions() as session:
        versions = await questions.versions_of(session, document, mine)
        found, last = await questions.derived(session, versions, after, paging.limit)
    return DerivedPage(
        items=[DerivedAnswer.of(each) for each in found],
        next_cursor=None if last is None else paging.cursor(bytes.fromhex(last)),
    )


async def _derived(
    runtime: Runtime, document: str, tenant: str | None
) -> AsyncIterator[list[DerivedAnswer]]:
    after: str | None = None
    while True:
        async with runtime.sessions() as session:
            versions = await questions.versions_of(session, document, tenant)
            found, after = await questions.derived(session, versions, after, _EXPORT_PAGE)
        yield [DerivedAnswer.of(each) for each in found]
        if after is None:
            return


@router.get(
    "/revocations/{revocation}/accesses",
    summary="Was it served after its revocation?",
    response_model=EventPage,
    responses=STREAMS,
)
async def accessed_after(
    runtime: RuntimeDep, actor: Reader, revocation: Id, paging: EventPagingDep
) -> EventPage | Response:
    """Served accesses that depended on what was revoked, since it was in force: always none."""
    async with runtime.sessions() as session:
        row = await revocations.get(session, revocation, actor.tenant)
    search = questions.after_revocation(row)
    return await answer(runtime, actor, "after-revocation", search, paging)


@router.get(
    "/denials",
    summary="What was denied, and why?",
    response_model=DenialsAnswer,
    responses=STREAMS,
)
async def denied(
    runtime: RuntimeDep, wanted: FilterDep, form: FormatQuery = Format.JSON
) -> DenialsAnswer | Response:
    """Counted by kind and reason. The events themselves: `category=denied` of the events."""
    async with runtime.sessions() as session:
        found = await questions.denials(session, wanted)
    rows = [DenialAnswer.model_validate(each) for each in found]
    if form is Format.JSON:
        return DenialsAnswer(items=rows)
    return export.response(form, "denials", export.of_rows(form, DenialAnswer, export.once(rows)))


@router.get(
    "/cross-tenant-hits",
    summary="Was one tenant served another's?",
    response_model=EventPage,
    responses=STREAMS,
)
async def cross_tenant_hits(
    runtime: RuntimeDep, actor: Reader, wanted: FilterDep, paging: EventPagingDep
) -> EventPage | Response:
    """Served accesses of a namespace that is not the tenant's own: always none."""
    search = wanted.search(questions.cross_tenant())
    return await answer(runtime, actor, "cross-tenant-hits", search, paging)


@router.get("/report", summary="Read a day's report")
async def daily_report(
    runtime: RuntimeDep,
    actor: Reader,
    day: Annotated[date | None, Query(description="In UTC; without it, today so far.")] = None,
    tenant: TenantQuery = None,
) -> ReportAnswer:
    """Cross-tenant hits and accesses after a revocation, which are to be 0; denials by reason; the
    oldest entry of the log that a sidecar has not acknowledged.
    """
    wanted = day or datetime.now(UTC).date()
    async with runtime.database.snapshots() as session:
        return await report_of(session, wanted, tenant_of(actor, tenant))
