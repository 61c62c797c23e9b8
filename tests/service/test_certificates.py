"""A certificate verifies offline; one that was changed, or says too much, does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from policy.audit_heads import verify_head
from policy.certificates import (
    CertificateClaims,
    CertificateInvalid,
    Finality,
    SidecarStanding,
    Standing,
    sign,
    verify,
)
from policy.signing import Signer, Verifier
from strongroom.canonical import canonical_json
from strongroom.control import Typ
from tests.service.evidence import new_signer
from tests.service.house import Service
from tests.service.sidecar_party import enrolled
from tests.service.test_sidecars import World


async def certificate_of(service: Service) -> tuple[World, str]:
    world = await World(service).build()
    await enrolled(service, world.tenant)
    answer = await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": "contract ended"},
    )
    response = await service.operator.ask("GET", answer["certificate"])
    assert response.status_code == 200
    return world, response.text


async def test_a_certificate_verifies_with_nothing_but_the_public_key(service: Service) -> None:
    world, text = await certificate_of(service)
    signer = service.runtime.signer
    verified = verify(text, Verifier({signer.kid: signer.public_key}))
    claims = verified.claims
    assert claims.components == (world.document,)
    assert verified.entry.components == (world.document,)
    assert claims.asked.axis == "document_version"
    assert claims.asked.reason == "contract ended"
    assert claims.asked.by == "operator:root"
    assert claims.final.state is Finality.PENDING
    assert claims.final.at > claims.committed_at
    assert [each.state for each in claims.sidecars] == [Standing.LEASE_EXPIRED]
    assert verified.event["target"] == claims.id
    assert verify_head(claims.audit.head, service.runtime.verifier).size > claims.audit.index


async def test_another_key_verifies_nothing(service: Service) -> None:
    _, text = await certificate_of(service)
    other = new_signer("other")
    with pytest.raises(CertificateInvalid, match="not signed"):
        verify(text, Verifier({other.kid: other.public_key}))


async def test_every_claim_is_bound_by_something_else_that_is_signed(service: Service) -> None:
    """Even whoever holds the service's key cannot change one part without the others."""
    _, text = await certificate_of(service)
    signer, verifier = service.runtime.signer, service.runtime.verifier
    claims = verify(text, verifier).claims
    for name, (change, reason) in CHANGES.items():
        changed = sign(change(claims), signer)
        with pytest.raises(CertificateInvalid, match=reason):
            verify(changed, verifier)
        assert name
    verify(sign(claims, signer), verifier)


Change = Callable[[CertificateClaims], CertificateClaims]


def _with(**fields: Any) -> Change:
    return lambda claims: msgspec.structs.replace(claims, **fields)


def _asked(**fields: Any) -> Change:
    def change(claims: CertificateClaims) -> CertificateClaims:
        return msgspec.structs.replace(
            claims, asked=msgspec.structs.replace(claims.asked, **fields)
        )

    return change


def _audit(**fields: Any) -> Change:
    def change(claims: CertificateClaims) -> CertificateClaims:
        return msgspec.structs.replace(
            claims, audit=msgspec.structs.replace(claims.audit, **fields)
        )

    return change


def _in_force(**fields: Any) -> Change:
    def change(claims: CertificateClaims) -> CertificateClaims:
        return msgspec.structs.replace(
            claims, in_force=msgspec.structs.replace(claims.in_force, **fields)
        )

    return change


def _commit_for_in_force(claims: CertificateClaims) -> CertificateClaims:
    return msgspec.structs.replace(claims, in_force=claims.audit)


def _standing(**fields: Any) -> Change:
    def change(claims: CertificateClaims) -> CertificateClaims:
        first, *others = claims.sidecars
        first = msgspec.structs.replace(first, **fields)
        return msgspec.structs.replace(claims, sidecars=(first, *others))

    return change


def _late_sidecar(claims: CertificateClaims) -> CertificateClaims:
    late = SidecarStanding("f" * 32, "late", Standing.FENCED, "9999-01-01T00:00:00Z", 0, 0, 0, 0)
    return msgspec.structs.replace(claims, sidecars=(*claims.sidecars, late))


def _twice(claims: CertificateClaims) -> CertificateClaims:
    return msgspec.structs.replace(claims, sidecars=claims.sidecars * 2)


def _other_entry(claims: CertificateClaims) -> CertificateClaims:
    from service.log.chain import sign as sign_entry
    from strongroom.log import InvalidationKind, LogEntry

    entry = LogEntry(
        epoch=claims.epoch,
        seq=claims.seq,
        prev="0" * 64,
        at=claims.committed_at,
        kind=InvalidationKind.COMPONENTS,
        components=claims.components,
    )
    return msgspec.structs.replace(claims, entry=sign_entry(entry, new_signer("forger")))


CHANGES: dict[str, tuple[Change, str]] = {
    "another version": (_with(version=3), "version"),
    "another id": (_with(id="0" * 32), "revocation"),
    "another seq": (_with(seq=1), "position"),
    "another epoch": (_with(epoch="0" * 32), "position"),
    "another entry hash": (_with(entry_hash="0" * 64), "hash"),
    "an entry by somebody else": (_other_entry, "not signed by this service"),
    "more components": (_with(components=("0" * 32,) * 1, components_total=1), "digest"),
    "fewer components": (_with(components=(), components_total=0), "digest|finality|retires"),
    "another count": (_with(components_total=2), "length"),
    "no finality": (
        lambda claims: msgspec.structs.replace(
            claims, final=msgspec.structs.replace(claims.final, state=Finality.NONE)
        ),
        "finality",
    ),
    "a sidecar that could serve later": (_late_sidecar, "could serve"),
    "a sidecar twice": (_twice, "twice"),
    "in force at another time": (_with(in_force_at="9999-01-01T00:00:00Z"), "another time"),
    "no sidecar": (_with(sidecars=()), "standing"),
    "a sidecar that said so itself": (_standing(state=Standing.FENCED), "standing"),
    "a sidecar with other counts": (_standing(namespaces_dropped=99), "standing"),
    "another event in force": (_in_force(event="{}"), "audit tree"),
    "the commit's event for it": (_commit_for_in_force, "cannot be read"),
    "in force at another index": (_in_force(index=0), "audit tree"),
    "in force under another head": (_in_force(head="x.y.z"), "different heads"),
    "in force before it was committed": (_with(in_force_at="1970-01-01T00:00:00Z"), "serve"),
    "another axis": (_asked(axis="tenant"), "axis"),
    "another target": (_asked(target={"tenant": "x"}), "target"),
    "another reason": (_asked(reason="none"), "reason"),
    "another tenant": (_asked(tenant="0" * 32), "tenant"),
    "another caller": (_asked(by="operator:eve"), "caller"),
    "another event": (_audit(event="{}"), "audit tree"),
    "another index": (_audit(index=0), "audit tree"),
    "no path": (_audit(path=()), "audit tree"),
    "another head": (_audit(head="x.y.z"), "audit tree"),
}


async def test_a_certificate_cut_or_flipped_anywhere_is_refused(service: Service) -> None:
    _, text = await certificate_of(service)
    verifier = service.runtime.verifier
    for wrong in ("", "x", text[:-2], text[: len(text) // 2], text.replace(".", "", 1)):
        with pytest.raises(CertificateInvalid):
            verify(wrong, verifier)
    for at in range(0, len(text), max(1, len(text) // 40)):
        flipped = "A" if text[at] != "A" else "B"
        with pytest.raises(CertificateInvalid):
            verify(text[:at] + flipped + text[at + 1 :], verifier)


async def test_another_kind_of_statement_is_no_certificate(service: Service) -> None:
    signer: Signer = service.runtime.signer
    _, text = await certificate_of(service)
    claims = verify(text, service.runtime.verifier).claims
    as_log = signer.sign(Typ.LOG, canonical_json(msgspec.to_builtins(claims)))
    with pytest.raises(CertificateInvalid):
        verify(as_log, service.runtime.verifier)
    garbage = signer.sign(Typ.CERTIFICATE, b'{"version":1}')
    with pytest.raises(CertificateInvalid, match="cannot be read"):
        verify(garbage, service.runtime.verifier)


async def test_every_axis_yields_a_certificate_that_verifies(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    asks = [
        {"axis": "membership", "target": "alice", "group": world.group},
        {"axis": "subject", "target": "alice", "tenant": world.tenant},
        {"axis": "group", "target": world.group},
        {"axis": "tenant", "target": world.tenant},
        {"axis": "sidecar", "target": party.id},
    ]
    for ask in asks:
        answer = await service.operator.post("/v1/revocations", ask | {"reason": "test"})
        response = await service.operator.ask("GET", answer["certificate"])
        verified = verify(response.text, service.runtime.verifier)
        assert verified.claims.asked.axis == ask["axis"]
        destroys = ask["axis"] in {"subject", "group", "tenant"}
        assert (verified.claims.components_total > 0) == destroys
        assert (verified.claims.final.state is Finality.NONE) == (not destroys)


async def test_a_certificate_issued_after_the_rotation_says_final(service: Service) -> None:
    from service.keys.rotation import rotate

    world, text = await certificate_of(service)
    before = verify(text, service.runtime.verifier).claims
    runtime = service.runtime
    await rotate(runtime.database, runtime.changes, runtime.key_provider, world.tenant)
    response = await service.operator.ask("GET", f"/v1/revocations/{before.id}/certificate")
    after = verify(response.text, service.runtime.verifier).claims
    assert after.final.state is Finality.FINAL
    assert after.audit.index == before.audit.index


async def test_the_certificate_of_another_tenants_revocation_is_not_there(
    service: Service,
) -> None:
    from service.auth.tokens import Role

    world, text = await certificate_of(service)
    claims = verify(text, service.runtime.verifier).claims
    path = f"/v1/revocations/{claims.id}/certificate"
    mine = service.party("aud", world.tenant, Role.AUDITOR)
    theirs = service.party("aud", await service.tenant("globex"), Role.AUDITOR)
    assert (await mine.ask("GET", path)).status_code == 200
    assert (await theirs.ask("GET", path)).status_code == 404
    assert (await service.nobody.ask("GET", path)).status_code == 401
