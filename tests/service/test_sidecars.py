"""Enrolment, proofs, leases and liveness: the right sidecar gets them, the wrong one does not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.signing import Signer
from service.auth.actor import SYSTEM
from service.auth.errors import Unauthenticated
from service.auth.tokens import Role
from service.keys import components
from service.sidecars.expiry import LeaseExpiry
from service.sidecars.proof import NonceCache
from service.sidecars.sealing import SUITE
from strongroom.control import SIDECAR_PREFIX
from strongroom.derivation import engine_salt
from strongroom.errors import Overloaded
from strongroom.log import InvalidationKind
from tests.service.house import Artefacts, Party, Service, prompt
from tests.service.sidecar_party import SidecarParty, enrolled

LIVENESS = f"{SIDECAR_PREFIX}/liveness"


class World:
    """A tenant with a document, a subject who may read it, and grants for it."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def build(self, name: str = "acme") -> World:
        service = self.service
        self.tenant = await service.tenant(name)
        self.group = await service.group(self.tenant, "staff")
        self.alice: Party = await service.subject(self.tenant, "alice", [self.group])
        self.document = await service.document(self.tenant, "handbook", self.group)
        return self

    async def grant(self, artefacts: Artefacts) -> dict[str, Any]:
        answer: dict[str, Any] = await self.alice.post(
            "/v1/grants",
            {
                **artefacts.body(),
                "spans": [
                    {"end": 64, "group": "everyone"},
                    {"end": 128, "document": self.document},
                    {"end": 160, "group": "private"},
                ],
                **prompt(160),
            },
        )
        return answer


async def test_a_join_token_enrols_one_sidecar_and_no_second(service: Service) -> None:
    answer = await service.operator.post("/v1/sidecars/join-tokens", {"tenants": []})
    first, second = SidecarParty(service.http), SidecarParty(service.http, "node-2")
    assert (await first.enrol(answer["join_token"])).status_code == 201
    assert (await second.enrol(answer["join_token"])).status_code == 403
    assert (await second.enrol("srj_" + "x" * 43)).status_code == 403


async def test_an_expired_join_token_enrols_nobody(service: Service) -> None:
    from datetime import timedelta

    from sqlalchemy import update

    from service.db.base import now
    from service.sidecars.models import JoinToken

    answer = await service.operator.post("/v1/sidecars/join-tokens", {})
    async with service.runtime.database.writers() as session, session.begin():
        await session.execute(update(JoinToken).values(expires_at=now() - timedelta(seconds=1)))
    response = await SidecarParty(service.http).enrol(answer["join_token"])
    assert response.status_code == 403


async def test_only_operators_make_join_tokens(service: Service) -> None:
    tenant = await service.tenant()
    admin = service.party("boss", tenant, Role.TENANT_ADMIN)
    assert (await admin.ask("POST", "/v1/sidecars/join-tokens", {})).status_code == 403
    assert (await service.nobody.ask("POST", "/v1/sidecars/join-tokens", {})).status_code == 401


async def test_a_join_token_is_stored_only_as_its_digest(service: Service) -> None:
    from sqlalchemy import select

    from service.sidecars.models import JoinToken
    from service.sidecars.store import token_digest

    token = (await service.operator.post("/v1/sidecars/join-tokens", {}))["join_token"]
    async with service.runtime.sessions() as session:
        stored = (await session.scalars(select(JoinToken.digest))).all()
    assert list(stored) == [token_digest(token)]


async def test_keys_that_cannot_be_used_are_refused_before_the_token_is_spent(
    service: Service,
) -> None:
    answer = await service.operator.post("/v1/sidecars/join-tokens", {})
    party = SidecarParty(service.http)
    for changed in ({"hpke_key": "A" * 43}, {"signing_key": "AAAA"}, {"name": "no spaces"}):
        body = party.enrolment(answer["join_token"]) | changed
        response = await service.http.post("/v1/sidecars", json=body)
        assert response.status_code == 422, changed
    assert (await party.enrol(answer["join_token"])).status_code == 201


async def test_a_proof_opens_its_own_call_and_no_other(service: Service) -> None:
    party = await enrolled(service)
    body = {"namespaces": ["ab" * 32]}
    raw = b'{"namespaces":["' + b"ab" * 32 + b'"]}'
    good = party.proof("POST", LIVENESS, raw)
    assert (await party.send("POST", "/liveness", body, proof=good)).status_code == 200
    stranger = SidecarParty(service.http)
    stranger.id = party.id
    wrong = {
        "the same proof again": good,
        "another method": party.proof("PUT", LIVENESS, raw),
        "another path": party.proof("POST", f"{SIDECAR_PREFIX}/acks", raw),
        "a query that was not sent": party.proof("POST", f"{LIVENESS}?x=1", raw),
        "another body": party.proof("POST", LIVENESS, raw + b" "),
        "an old time": party.proof("POST", LIVENESS, raw, iat=int(time.time()) - 60),
        "a future time": party.proof("POST", LIVENESS, raw, iat=int(time.time()) + 60),
        "another sidecar's name": party.proof("POST", LIVENESS, raw, sidecar="0" * 32),
        "another's key": stranger.proof("POST", LIVENESS, raw),
        "a nonce too short to be one": party.proof("POST", LIVENESS, raw, nonce="1"),
        "no proof": "nonsense",
    }
    for what, proof in wrong.items():
        response = await party.send("POST", "/liveness", body, proof=proof)
        assert response.status_code == 401, what


async def test_a_bearer_token_opens_no_sidecar_route_and_a_proof_no_other(
    service: Service,
) -> None:
    party = await enrolled(service)
    answer = await service.operator.ask("POST", LIVENESS, {"namespaces": []})
    assert answer.status_code == 401
    proof = party.proof("GET", "/v1/tenants", b"")
    response = await service.http.get("/v1/tenants", headers={"Authorization": f"Sidecar {proof}"})
    assert response.status_code == 401


async def test_a_serving_lease_says_where_the_log_stands(service: Service) -> None:
    party = await enrolled(service)
    claims = await party.serving_lease()
    entries = await party.entries()
    assert claims.sidecar == party.id
    assert (claims.epoch, claims.seq) == (entries[-1].epoch, entries[-1].seq)
    assert claims.hash == entries[-1].hash()
    lease_ms = service.runtime.settings.serving_lease_s * 1000
    assert 0.99 * lease_ms <= claims.lease_ms < lease_ms


async def test_a_serving_lease_never_overtakes_a_revocation_that_is_being_committed(
    service: Service,
) -> None:
    """Else it would count for a lease after the revocation, which did not wait for it."""
    party = await enrolled(service)
    async with asyncio.TaskGroup() as tasks:
        async with service.runtime.changes.begin(SYSTEM) as change:
            entry = await change.invalidate(kind=InvalidationKind.COMPONENTS)
            asking = tasks.create_task(party.serving_lease())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asking), 0.3)
        claims = await asking
    assert claims.seq == entry.seq


async def test_the_right_sidecar_opens_a_key_lease_for_exactly_the_grants_namespaces(
    service: Service,
) -> None:
    world = await World(service).build()
    artefacts = await service.artefacts()
    party = await enrolled(service, world.tenant)
    granted = await world.grant(artefacts)
    claims, secrets = party.open_lease(await party.key_lease(granted["grant"]))
    assert len(secrets) == len(claims.info.namespaces) == 3
    assert world.document not in claims.info.namespaces[0].components
    assert world.document in claims.info.namespaces[1].components
    assert engine_salt(secrets[-1]) == granted["salt"]
    assert claims.info.sidecar == party.id


async def test_a_key_lease_opens_with_no_other_key_and_no_other_info(service: Service) -> None:
    from dataclasses import asdict

    from policy.signing import decode_base64url
    from strongroom.canonical import canonical_json

    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    granted = await world.grant(await service.artefacts())
    response = await party.key_lease(granted["grant"])
    claims, _ = party.open_lease(response)
    sealed = decode_base64url(claims.sealed, "sealed")
    info = canonical_json(asdict(claims.info))
    other = SidecarParty(service.http)
    with pytest.raises(InvalidTag):
        SUITE.decrypt(sealed, other.hpke, info)
    changed = canonical_json(asdict(replace(claims.info, lease_ms=10**9)))
    with pytest.raises(InvalidTag):
        SUITE.decrypt(sealed, party.hpke, changed)


async def test_a_sidecar_of_another_tenant_gets_no_key(service: Service) -> None:
    world = await World(service).build()
    other = await service.tenant("globex")
    right = await enrolled(service, world.tenant)
    wrong = await enrolled(service, other, name="node-2")
    granted = await world.grant(await service.artefacts())
    assert (await right.key_lease(granted["grant"])).status_code == 200
    assert (await wrong.key_lease(granted["grant"])).status_code == 403


async def test_a_tampered_or_foreign_grant_gets_no_key(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    grant = (await world.grant(await service.artefacts()))["grant"]
    head, payload, signature = grant.split(".")
    forged = Signer(Ed25519PrivateKey.generate()).sign("strongroom-grant+jwt", b"{}")
    for wrong in (f"{head}.{payload[:-4]}AAAA.{signature}", forged, "", granted_as_token(service)):
        assert (await party.key_lease(wrong)).status_code == 403
    assert (await party.key_lease(grant)).status_code == 200


def granted_as_token(service: Service) -> str:
    return service.token("x", "", Role.GATEWAY)


@pytest.mark.parametrize("retired", ["component", "subject", "revision", "epoch"])
async def test_a_grant_from_before_a_retirement_gets_no_key_and_a_later_one_does(
    service: Service, retired: str
) -> None:
    world = await World(service).build()
    artefacts = await service.artefacts()
    party = await enrolled(service, world.tenant)
    before = await world.grant(artefacts)
    assert (await party.key_lease(before["grant"])).status_code == 200
    async with service.runtime.changes.begin(SYSTEM) as change:
        match retired:
            case "component":
                # The secret alone, with no entry: its liveness is read in the lease's own
                # transaction, and does not hang on the log.
                await components.destroy(change.session, [world.document])  # type: ignore[list-item]
            case "subject":
                await change.invalidate(
                    kind=InvalidationKind.SUBJECT, tenant=world.tenant, subject="alice"
                )
            case "revision":
                from service.tenancy.store import bump_revision

                revision = await bump_revision(change.session, world.tenant)  # type: ignore[arg-type]
                await change.invalidate(
                    kind=InvalidationKind.TENANT_REVISION,
                    tenant=world.tenant,
                    min_revision=revision,
                )
            case _:
                await change.begin_epoch()
    assert (await party.key_lease(before["grant"])).status_code == 403
    after = await world.grant(artefacts)
    response = await party.key_lease(after["grant"])
    assert response.status_code == 200
    claims, _ = party.open_lease(response)
    leased = {c for each in claims.info.namespaces for c in each.components}
    assert (world.document in leased) == (retired != "component")


async def test_a_lease_carries_the_seq_that_it_was_read_at(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    granted = await world.grant(await service.artefacts())
    claims, _ = party.open_lease(await party.key_lease(granted["grant"]))
    assert claims.info.seq == (await party.log()).head_seq


async def test_why_a_key_lease_was_refused_is_in_the_audit_only(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    wrong = await enrolled(service, await service.tenant("globex"), name="node-2")
    granted = await world.grant(await service.artefacts())
    refused = [
        await wrong.key_lease(granted["grant"]),
        await party.key_lease("nonsense"),
    ]
    assert len({response.text for response in refused}) == 1
    events = await service.operator.get("/v1/audit/events", kind="key.leased", outcome="refused")
    assert {event["reason"] for event in events["items"]} == {"tenant", "grant"}


async def test_a_revoked_sidecar_is_nobody(service: Service) -> None:
    party = await enrolled(service)
    other = await enrolled(service, name="node-2")
    await service.operator.post(
        "/v1/revocations", {"axis": "sidecar", "target": party.id, "reason": "stolen"}
    )
    assert (await party.send("GET", "/invalidations")).status_code == 401
    assert (await other.send("GET", "/invalidations")).status_code == 200
    assert (await other.entries())[-1].sidecar == party.id


async def test_liveness_names_the_retired_namespaces_and_no_others(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    stranger = await enrolled(service, await service.tenant("globex"), name="node-2")
    granted = await world.grant(await service.artefacts())
    claims, _ = party.open_lease(await party.key_lease(granted["grant"]))
    names = [each.namespace for each in claims.info.namespaces]
    await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": "gone", "wait": False},
    )
    asked = {"namespaces": [*names, "cd" * 32]}
    answer = (await party.send("POST", "/liveness", asked)).json()
    assert answer["retired"] == sorted(names[1:])
    assert (await stranger.send("POST", "/liveness", asked)).json()["retired"] == []


async def test_an_acknowledgement_of_what_the_log_does_not_have_is_a_conflict(
    service: Service,
) -> None:
    party = await enrolled(service)
    head = await party.log()
    assert (await party.ack(head.head_seq)).status_code == 204
    assert (await party.ack(head.head_seq + 1)).status_code == 409
    wrong_epoch = {"epoch": "0" * 32, "seq": 1, "state": "fenced"}
    assert (await party.send("POST", "/acks", wrong_epoch)).status_code == 409
    assert (await party.ack(head.head_seq, "melted")).status_code == 422


def test_nonces_are_remembered_for_as_long_as_they_could_be_used_and_bounded() -> None:
    now = 0
    cache = NonceCache(lambda: now, nonces_max=2)
    cache.take("s", "one")
    with pytest.raises(Unauthenticated):
        cache.take("s", "one")
    cache.take("other", "one")
    cache.take("s", "two")
    with pytest.raises(Overloaded):
        cache.take("s", "three")
    now = 63 * 1_000_000_000
    cache.take("s", "three")


def test_a_lease_that_this_process_granted_runs_out_a_lease_after_it_was_granted() -> None:
    now = 1_000
    expiry = LeaseExpiry(5.0, lambda: now)
    expiry.granted("s", 1)
    now += 2_000_000_000
    assert expiry.expires_ns("s", 1) == 1_000 + 5_000_000_000


def test_a_lease_that_another_process_granted_runs_out_a_lease_from_now() -> None:
    now = 1_000
    expiry = LeaseExpiry(5.0, lambda: now)
    expiry.granted("s", 1)
    now += 4_000_000_000
    assert expiry.expires_ns("s", 2) == now + 5_000_000_000
    first = now
    now += 60_000_000_000
    assert expiry.expires_ns("s", 2) == first + 5_000_000_000
    assert expiry.expires_ns("never", 0) == now
