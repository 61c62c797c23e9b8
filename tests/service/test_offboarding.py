"""A tenant that leaves: its components, its key-encryption key and its leases go; its audit stays
for as long as retention and legal holds say."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select

from policy.certificates import Finality, verify
from service.audit import partitions, store
from service.db.base import now
from service.keys.models import Component, KekVersion
from service.keys.ring import LocalFileRing
from service.revocation.rounds import RevocationRounds
from service.settings import ServiceSettings
from strongroom.errors import Unavailable
from strongroom.identity import ComponentId
from tests.service.evidence import Evidence
from tests.service.house import Service, running
from tests.service.sidecar_party import enrolled
from tests.service.test_audit_retention import OLD, OTHER, drafts, left, purge
from tests.service.test_audit_retention import evidence as evidence_of
from tests.service.test_revocation import alive, body
from tests.service.test_sidecars import World

evidence = evidence_of


def rounds_of(service: Service) -> RevocationRounds:
    runtime = service.runtime
    return RevocationRounds(runtime.revocations.desk, runtime.key_provider, check_s=3600)


async def keks_alive(service: Service, tenant: str) -> int:
    async with service.runtime.sessions() as session:
        count = select(func.count()).select_from(KekVersion)
        return await session.scalar(
            count.where(KekVersion.kek == tenant, KekVersion.destroyed_at.is_(None))
        ) or 0  # fmt: skip


@pytest.fixture
def quiet(settings: ServiceSettings) -> ServiceSettings:
    """No round runs by itself but the one at the start."""
    return settings.model_copy(update={"revocation_check_s": 3600.0})


async def test_a_tenant_that_is_gone_has_no_key_and_its_erasure_is_final(
    quiet: ServiceSettings,
) -> None:
    async with running(quiet) as service:
        world, other = await World(service).build(), await World(service).build("globex")
        artefacts = await service.artefacts()
        party = await enrolled(service, world.tenant, other.tenant)
        grant, kept = await world.grant(artefacts), await other.grant(artefacts)
        assert (await party.key_lease(grant["grant"])).status_code == 200
        assert (await party.key_lease(kept["grant"])).status_code == 200
        answer = await service.operator.post("/v1/revocations", body("tenant", world.tenant))
        await rounds_of(service).round()
        assert await keks_alive(service, world.tenant) == 0
        assert await keks_alive(service, other.tenant) == 1
        # Nothing of it is in the key folder any more either.
        left_over = [path.name for path in quiet.keys.iterdir() if world.tenant in path.name]
        assert left_over == []
        async with service.runtime.sessions() as session:
            living = select(func.count()).select_from(Component)
            mine = living.where(Component.tenant == world.tenant, Component.wrapped.is_not(None))
            assert await session.scalar(mine) == 0
        assert (await party.key_lease(grant["grant"])).status_code != 200
        assert (await party.key_lease(kept["grant"])).status_code == 200
        later = await service.operator.get(f"/v1/revocations/{answer['id']}")
        assert later["final"]["state"] == "final"
        response = await service.operator.ask("GET", answer["certificate"])
        verified = verify(response.text, service.runtime.verifier)
        assert verified.claims.final.state is Finality.FINAL


async def test_a_key_that_could_not_be_ended_is_ended_by_a_later_round(
    quiet: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(quiet) as service:
        world = await World(service).build()

        async def away(*_: Any) -> None:
            raise Unavailable("the keys are away")

        with monkeypatch.context() as broken:
            broken.setattr(LocalFileRing, "destroy", away)
            answer = await service.operator.post("/v1/revocations", body("tenant", world.tenant))
            with pytest.raises(Unavailable):
                await rounds_of(service).round()
        assert answer["state"] == "in_force"
        assert await keks_alive(service, world.tenant) == 1
    async with running(quiet) as service:  # another process finds it
        await rounds_of(service).round()
        assert await keks_alive(service, world.tenant) == 0


async def test_a_hold_keeps_the_audit_and_stops_no_revocation(
    service: Service, evidence: Evidence
) -> None:
    """The pair: what is held is revoked all the same, and its records outlive the purge."""
    held, free = await World(service).build(), await World(service).build("globex")
    async with evidence.database.writers() as session, session.begin():
        await partitions.make_ahead(session, OLD)
    async with evidence.database.writers() as session, session.begin():
        for world in (held, free):
            await store.append(session, drafts(ComponentId(world.tenant), 200), OLD)
        await store.append(session, drafts(OTHER, 400), now())
    await service.operator.post("/v1/audit/holds", {"tenant": held.tenant, "reason": "a lawsuit"})
    for world in (held, free):
        for asked in (body("document_version", world.document), body("tenant", world.tenant)):
            answer = await service.operator.post("/v1/revocations", asked)
            assert answer["state"] == "in_force"
        assert not await alive(service, world.document)
        assert not await alive(service, world.tenant)
        assert await left(evidence, ComponentId(world.tenant)) == 200
    assert await purge(evidence) is not None
    assert await left(evidence, ComponentId(held.tenant)) == 200
    assert await left(evidence, ComponentId(free.tenant)) == 0
    # What says that something was revoked is never purged, held or not.
    for world in (held, free):
        told = await service.operator.get(
            "/v1/audit/events", tenant=world.tenant, kind="revocation.committed"
        )
        assert len(told["items"]) == 2


async def test_the_audit_of_a_tenant_that_left_can_still_be_held(service: Service) -> None:
    world = await World(service).build()
    await service.operator.post("/v1/revocations", body("tenant", world.tenant))
    hold = {"tenant": world.tenant, "reason": "a lawsuit"}
    placed = await service.operator.ask("POST", "/v1/audit/holds", hold)
    assert placed.status_code == 201
    nobody = await service.operator.ask("POST", "/v1/audit/holds", hold | {"tenant": "0" * 32})
    assert nobody.status_code == 404
