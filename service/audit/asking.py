"""Who asks, for what, from where on, and as what: what the routes of every question share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from policy.permissions import Permission
from service.audit import export
from service.audit.events import Category
from service.audit.export import Format
from service.audit.questions import Filter
from service.audit.schemas import EventAnswer, EventPage
from service.audit.search import Position, Search, find
from service.auth.actor import Actor
from service.auth.errors import Forbidden
from service.auth.scope import in_scope, permitted
from service.cursors import CursorQuery, ListingDep
from service.runtime import Runtime
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

PAGE_MAX = 1000
_EXPORT_PAGE = 1000
Reader = Annotated[Actor, Depends(permitted(Permission.AUDIT_READ))]
Text = Annotated[str | None, Query(max_length=256)]
TenantQuery = Annotated[
    str | None, Query(pattern="^[0-9a-f]{32}$", description="None: every tenant you may see.")
]
Since = Annotated[AwareDatetime | None, Query(description="From this moment on.")]
Until = Annotated[AwareDatetime | None, Query(description="Before this moment.")]
FormatQuery = Annotated[
    Format,
    Query(
        alias="format",
        description="`json` is a page; every other format is all of it, streamed.",
    ),
]
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            export.MEDIA_TYPES[each]: {"schema": {"type": "string"}}
            for each in Format
            if each is not Format.JSON
        }
    }
}
"""What an answer may be besides a page, for the OpenAPI document."""


def tenant_of(actor: Actor, tenant: str | None) -> ComponentId | None:
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
    category: Category | None = None,
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
        tenant=tenant_of(actor, tenant),
        category=category,
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
Order = Literal["asc", "desc", "chain"]


@dataclass(frozen=True, slots=True)
class EventPaging:
    """At most `limit` events after `place`; `cursor` makes a place into one."""

    limit: int
    place: bytes | None
    order: Order
    cursor: Callable[[bytes], str]
    format: Format


async def _paging(
    listing: ListingDep,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX, description="Events in one page.")] = 100,
    cursor: CursorQuery = None,
    order: Annotated[
        Order,
        Query(description="By the time of the event, either way; or in the order of the chain."),
    ] = "asc",
    form: FormatQuery = Format.JSON,
) -> EventPaging:
    return EventPaging(limit, listing.place(cursor), order, listing.cursor, form)


EventPagingDep = Annotated[EventPaging, Depends(_paging)]


async def answer(
    runtime: Runtime, actor: Actor, question: str, search: Search, paging: EventPaging
) -> EventPage | Response:
    """A page of what was found, or all of it as a stream."""
    if paging.order == "chain":
        if search.candidates is not None:
            raise Misuse("this is found by time alone", field="order", limit="asc, desc")
        search = Search(search.conditions, None, in_chain_order=True)
    if paging.format is not Format.JSON:
        return await stream(runtime, actor, question, search, paging)
    after = None if paging.place is None else Position.decode(paging.place)
    async with runtime.sessions() as session:
        found = await find(
            session, search, after, paging.limit, newest_first=paging.order == "desc"
        )
    cursor = None if found.last is None else paging.cursor(found.last.encode())
    return EventPage(items=[EventAnswer.of(event) for event in found.events], next_cursor=cursor)


async def stream(
    runtime: Runtime, actor: Actor, question: str, search: Search, paging: EventPaging
) -> StreamingResponse:
    """Everything that was found. The export is itself an event."""
    export.check(paging.format)
    async with runtime.changes.begin(actor) as change:
        await change.audit(
            "audit.exported",
            tenant=actor.tenant,
            details={"question": question, "format": paging.format.value},
        )
    batches = _batches(runtime, search, newest_first=paging.order == "desc")
    return export.response(paging.format, question, export.of_events(paging.format, batches))


async def _batches(
    runtime: Runtime, search: Search, *, newest_first: bool
) -> AsyncIterator[list[EventAnswer]]:
    after: Position | None = None
    while True:
        # A session a page: a slow reader holds no transaction open.
        async with runtime.sessions() as session:
            found = await find(session, search, after, _EXPORT_PAGE, newest_first=newest_first)
        yield [EventAnswer.of(event) for event in found.events]
        if found.last is None:
            return
        after = found.last
