"""The chain of a sidecar's audit spool: one definition for who writes it and who checks it.

Events are counted from `FIRST_COUNT` without a gap. `prev` of each is the SHA-256 of the
canonical JSON of the event before, `genesis(spool)` for the first.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Final

from strongroom.canonical import canonical_json
from strongroom.control import SpoolEvent

FIRST_COUNT: Final = 1


def genesis(spool: str) -> str:
    """The `prev` of a spool's first event."""
    return hashlib.sha256(b"strongroom/spool/v1" + spool.encode()).hexdigest()


def event_hash(event: SpoolEvent) -> str:
    """What the next event's `prev` must be."""
    return hashlib.sha256(canonical_json(asdict(event))).hexdigest()
