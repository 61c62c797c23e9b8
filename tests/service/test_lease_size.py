"""Whatever is granted can be leased: a grant too large for one lease is refused when asked for."""

from __future__ import annotations

import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from policy.signing import JWS_BYTES_MAX
from service.auth.actor import SYSTEM
from service.grants.lease_size import COMPONENTS_MAX
from service.sidecars import sealing
from service.tenancy import store as tenancy
from strongroom.control import KeyLeaseInfo, LeasedNamespace
from strongroom.identity import ComponentId
from strongroom.limits import SPANS_MAX
from tests.service.evidence import new_signer
from tests.service.house import Artefacts, Party, Service, prompt
from tests.service.sidecar_party import enrolled

FIT = 184
"""Spans of one new group each, over 5 components: 5 * 184 + 184 * 185 / 2 = 17 940."""


async def crowded(service: Service) -> tuple[str, Party, list[str]]:
    """A tenant with one subject that is in very many groups."""
    tenant = await service.tenant()
    alice = await service.subject(tenant, "alice")
    async with service.runtime.changes.begin(SYSTEM) as change:
        principal = await tenancy.get_principal(change.session, tenant, "alice")
        groups = []
        for number in range(FIT + 1):
            group = await tenancy.create_group(change.session, ComponentId(tenant), f"g{number}")
            await tenancy.add_membership(change.session, group, principal)
            groups.append(str(group.id))
        await tenancy.bump_revision(change.session, ComponentId(tenant))
    return tenant, alice, groups


def body(artefacts: Artefacts, groups: list[str]) -> dict[str, object]:
    spans = [{"end": number + 1, "group": group} for number, group in enumerate(groups)]
    return {**artefacts.body(), "spans": spans, **prompt(len(groups))}


async def test_the_largest_grant_is_leased_and_a_larger_one_is_refused_by_name(
    service: Service,
) -> None:
    tenant, alice, groups = await crowded(service)
    artefacts = await service.artefacts()
    granted = await alice.post("/v1/grants", body(artefacts, groups[:FIT]))
    assert granted["granted_tokens"] == FIT
    party = await enrolled(service, tenant)
    _, opened = party.open_lease(await party.key_lease(granted["grant"]))
    assert len(opened) == FIT
    refused = await alice.ask("POST", "/v1/grants", body(artefacts, groups))
    problem = refused.json()
    assert (refused.status_code, problem["code"]) == (422, "misuse")
    assert (problem["field"], problem["limit"]) == ("spans", COMPONENTS_MAX)
    # One label over many spans is one namespace.
    same = await alice.post("/v1/grants", body(artefacts, [groups[0]] * (FIT + 1)))
    assert same["granted_tokens"] == FIT + 1


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_lease_that_cannot_be_signed_is_refused_and_recorded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, alice, groups = await crowded(service)
    granted = await alice.post("/v1/grants", body(await service.artefacts(), groups[:3]))
    party = await enrolled(service, tenant)
    unknown = await party.key_lease("nonsense")
    monkeypatch.setattr(sealing, "JWS_BYTES_MAX", 100)
    refused = await party.key_lease(granted["grant"])
    assert (refused.status_code, refused.text) == (unknown.status_code, unknown.text)
    events = await service.operator.get("/v1/audit/events", kind="key.leased", outcome="refused")
    assert sorted(event["reason"] for event in events["items"]) == ["grant", "size"]
    [size] = [event for event in events["items"] if event["reason"] == "size"]
    assert size["tenant"] == tenant


@pytest.mark.parametrize("namespaces", [1, 184, SPANS_MAX])
def test_as_many_components_as_a_grant_may_have_fit_into_a_lease(namespaces: int) -> None:
    each, rest = divmod(COMPONENTS_MAX, namespaces)
    info = KeyLeaseInfo(
        sidecar="a" * 32,
        nonce="n" * 128,
        epoch="e" * 32,
        seq=2**53,
        lease_ms=3_600_000,
        namespaces=[
            LeasedNamespace(secrets.token_hex(32), ["c" * 32] * (each + (number < rest)))
            for number in range(namespaces)
        ],
    )
    key = X25519PrivateKey.generate().public_key().public_bytes_raw()
    sealed = sealing.seal([bytes(32)] * namespaces, key, info)
    assert len(sealing.sign_lease(info, sealed, new_signer())) <= JWS_BYTES_MAX
