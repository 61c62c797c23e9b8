"""Certificates of revocation: their content, and verifying one offline.

A certificate is a JWS of type `Typ.CERTIFICATE`. Whoever holds it and the service's public key
can check, without asking anybody:
- that the service signed it, and signed the log entry and the audit head inside it;
- that the log entry is the one it names, and retires the components that it lists;
- that every sidecar that could have served was fenced or out of its lease;
- that two audit events are in the tree with the signed head: that of the commit, which binds what
  was asked and destroyed, and that of its being in force, which binds where each sidecar stood.

`final.state` stays `pending` until the key-encryption keys that had wrapped the destroyed
secrets are destroyed too; until then a backup of the key table could bring a secret back. A
certificate issued later says `final`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from policy.audit_heads import AuditHeadClaims, verify_head
from policy.signing import Signer, Verifier
from policy.transparency import leaf_hash, verify_inclusion
from strongroom.canonical import canonical_json
from strongroom.control import Typ
from strongroom.errors import Refused, StrongroomError
from strongroom.identity import ComponentId
from strongroom.log import LogEntry

CERTIFICATE_VERSION: Final = 2
EVENT_KIND: Final = "revocation.committed"
IN_FORCE_KIND: Final = "revocation.in_force"
COMPONENTS_MAX: Final = 8192
"""Components that a certificate lists by id; of more it lists none, and only their digest."""


class CertificateInvalid(Refused):
    """The certificate does not prove what it says; the message says why."""

    code = "certificate_invalid"


class Standing(StrEnum):
    """Why a sidecar could not serve any more."""

    FENCED = "fenced"
    LEASE_EXPIRED = "lease_expired"


class Finality(StrEnum):
    """Whether even a backup of the key table could bring a destroyed secret back."""

    NONE = "none"
    """No secret was destroyed."""
    PENDING = "pending"
    FINAL = "final"


class Asked(msgspec.Struct, frozen=True):
    """What was asked for, by whom."""

    axis: str
    tenant: str
    target: dict[str, str]
    reason: str
    by: str


class Erasure(msgspec.Struct, frozen=True):
    """When the erasure is final: due then, or done then. RFC 3339, empty for `none`."""

    state: Finality
    at: str


class SidecarStanding(msgspec.Struct, frozen=True):
    """One sidecar that was enrolled for what was revoked."""

    sidecar: str
    name: str
    state: Standing
    at: str
    loads_fenced: int
    saves_fenced: int
    namespaces_dropped: int
    bytes_reclaimed: int


class EventProof(msgspec.Struct, frozen=True):
    """The audit event's canonical JSON, and the proof that it is in the tree of `head`."""

    event: str
    index: int
    path: tuple[str, ...]
    """RFC 9162 inclusion path, hexadecimal."""
    head: str
    """JWS of type `Typ.AUDIT_HEAD`."""


class CertificateClaims(msgspec.Struct, frozen=True, kw_only=True):
    """The payload. Instants are RFC 3339 in UTC with microseconds."""

    version: int
    id: str
    issuer: str
    issued_at: str
    asked: Asked
    committed_at: str
    in_force_at: str
    epoch: str
    seq: int
    entry: str
    """JWS of the log entry."""
    entry_hash: str
    components: tuple[ComponentId, ...]
    components_total: int
    components_digest: str
    final: Erasure
    sidecars: tuple[SidecarStanding, ...]
    audit: EventProof
    """Of the commit."""
    in_force: EventProof
    """Of its being in force, under the same head."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A certificate that holds, and the signed statements inside it."""

    claims: CertificateClaims
    entry: LogEntry
    event: dict[str, Any]
    head: AuditHeadClaims


def components_digest(components: Iterable[ComponentId]) -> str:
    """SHA-256 over the sorted ids, hexadecimal: stands for a list of any length."""
    ids = sorted(components)
    return hashlib.sha256(b"strongroom/components/v1" + "".join(ids).encode()).hexdigest()


def standings_digest(standings: Iterable[SidecarStanding]) -> str:
    """SHA-256 over where each sidecar stood and since when, hexadecimal.

    Without what may change later: a sidecar's name, and the bytes reclaimed in the background.
    """
    stood = sorted(
        [
            each.sidecar,
            each.state.value,
            each.at,
            each.loads_fenced,
            each.saves_fenced,
            each.namespaces_dropped,
        ]
        for each in standings
    )
    return hashlib.sha256(b"strongroom/standings/v1" + canonical_json({"stood": stood})).hexdigest()


def sign(claims: CertificateClaims, signer: Signer) -> str:
    """The certificate as it is handed out."""
    return signer.sign(Typ.CERTIFICATE, canonical_json(msgspec.to_builtins(claims)))


def verify(certificate: str, verifier: Verifier) -> Verified:
    """What `certificate` proves. Raises `CertificateInvalid`, saying what does not hold."""
    try:
        payload = verifier.verify(Typ.CERTIFICATE, certificate.strip())
    except StrongroomError as error:
        raise CertificateInvalid("it was not signed by a key that you gave") from error
    try:
        claims = msgspec.json.decode(payload, type=CertificateClaims)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise CertificateInvalid("its content cannot be read") from error
    if claims.version != CERTIFICATE_VERSION:
        raise CertificateInvalid(f"its version {claims.version} is not known here")
    entry = _check_entry(claims, verifier)
    _check_components(claims, entry)
    _check_sidecars(claims)
    head = _check_inclusion(claims.audit, verifier)
    if claims.in_force.head != claims.audit.head:
        raise CertificateInvalid("its two audit events are proved under different heads")
    _check_inclusion(claims.in_force, verifier)
    event = _check_event(claims)
    _check_in_force(claims)
    return Verified(claims, entry, event, head)


def _check_entry(claims: CertificateClaims, verifier: Verifier) -> LogEntry:
    try:
        entry = msgspec.json.decode(verifier.verify(Typ.LOG, claims.entry), type=LogEntry)
    except (StrongroomError, msgspec.DecodeError, UnicodeError) as error:
        raise CertificateInvalid("the log entry in it was not signed by this service") from error
    if (entry.epoch, entry.seq) != (claims.epoch, claims.seq):
        raise CertificateInvalid("the log entry in it is at another position")
    if entry.hash() != claims.entry_hash:
        raise CertificateInvalid("the log entry in it has another hash")
    return entry


def _check_components(claims: CertificateClaims, entry: LogEntry) -> None:
    if claims.components or not claims.components_total:
        if len(set(claims.components)) != claims.components_total:
            raise CertificateInvalid("the list of components has another length")
        if components_digest(claims.components) != claims.components_digest:
            raise CertificateInvalid("the list of components does not match its digest")
        if not set(entry.components) <= set(claims.components):
            raise CertificateInvalid("the log entry retires components that are not listed")
    if claims.components_total and not entry.components:
        raise CertificateInvalid("the log entry retires no component")
    if (claims.final.state is Finality.NONE) != (claims.components_total == 0):
        raise CertificateInvalid("its finality does not fit what was destroyed")


def _check_sidecars(claims: CertificateClaims) -> None:
    if len({standing.sidecar for standing in claims.sidecars}) != len(claims.sidecars):
        raise CertificateInvalid("a sidecar is listed twice")
    latest = max((standing.at for standing in claims.sidecars), default=claims.committed_at)
    if claims.in_force_at < max(latest, claims.committed_at):
        raise CertificateInvalid("a sidecar could serve after the time when it was in force")


def _check_inclusion(proof: EventProof, verifier: Verifier) -> AuditHeadClaims:
    try:
        head = verify_head(proof.head, verifier)
        path = [bytes.fromhex(step) for step in proof.path]
        root = bytes.fromhex(head.root)
        verify_inclusion(leaf_hash(proof.event.encode()), proof.index, head.size, path, root)
    except (StrongroomError, ValueError) as error:
        raise CertificateInvalid("its audit event is not in the signed audit tree") from error
    return head


def _check_event(claims: CertificateClaims) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(claims.audit.event)
        details = event["details"]
        bound = {
            "kind": (event["kind"], EVENT_KIND),
            "index": (event["seq"], claims.audit.index),
            "revocation": (event["target"], claims.id),
            "tenant": (event["tenant"], claims.asked.tenant),
            "reason": (event["reason"], claims.asked.reason),
            "axis": (details["axis"], claims.asked.axis),
            "target": (details["target"], claims.asked.target),
            "epoch": (details["epoch"], claims.epoch),
            "seq": (details["seq"], claims.seq),
            "entry": (details["entry_hash"], claims.entry_hash),
            "components": (details["components_digest"], claims.components_digest),
            "count": (details["components_total"], claims.components_total),
            "caller": (details["by"], claims.asked.by),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CertificateInvalid("its audit event cannot be read") from error
    _same(bound, "its audit event")
    return event


def _check_in_force(claims: CertificateClaims) -> None:
    try:
        event: dict[str, Any] = json.loads(claims.in_force.event)
        details = event["details"]
        bound = {
            "kind": (event["kind"], IN_FORCE_KIND),
            "index": (event["seq"], claims.in_force.index),
            "revocation": (event["target"], claims.id),
            "tenant": (event["tenant"], claims.asked.tenant),
            "time": (details["in_force_at"], claims.in_force_at),
            "standing of the sidecars": (
                details["standings_digest"],
                standings_digest(claims.sidecars),
            ),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CertificateInvalid("the audit event of its being in force cannot be read") from error
    _same(bound, "the audit event of its being in force")


def _same(bound: Mapping[str, tuple[object, object]], event: str) -> None:
    for name, (recorded, claimed) in bound.items():
        if recorded != claimed:
            raise CertificateInvalid(f"{event} records another {name}")
