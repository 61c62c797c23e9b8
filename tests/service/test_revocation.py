"""Revocations: every axis, in force within one lease, once, and only for whom it is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from policy.certificates import verify
from service.auth.tokens import Role
from service.settings import ServiceSettings
from strongroom.log import InvalidationKind
from tests.service.house import Service, running
from tests.service.sidecar_party import SidecarParty, enrolled
from tests.service.test_sidecars import World

LEASE_S = 1.5


@pytest.fixture
async def short(settings: ServiceSettings) -> AsyncIterator[Service]:
    """A service whose serving lease is short, so that waiting for one is short too."""
    async with running(settings.model_copy(update={"serving_lease_s": LEASE_S})) as service:
        yield service


def body(axis: str, target: str, **more: Any) -> dict[str, Any]:
    return {"axis": axis, "target": target, "reason": "test", **more}


async def alive(service: Service, component: str) -> bool:
    from service.keys import components

    async with service.runtime.sessions() as session:
        return await components.alive(session, [component])  # type: ignore[list-item]


async def test_revoking_a_version_destroys_its_component_and_names_it_in_the_log(
    service: Service,
) -> None:
    world = await World(service).build()
    other = await service.document(world.tenant, "other", world.group)
    party = await enrolled(service, world.tenant)
    answer = await service.operator.post(
        "/v1/revocations", body("document_version", world.document)
    )
    assert answer["state"] == "in_force"
    assert answer["components"] == [world.document]
    assert answer["tenant"] == world.tenant
    assert answer["final"]["state"] == "pending"
    assert not await alive(service, world.document)
    assert await alive(service, other)
    entry = (await party.entries())[-1]
    assert (entry.kind, entry.components) == (InvalidationKind.COMPONENTS, (world.document,))
    assert (entry.epoch, entry.seq) == (answer["epoch"], answer["seq"])


async def test_every_axis_retires_what_it_names(service: Service) -> None:
    world = await World(service).build()
    artefacts = await service.artefacts()
    party = await enrolled(service, world.tenant)
    adapter = await service.operator.post(
        "/v1/artefacts",
        {
            "kind": "adapter",
            "name": "a",
            "revision": "1",
            "digest": "0" * 64,
            "scope": world.tenant,
        },
    )
    document = await service.operator.post(
        f"/v1/tenants/{world.tenant}/documents", {"name": "book"}
    )
    version = await service.operator.post(
        f"/v1/tenants/{world.tenant}/documents/{document['id']}/versions",
        {"content_digest": "1" * 64, "group": world.group},
    )
    await service.subject(world.tenant, "bob", [world.group])
    cases = [
        (body("membership", "bob", group=world.group), "tenant_revision", None),
        (body("subject", "bob", tenant=world.tenant), "subject", None),
        (body("document", document["id"]), "components", version["id"]),
        (body("document_version", world.document), "components", world.document),
        (body("adapter", adapter["id"]), "components", adapter["id"]),
        (body("model", artefacts.model), "components", artefacts.model),
        (body("tokenizer", artefacts.tokenizer), "components", artefacts.tokenizer),
        (body("template", artefacts.template), "components", artefacts.template),
        (body("policy", artefacts.policy), "components", artefacts.policy),
        (body("group", world.group), "tenant_revision", world.group),
        (body("tenant", world.tenant), "components", world.tenant),
    ]
    for asked, kind, component in cases:
        answer = await service.operator.post("/v1/revocations", asked)
        entry = (await party.entries())[-1]
        assert entry.seq == answer["seq"], asked
        assert entry.kind == kind, asked
        if component is not None:
            assert component in entry.components, asked
            assert component in answer["components"], asked
            assert not await alive(service, component), asked
    again = await service.operator.ask("POST", "/v1/revocations", cases[-1][0])
    assert again.status_code == 404


async def test_revoking_a_tenant_destroys_all_that_is_the_tenants_and_nothing_else(
    service: Service,
) -> None:
    from sqlalchemy import select

    from service.keys.models import Component

    world = await World(service).build()
    other = await World(service).build("globex")
    shared = await service.artefacts()
    answer = await service.operator.post("/v1/revocations", body("tenant", world.tenant))
    async with service.runtime.sessions() as session:
        rows = (
            await session.execute(select(Component.id, Component.tenant, Component.wrapped))
        ).all()
    gone = {row.id for row in rows if row.wrapped is None}
    assert gone == {row.id for row in rows if row.tenant == world.tenant}
    assert gone == set(answer["components"])
    assert other.tenant not in gone
    assert shared.model not in gone
    granted = await world.alice.ask("POST", "/v1/grants", {})
    assert not granted.is_success


async def test_it_is_in_force_as_soon_as_every_sidecar_has_acknowledged(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    await party.serving_lease()
    lease_s = service.runtime.settings.serving_lease_s
    started = asyncio.get_running_loop().time()
    revoking = asyncio.ensure_future(  # noqa: TID251 - awaited below
        service.operator.post("/v1/revocations", body("document_version", world.document))
    )
    seq = await _next_entry(party)
    assert not revoking.done()
    await party.ack(seq, loads_fenced=2, saves_fenced=1, namespaces_dropped=3)
    answer = await revoking
    assert asyncio.get_running_loop().time() - started < lease_s
    [standing] = answer["sidecars"]
    assert standing["state"] == "fenced"
    assert (standing["loads_fenced"], standing["namespaces_dropped"]) == (2, 3)
    assert standing["at"] <= answer["in_force_at"]


async def test_an_acknowledgement_of_an_earlier_entry_does_not_count(short: Service) -> None:
    world = await World(short).build()
    party = await enrolled(short, world.tenant)
    await party.serving_lease()
    before = (await party.log()).head_seq
    revoking = asyncio.ensure_future(  # noqa: TID251 - awaited below
        short.operator.post("/v1/revocations", body("document_version", world.document))
    )
    await _next_entry(party)
    await party.ack(before)
    answer = await revoking
    assert [each["state"] for each in answer["sidecars"]] == ["lease_expired"]


async def test_a_silent_sidecar_is_waited_for_until_its_lease_has_run_out_and_no_longer(
    short: Service,
) -> None:
    world = await World(short).build()
    party = await enrolled(short, world.tenant)
    claims = await party.serving_lease()
    loop = asyncio.get_running_loop()
    leased = loop.time()
    answer = await short.operator.post("/v1/revocations", body("document_version", world.document))
    took = loop.time() - leased
    # Never before the sidecar's own lease has run out, which is a little shorter.
    assert claims.lease_ms / 1000 < LEASE_S
    assert took >= claims.lease_ms / 1000
    [standing] = answer["sidecars"]
    assert standing["state"] == "lease_expired"
    assert answer["committed_at"] < standing["at"] <= answer["in_force_at"]


async def test_a_sidecar_that_is_long_gone_delays_no_revocation(short: Service) -> None:
    world = await World(short).build()
    party = await enrolled(short, world.tenant)
    await party.serving_lease()
    other = await short.document(world.tenant, "other", world.group)
    await short.operator.post("/v1/revocations", body("document_version", world.document))
    loop = asyncio.get_running_loop()
    started = loop.time()
    answer = await short.operator.post("/v1/revocations", body("document_version", other))
    assert loop.time() - started < LEASE_S
    assert [each["state"] for each in answer["sidecars"]] == ["lease_expired"]


async def test_a_sidecar_of_other_tenants_is_not_waited_for(service: Service) -> None:
    world = await World(service).build()
    mine = await enrolled(service, world.tenant)
    other = await enrolled(service, await service.tenant("globex"), name="node-2")
    await other.serving_lease()
    answer = await service.operator.post(
        "/v1/revocations", body("document_version", world.document)
    )
    assert [each["sidecar"] for each in answer["sidecars"]] == [mine.id]


async def test_without_waiting_it_is_committed_first_and_in_force_later(short: Service) -> None:
    world = await World(short).build()
    party = await enrolled(short, world.tenant)
    await party.serving_lease()
    response = await short.operator.ask(
        "POST", "/v1/revocations", body("document_version", world.document, wait=False)
    )
    assert response.status_code == 202
    answer = response.json()
    assert answer["state"] == "committed"
    path = response.headers["location"]
    early = await short.operator.ask("GET", answer["certificate"])
    assert early.status_code == 409
    async with asyncio.timeout(5):
        while (await short.operator.get(path))["state"] != "in_force":
            await asyncio.sleep(LEASE_S / 10)
    assert (await short.operator.ask("GET", answer["certificate"])).status_code == 200


async def test_the_same_key_revokes_once_and_another_request_under_it_is_a_conflict(
    service: Service,
) -> None:
    world = await World(service).build()
    asked = body("document_version", world.document)
    key = {"Idempotency-Key": "k1"}
    first = await service.operator.ask("POST", "/v1/revocations", asked, headers=key)
    again = await service.operator.ask("POST", "/v1/revocations", asked, headers=key)
    assert first.json()["id"] == again.json()["id"]
    other = await service.operator.ask(
        "POST", "/v1/revocations", body("tenant", world.tenant), headers=key
    )
    assert other.status_code == 409
    without = await service.operator.ask("POST", "/v1/revocations", asked)
    assert without.status_code == 404


async def test_unknown_and_not_yours_look_the_same_and_yours_is_revoked(
    service: Service,
) -> None:
    mine = await World(service).build()
    theirs = await World(service).build("globex")
    artefacts = await service.artefacts()
    party = await enrolled(service)
    admin = service.party("boss", mine.tenant, Role.TENANT_ADMIN)
    nothing = "0" * 32
    refused = [
        await admin.ask("POST", "/v1/revocations", asked)
        for asked in (
            body("document_version", theirs.document),
            body("document_version", nothing),
            body("document_version", theirs.document, tenant=theirs.tenant),
            body("model", artefacts.model),
            body("model", nothing),
            body("tenant", mine.tenant),
            body("tenant", theirs.tenant),
            body("sidecar", party.id),
            body("subject", "nobody"),
            body("subject", "alice", tenant=theirs.tenant),
            body("group", theirs.group),
        )
    ]
    assert {response.status_code for response in refused} == {404}
    assert len({response.text for response in refused}) == 1
    # The answer alone says little: nothing may have been destroyed behind it either.
    untouched = (theirs.document, theirs.group, theirs.tenant, mine.tenant, artefacts.model)
    for component in untouched:
        assert await alive(service, component)
    assert (await party.send("GET", "/invalidations")).status_code == 200
    done = await admin.ask("POST", "/v1/revocations", body("document_version", mine.document))
    assert done.status_code == 200
    revocation = done.json()["id"]
    stranger = service.party("other", theirs.tenant, Role.TENANT_ADMIN)
    assert (await stranger.ask("GET", f"/v1/revocations/{revocation}")).status_code == 404
    assert (await admin.ask("GET", f"/v1/revocations/{revocation}")).status_code == 200


async def test_an_artefact_of_another_kind_is_not_revoked_by_its_id(service: Service) -> None:
    artefacts = await service.artefacts()
    response = await service.operator.ask(
        "POST", "/v1/revocations", body("tokenizer", artefacts.model)
    )
    assert response.status_code == 404
    assert await alive(service, artefacts.model)


async def test_subjects_and_gateways_revoke_nothing(service: Service) -> None:
    world = await World(service).build()
    asked = body("document_version", world.document)
    gateway = service.party("gw", "", Role.GATEWAY)
    auditor = service.party("eve", "", Role.AUDITOR)
    for party, status in (
        (world.alice, 403),
        (gateway, 403),
        (auditor, 403),
        (service.nobody, 401),
    ):
        response = await party.ask("POST", "/v1/revocations", asked)
        assert response.status_code == status
    assert await alive(service, world.document)


async def test_a_reclaim_is_added_to_the_revocations_that_it_covers(service: Service) -> None:
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    answer = await service.operator.post(
        "/v1/revocations", body("document_version", world.document)
    )
    await party.ack(answer["seq"], "reclaimed", bytes_reclaimed=4096)
    [standing] = (await service.operator.get(f"/v1/revocations/{answer['id']}"))["sidecars"]
    assert standing["bytes_reclaimed"] == 4096


async def test_the_erasure_is_final_once_the_keys_that_wrapped_it_are_destroyed(
    service: Service,
) -> None:
    from service.keys.rotation import rotate

    world = await World(service).build()
    answer = await service.operator.post(
        "/v1/revocations", body("document_version", world.document)
    )
    assert answer["final"]["state"] == "pending"
    runtime = service.runtime
    await rotate(runtime.database, runtime.changes, runtime.key_provider, world.tenant)
    later = await service.operator.get(f"/v1/revocations/{answer['id']}")
    assert later["final"]["state"] == "final"


async def _next_entry(party: SidecarParty) -> int:
    """Wait until the log has grown, as a sidecar that polls it would."""
    before = (await party.log()).head_seq
    async with asyncio.timeout(5):
        while True:
            head = (await party.log(before)).head_seq
            if head > before:
                return head
            await asyncio.sleep(0)


async def test_at_the_deadline_it_is_answered_committed_and_waiting_again_sees_it_in_force(
    short: Service,
) -> None:
    world = await World(short).build()
    party = await enrolled(short, world.tenant)
    await party.serving_lease()
    asked = body("document_version", world.document)
    response = await short.operator.ask("POST", "/v1/revocations", asked | {"deadline_s": 0.05})
    answer = response.json()
    assert (response.status_code, answer["state"]) == (202, "committed")
    assert [each["state"] for each in answer["sidecars"]] == ["pending"]
    assert not await alive(short, world.document)
    path = f"/v1/revocations/{answer['id']}"
    assert (await short.operator.get(path, wait_s=0.01))["state"] == "committed"
    assert (await short.operator.get(path, wait_s=30))["state"] == "in_force"
    # A deadline that is not reached changes nothing.
    other = await short.document(world.tenant, "other", world.group)
    far = body("document_version", other) | {"deadline_s": 60}
    done = await short.operator.ask("POST", "/v1/revocations", far)
    assert (done.status_code, done.json()["state"]) == (200, "in_force")


async def test_a_sidecar_that_is_being_revoked_is_waited_for_until_it_is_out_of_its_lease(
    short: Service,
) -> None:
    """It was cut off and may serve until then: a document is not gone before that either."""
    world = await World(short).build()
    party, other = await enrolled(short), await enrolled(short, name="node-2")
    await party.serving_lease()
    gone = await short.operator.ask(
        "POST", "/v1/revocations", body("sidecar", party.id, wait=False)
    )
    assert gone.status_code == 202
    answer = await short.operator.post("/v1/revocations", body("document_version", world.document))
    assert {each["sidecar"] for each in answer["sidecars"]} == {party.id, other.id}
    sidecar = await short.operator.get(f"/v1/revocations/{gone.json()['id']}")
    assert sidecar["state"] == "in_force"
    assert sidecar["in_force_at"] <= answer["in_force_at"]
    # Once it is out, it delays and concerns nothing any more.
    second = await short.document(world.tenant, "second", world.group)
    after = await short.operator.post("/v1/revocations", body("document_version", second))
    assert {each["sidecar"] for each in after["sidecars"]} == {other.id}


async def test_a_key_is_its_callers_tenants_own(service: Service) -> None:
    mine, theirs = await World(service).build(), await World(service).build("globex")
    key = {"Idempotency-Key": "k1"}
    for world in (mine, theirs):
        boss = service.party("boss", world.tenant, Role.TENANT_ADMIN)
        asked = body("document_version", world.document)
        answer = await boss.ask("POST", "/v1/revocations", asked, headers=key)
        assert answer.status_code == 200
        assert answer.json()["components"] == [world.document]
        again = await boss.ask("POST", "/v1/revocations", asked, headers=key)
        assert again.json()["id"] == answer.json()["id"]


async def test_a_document_of_more_versions_than_an_entry_names_is_revoked_whole(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.changes.COMPONENTS_MAX", 2)
    world = await World(service).build()
    party = await enrolled(service, world.tenant)
    documents = f"/v1/tenants/{world.tenant}/documents"
    book = await service.operator.post(documents, {"name": "book"})
    versions = [
        (
            await service.operator.post(
                f"{documents}/{book['id']}/versions",
                {"content_digest": f"{number:064x}", "group": world.group},
            )
        )["id"]
        for number in range(5)
    ]
    before = (await party.log()).head_seq
    answer = await service.operator.post("/v1/revocations", body("document", book["id"]))
    assert set(answer["components"]) == set(versions)
    entries = [entry for entry in await party.entries() if entry.seq > before]
    assert [len(entry.components) for entry in entries] == [2, 2, 1]
    assert {each for entry in entries for each in entry.components} == set(versions)
    assert entries[-1].seq == answer["seq"]
    certificate = await service.operator.ask("GET", answer["certificate"])
    assert verify(certificate.text, service.runtime.verifier).claims.components_total == 5
