"""Taking a sidecar's audit spool into the audit chain.

The spool is a counted hash chain: `prev` is the SHA-256 of the canonical JSON of the event
before, the spool's genesis for the first (`strongroom.spool`). Each event is taken
once. What does not fit is taken all the same, since it is evidence, and raises an alarm:
a gap, a fork, a spool that began anew, a tenant that the sidecar is not enrolled for.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import func, select

from service.changes import Change
from service.log.chain import rfc3339
from service.sidecars.models import Spool
from service.sidecars.store import Enrolled
from strongroom.control import IntakeRequest, SpoolEvent
from strongroom.errors import Misuse
from strongroom.spool import FIRST_COUNT, event_hash, genesis

EVENTS_MAX: Final = 1000
_COUNT_MAX: Final = 2**62
_SPOOL_ID = re.compile(r"[0-9A-Za-z_-]{8,64}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_REFERENCE = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_TEXT_MAX: Final = 256


async def take(change: Change, sidecar: Enrolled, request: IntakeRequest) -> int:
    """Take the events that are new; returns the first count that was not taken."""
    if len(request.events) > EVENTS_MAX:
        raise Misuse("too many events at once", field="events", limit=EVENTS_MAX)
    if _SPOOL_ID.fullmatch(request.spool) is None:
        raise Misuse("a spool id is 8 to 64 of A-Z a-z 0-9 _ -", field="spool", limit=64)
    spool = await _spool(change, sidecar, request.spool)
    for number, event in enumerate(request.events):
        _check(event, number)
        if event.count < spool.next_count:
            continue
        if event.count > spool.next_count:
            await _alarm(
                change,
                sidecar,
                "spool_gap",
                {"spool": spool.spool, "expected": spool.next_count, "got": event.count},
            )
        elif event.prev != spool.prev:
            await _alarm(
                change, sidecar, "spool_fork", {"spool": spool.spool, "count": event.count}
            )
        await _record(change, sidecar, spool.spool, event)
        spool.next_count, spool.prev = event.count + 1, event_hash(event)
    await change.session.flush()
    return spool.next_count


async def _spool(change: Change, sidecar: Enrolled, name: str) -> Spool:
    known = await change.session.get(Spool, (sidecar.id, name), with_for_update=True)
    if known is not None:
        return known
    earlier = await change.session.scalar(
        select(func.count()).select_from(Spool).where(Spool.sidecar == sidecar.id)
    )
    if earlier:
        await _alarm(change, sidecar, "spool_new", {"spool": name, "earlier": earlier})
    spool = Spool(sidecar=sidecar.id, spool=name, next_count=FIRST_COUNT, prev=genesis(name))
    change.session.add(spool)
    return spool


def _check(event: SpoolEvent, number: int) -> None:
    where = f"events[{number}]"
    if not FIRST_COUNT <= event.count <= _COUNT_MAX:
        raise Misuse("a count starts at 1", field=f"{where}.count", limit=FIRST_COUNT)
    for name in ("kind", "outcome"):
        if _WORD.fullmatch(getattr(event, name)) is None:
            raise Misuse(f"{name} is one lowercase word", field=f"{where}.{name}", limit=32)
    for name in ("reason", "tenant", "subject", "request", "grant", "tier", "epoch", "engine"):
        if len(getattr(event, name)) > _TEXT_MAX:
            raise Misuse(f"{name} is too long", field=f"{where}.{name}", limit=_TEXT_MAX)
    for namespace in event.namespaces:
        if _REFERENCE.fullmatch(namespace) is None:
            raise Misuse("not a namespace id", field=f"{where}.namespaces", limit=64)


async def _record(change: Change, sidecar: Enrolled, spool: str, event: SpoolEvent) -> None:
    foreign = bool(event.tenant) and not sidecar.may_lease(event.tenant)
    if foreign:
        await _alarm(change, sidecar, "foreign_tenant", {"spool": spool, "count": event.count})
    told = _tenant(event.tenant) if not foreign else None
    await change.audit(
        f"access.{event.kind}",
        tenant=told,
        subject=event.subject,
        target=event.request,
        outcome=event.outcome,
        reason=event.reason,
        details={
            "spool": spool,
            "count": event.count,
            "grant": event.grant,
            "tokens": event.tokens,
            "tier": event.tier,
            "bytes": event.bytes,
            "epoch": event.epoch,
            "seq": event.seq,
            "engine": event.engine,
        }
        | ({"tenant": event.tenant} if told is None and event.tenant else {}),
        references=event.namespaces,
        occurred_at=_moment(event.at),
    )


def _tenant(text: str) -> str | None:
    return text if len(text) == 32 and _REFERENCE.fullmatch(text) else None


def _moment(text: str) -> str:
    """The node's time in our form; empty, which is the time of intake, if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return ""
    return rfc3339(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


async def _alarm(
    change: Change, sidecar: Enrolled, what: str, details: dict[str, str | int]
) -> None:
    await change.audit(
        f"alarm.{what}", target=sidecar.id, outcome="alarm", reason=what, details=details
    )
