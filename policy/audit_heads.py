"""Signed heads of the audit tree: what an auditor keeps elsewhere, to hold against it later."""

from __future__ import annotations

import msgspec

from policy.signing import Verifier
from strongroom.control import Typ
from strongroom.errors import Refused


class AuditHeadClaims(msgspec.Struct, frozen=True):
    """The tree had `size` events and this root; `hash` is its last event's."""

    size: int
    root: str
    hash: str
    at: str


def verify_head(jws: str, verifier: Verifier) -> AuditHeadClaims:
    """The claims of a signed head; `Refused` for anything else."""
    payload = verifier.verify(Typ.AUDIT_HEAD, jws)
    try:
        return msgspec.json.decode(payload, type=AuditHeadClaims)
    except msgspec.DecodeError as error:
        raise Refused("a signed audit head cannot be read") from error
