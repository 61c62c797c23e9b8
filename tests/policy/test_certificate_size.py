"""The largest revocation there may be still has an entry and a certificate that verify."""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.certificates import (
    CERTIFICATE_VERSION,
    COMPONENTS_MAX,
    Asked,
    CertificateClaims,
    Erasure,
    EventProof,
    Finality,
    SidecarStanding,
    Standing,
    components_digest,
    sign,
)
from policy.signing import Signer, Verifier
from strongroom.canonical import canonical_json
from strongroom.control import Typ
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry, genesis

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
VERIFIER = Verifier({SIGNER.kid: SIGNER.public_key})
AT = "2026-01-31T12:00:00.000000Z"
SIDECARS = 256


def test_a_certificate_over_as_many_components_as_there_may_be_is_signed_and_verifies() -> None:
    components = tuple(ComponentId(f"{number:032x}") for number in range(COMPONENTS_MAX))
    entry = LogEntry(
        epoch="e" * 32,
        seq=1,
        prev=genesis("e" * 32),
        at=AT,
        kind=InvalidationKind.COMPONENTS,
        tenant=components[0],
        components=components,
    )
    signed = SIGNER.sign(Typ.LOG, entry.payload())
    assert VERIFIER.verify(Typ.LOG, signed) == entry.payload()
    claims = CertificateClaims(
        version=CERTIFICATE_VERSION,
        id="f" * 32,
        issuer="strongroom",
        issued_at=AT,
        asked=Asked("tenant", components[0], {"tenant": components[0]}, "r" * 256, "operator"),
        committed_at=AT,
        in_force_at=AT,
        epoch=entry.epoch,
        seq=entry.seq,
        entry=signed,
        entry_hash=entry.hash(),
        components=components,
        components_total=len(components),
        components_digest=components_digest(components),
        final=Erasure(Finality.PENDING, AT),
        sidecars=tuple(
            SidecarStanding(
                f"{number:032x}", "n" * 128, Standing.FENCED, AT, 2**31, 2**31, 2**31, 2**53
            )
            for number in range(SIDECARS)
        ),
        audit=EventProof("{}" + " " * 4096, 2**40, ("a" * 64,) * 40, "h" * 1024),
        in_force=EventProof("{}" + " " * 1024, 2**40, ("a" * 64,) * 40, "h" * 1024),
    )
    certificate = sign(claims, SIGNER)
    assert VERIFIER.verify(Typ.CERTIFICATE, certificate) == canonical_json(
        msgspec.to_builtins(claims)
    )
