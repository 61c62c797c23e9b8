"""The invalidation log: what its entries say and how they chain.

- `seq` starts at 1 in each epoch and has no gaps; commit order is seq order.
- An entry travels as a compact JWS whose payload is its canonical JSON. Its hash is SHA-256 of
  that payload; `prev` is the hash of the entry before, `genesis(epoch)` for the first.
- An entry retires components, or a subject's grants, or every grant of a tenant minted before
  a revision. Whoever holds (epoch, seq, hash) can tell a gap, a step back and a fork.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from strongroom.canonical import canonical_json
from strongroom.identity import ComponentId


class InvalidationKind(StrEnum):
    """What an entry retires."""

    COMPONENTS = "components"
    SUBJECT = "subject"
    TENANT_REVISION = "tenant_revision"
    SIDECAR = "sidecar"
    EPOCH = "epoch"
    """First entry of an epoch: retires nothing, so that every log has a signed head."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. Fields that its kind does not use are empty."""

    epoch: str
    seq: int
    prev: str
    at: str
    """RFC 3339, UTC, whole microseconds."""
    kind: InvalidationKind
    tenant: str = ""
    components: tuple[ComponentId, ...] = ()
    subject: str = ""
    """Grants of this subject minted at a seq below this entry's are dead."""
    min_revision: int = 0
    """Grants of the tenant with a lower revision are dead."""
    sidecar: str = ""

    def payload(self) -> bytes:
        """Canonical JSON: what is signed and hashed."""
        return canonical_json(msgspec.to_builtins(self))

    def hash(self) -> str:
        """SHA-256 of the payload, hexadecimal."""
        return hashlib.sha256(self.payload()).hexdigest()


class LogHead(msgspec.Struct, frozen=True):
    """A position in the log. `seq` 0 with the genesis hash is an empty epoch."""

    epoch: str
    seq: int
    hash: str


def genesis(epoch: str) -> str:
    """The `prev` of an epoch's first entry."""
    return hashlib.sha256(b"strongroom/log/v1" + epoch.encode()).hexdigest()
