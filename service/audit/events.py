"""What an audit event says, and its one canonical form.

An event's hash is the RFC 9162 leaf hash of its canonical JSON, which holds the hash of the
event before: one value is the chain's link and the tree's leaf. Details hold names, numbers
and ids, never secrets, tokens or plaintext.

An event's category follows from what it says. It is stored beside it so that the questions find
their events by an index, and is checked when the chain is verified.
"""

from __future__ import annotations

import json.encoder
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from policy.transparency import leaf_hash
from strongroom.canonical import canonical_json

ACCESS_PREFIX: Final = "access."
KEY_PREFIX: Final = "key."
KEY_LEASED: Final = "key.leased"
GRANT_ISSUED: Final = "grant.issued"
SERVED_OUTCOMES: Final = frozenset(("hit", "stored", "ok"))
_DENIED_OUTCOMES: Final = frozenset(("denied", "refused"))
_PERMISSION_REASONS: Final = frozenset(
    ("permission", "identity", "revoked", "lease", "expired", "prompt")
)
_quoted = json.encoder.encode_basestring


class Category(StrEnum):
    """What an event is to the questions. Each event has one."""

    SERVED = "served"
    """An access that gave or took something."""
    MISSED = "missed"
    """An access that did not, for a reason that is no denial."""
    DENIED = "denied"
    KEY = "key"
    """A key was used: leased, rotated, destroyed."""
    GRANT = "grant"
    ALARM = "alarm"
    CONTROL = "control"


@lru_cache(maxsize=4096)
def category_of(kind: str, outcome: str, reason: str) -> Category:
    """The category of an event that says this."""
    if outcome == "alarm":
        return Category.ALARM
    is_access = kind.startswith(ACCESS_PREFIX)
    if outcome in _DENIED_OUTCOMES or (
        is_access and outcome == "miss" and reason in _PERMISSION_REASONS
    ):
        return Category.DENIED
    if is_access:
        return Category.SERVED if outcome in SERVED_OUTCOMES else Category.MISSED
    if kind.startswith(KEY_PREFIX):
        return Category.KEY
    return Category.GRANT if kind == GRANT_ISSUED else Category.CONTROL


def encode_event(
    *,
    actor: str,
    actor_kind: str,
    at: str,
    details: str,
    kind: str,
    occurred_at: str,
    outcome: str,
    prev: str,
    reason: str,
    references: str,
    seq: int,
    subject: str,
    target: str,
    tenant: str,
) -> bytes:
    """The event's canonical JSON. `details` and `references` are canonical JSON already.

    Written out by hand, since verifying a log encodes every event of it. That it equals
    `canonical_json` is a test.
    """
    quoted = _quoted
    return (
        f'{{"actor":{quoted(actor)},"actor_kind":{quoted(actor_kind)},"at":{quoted(at)},'
        f'"details":{details},"kind":{quoted(kind)},"occurred_at":{quoted(occurred_at)},'
        f'"outcome":{quoted(outcome)},"prev":{quoted(prev)},"reason":{quoted(reason)},'
        f'"references":{references},"seq":{seq},"subject":{quoted(subject)},'
        f'"target":{quoted(target)},"tenant":{quoted(tenant)}}}'
    ).encode()


def encode_references(references: tuple[str, ...] | list[str]) -> str:
    """A canonical JSON list of ids, which need no escapes."""
    return '["' + '","'.join(references) + '"]' if references else "[]"


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
        draft = self.draft
        return encode_event(
            actor=draft.actor,
            actor_kind=draft.actor_kind,
            at=self.at,
            details=draft.details,
            kind=draft.kind,
            occurred_at=draft.occurred_at,
            outcome=draft.outcome,
            prev=self.prev,
            reason=draft.reason,
            references=encode_references(draft.references),
            seq=self.seq,
            subject=draft.subject,
            target=draft.target,
            tenant=draft.tenant or "",
        )

    @property
    def category(self) -> Category:
        """What it is to the questions."""
        return category_of(self.draft.kind, self.draft.outcome, self.draft.reason)

    def hash(self) -> str:
        """The event's leaf hash, hexadecimal."""
        return leaf_hash(self.payload()).hex()


def encode_details(details: Mapping[str, Any] | None) -> str:
    """Details as they are stored."""
    return canonical_json(details or {}).decode()
