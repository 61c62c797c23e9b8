"""The chain of a sidecar's audit spool: one definition for who writes it and who checks it.

Events are counted from `FIRST_COUNT` without a gap. `prev` of each is the SHA-256 of the
canonical JSON of the event before, `genesis(spool)` for the first.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from strongroom.control import SpoolEvent

FIRST_COUNT: Final = 1
_encode: Final = msgspec.json.Encoder().encode


class _Line(msgspec.Struct, frozen=True):
    """An event in the order of canonical JSON, so that encoding it makes canonical bytes.

    Its own form of `strongroom.canonical.canonical_json`, which is ten times slower, because an
    event is written before each verdict; tests hold the two together.
    """

    at: str
    bytes: int
    count: int
    engine: str
    epoch: str
    grant: str
    kind: str
    namespaces: list[str]
    outcome: str
    prev: str
    reason: str
    request: str
    seq: int
    subject: str
    tenant: str
    tier: str
    tokens: int


def genesis(spool: str) -> str:
    """The `prev` of a spool's first event."""
    return hashlib.sha256(b"strongroom/spool/v1" + spool.encode()).hexdigest()


def event_hash(event: SpoolEvent) -> str:
    """What the next event's `prev` must be."""
    return hashlib.sha256(event_json(event, event.count, event.prev)).hexdigest()


def event_json(event: SpoolEvent, count: int, prev: str) -> bytes:
    """The canonical JSON of `event` as number `count`, after the event whose hash is `prev`."""
    return _encode(
        _Line(
            event.at,
            event.bytes,
            count,
            event.engine,
            event.epoch,
            event.grant,
            event.kind,
            event.namespaces,
            event.outcome,
            prev,
            event.reason,
            event.request,
            event.seq,
            event.subject,
            event.tenant,
            event.tier,
            event.tokens,
        )
    )
