"""The chain of a sidecar's audit spool: one definition for who writes it and who checks it.

Events are counted from `FIRST_COUNT` without a gap. `prev` of each is the SHA-256 of the
canonical JSON of the event before, `genesis(spool)` for the first.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Final

from strongroom.canonical import canonical_json
from strongroom.control import SpoolEvent

FIRST_COUNT: Final = 1
_FIELDS: Final = tuple(each.name for each in fields(SpoolEvent))


def genesis(spool: str) -> str:
    """The `prev` of a spool's first event."""
    return hashlib.sha256(b"strongroom/spool/v1" + spool.encode()).hexdigest()


def event_hash(event: SpoolEvent) -> str:
    """What the next event's `prev` must be."""
    return hashlib.sha256(event_json(event, event.count, event.prev)).hexdigest()


def event_json(event: SpoolEvent, count: int, prev: str) -> bytes:
    """The canonical JSON of `event` as number `count`, after the event whose hash is `prev`."""
    message = {name: getattr(event, name) for name in _FIELDS}
    message["count"], message["prev"] = count, prev
    return canonical_json(message)
