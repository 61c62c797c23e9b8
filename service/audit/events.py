"""What an audit event says, and its one canonical form.

An event's hash is the RFC 9162 leaf hash of its canonical JSON, which holds the hash of the
event before: one value is the chain's link and the tree's leaf. Details hold names, numbers
and ids, never secrets, tokens or plaintext.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from policy.transparency import leaf_hash
from strongroom.canonical import canonical_json


@dataclass(frozen=True, slots=True)
class Draft:
    """An event before it has its place in the chain. Empty fields say nothing."""

    kind: str
    actor_kind: str
    actor: str
    tenant: str | None = None
    subject: str = ""
    target: str = ""
    outcome: str = "ok"
    reason: str = ""
    details: str = "{}"
    """Canonical JSON."""
    references: tuple[str, ...] = ()
    """Component and namespace ids, sorted."""
    occurred_at: str = ""
    """RFC 3339 in UTC; when a sidecar says that it happened. Empty: when it was recorded."""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One event in its place. `seq` counts from 0; `at` is RFC 3339 in UTC."""

    seq: int
    prev: str
    at: str
    draft: Draft

    def payload(self) -> bytes:
        """Canonical JSON: what is hashed, and shown in a certificate."""
        fields: dict[str, Any] = asdict(self.draft)
        fields["tenant"] = self.draft.tenant or ""
        fields["details"] = json.loads(self.draft.details)
        return canonical_json(fields | {"seq": self.seq, "prev": self.prev, "at": self.at})

    def hash(self) -> str:
        """The event's leaf hash, hexadecimal."""
        return leaf_hash(self.payload()).hex()


def encode_details(details: Mapping[str, Any] | None) -> str:
    """Details as they are stored."""
    return canonical_json(details or {}).decode()
