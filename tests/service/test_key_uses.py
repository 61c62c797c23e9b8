"""The key-use log: who unwrapped what, under which version, what for; and who may read it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from service.auth.tokens import Role
from service.keys import components, rotation, uses
from service.keys.models import KeyUse
from service.keys.provider import INSTALLATION
from strongroom.errors import Missing
from strongroom.identity import ComponentId
from tests.service.evidence import noted
from tests.service.house import Party, Service
from tests.service.sidecar_party import enrolled
from tests.service.test_grants import Scene


async def uses_of(party: Party, **filters: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await party.get("/v1/keys/uses", limit=200, **filters))["items"]
    return items


@pytest.fixture
async def scene(service: Service) -> Scene:
    return await Scene(service).set_up()


async def test_a_grants_salt_is_on_record_with_every_component_and_version(scene: Scene) -> None:
    _, claims = await scene.grant(scene.alice)
    found = await uses_of(scene.service.operator, purpose="grant_salt")
    assert {each["component"] for each in found} == set(claims.components(2))
    for each in found:
        assert (each["actor_kind"], each["actor"]) == ("subject", "alice")
        assert (each["reference"], each["tenant"]) == (claims.jti, scene.tenant)
        assert each["kek_version"] == 1
        assert each["kek"] in {INSTALLATION, scene.tenant}
    # Denied, nothing is derived and nothing is unwrapped.
    await scene.grant(scene.bob)
    assert len(await uses_of(scene.service.operator, purpose="grant_salt")) == len(found)


async def test_a_key_lease_is_on_record_under_the_sidecar(scene: Scene) -> None:
    party = await enrolled(scene.service, scene.tenant)
    answer, claims = await scene.grant(scene.alice)
    response = await party.key_lease(answer["grant"])
    assert response.is_success, response.text
    found = await uses_of(scene.service.operator, purpose="key_lease")
    assert {each["component"] for each in found} >= set(claims.components(2))
    assert {(each["actor_kind"], each["actor"]) for each in found} == {("sidecar", party.id)}
    assert {each["reference"] for each in found} == {claims.jti}


async def test_a_rotation_is_on_record_with_the_version_that_it_opened(scene: Scene) -> None:
    runtime = scene.service.runtime
    await rotation.rotate(runtime.database, runtime.changes, runtime.key_provider, INSTALLATION)
    [found] = await uses_of(scene.service.operator, purpose="rotation")
    assert (found["kek"], found["kek_version"], found["component"]) == (INSTALLATION, 1, "")
    [standing] = (await scene.service.operator.get("/v1/keys/rotations"))["items"]
    assert found["reference"] == standing["id"]
    await scene.grant(scene.alice)
    shared = await uses_of(scene.service.operator, kek=INSTALLATION, purpose="grant_salt")
    assert {each["kek_version"] for each in shared} == {2}


async def test_what_was_not_opened_is_not_on_record(service: Service) -> None:
    made = await service.operator.post(
        "/v1/artefacts",
        {"kind": "model", "name": "m", "revision": "1", "digest": "0" * 64},
    )
    kept = noted()
    async with service.runtime.sessions() as session:
        with pytest.raises(Missing):
            await components.secrets(
                session, [ComponentId(made["id"]), ComponentId("0" * 32)], kept
            )
    async with service.runtime.database.writers.begin() as session:
        await kept.record(session)
        assert await session.scalar(select(func.count()).select_from(KeyUse)) == 0


async def test_entries_are_filtered_and_come_in_pages(scene: Scene) -> None:
    for _ in range(3):
        await scene.grant(scene.alice)
    operator = scene.service.operator
    every = await uses_of(operator)
    assert len(every) == 3 * len({each["component"] for each in every})
    document = await uses_of(operator, component=scene.document)
    assert len(document) == 3
    assert await uses_of(operator, actor="alice") == every
    assert await uses_of(operator, actor="bob") == []
    assert await uses_of(operator, tenant=scene.tenant) == every
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert await uses_of(operator, since=later) == []
    assert await uses_of(operator, until=later) == every
    paged: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        given: dict[str, Any] = {"limit": 7} | ({"cursor": cursor} if cursor else {})
        page = await operator.get("/v1/keys/uses", **given)
        paged += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert paged == every
    assert [each["id"] for each in every] == sorted(each["id"] for each in every)


async def test_a_tenants_auditor_sees_its_own_tenants_uses_and_no_others(scene: Scene) -> None:
    await scene.grant(scene.alice)
    service = scene.service
    other = await service.tenant("globex")
    mine = service.party("aud", scene.tenant, Role.AUDITOR)
    theirs = service.party("aud", other, Role.AUDITOR)
    assert await uses_of(mine)
    assert await uses_of(theirs) == []
    for path in ("/v1/keys/uses", "/v1/keys/rotations"):
        named = {"tenant": scene.tenant} if path.endswith("uses") else {"kek": scene.tenant}
        assert (await mine.ask("GET", path, params=named)).status_code == 200
        assert (await theirs.ask("GET", path, params=named)).status_code == 404
        assert (await scene.alice.ask("GET", path)).status_code == 403
        assert (await service.nobody.ask("GET", path)).status_code == 401
    assert (await mine.ask("GET", "/v1/keys/status")).status_code == 403


async def test_only_an_operator_rotates_and_its_progress_is_a_resource(scene: Scene) -> None:
    service = scene.service
    asked = {"kek": scene.tenant}
    for role in (Role.AUDITOR, Role.TENANT_ADMIN, Role.GATEWAY):
        tenant = "" if role is Role.GATEWAY else scene.tenant
        party = service.party("x", tenant, role)
        assert (await party.ask("POST", "/v1/keys/rotations", asked)).status_code == 403
    begun = await service.operator.ask("POST", "/v1/keys/rotations", asked)
    assert begun.status_code == 202
    rotation_id = begun.json()["id"]
    await service.runtime.key_schedule.round()
    done = await service.operator.get(f"/v1/keys/rotations/{rotation_id}")
    assert (done["state"], done["components_left"]) == ("done", 0)
    assert done["asked_by"] == "operator:root"
    mine = service.party("aud", scene.tenant, Role.AUDITOR)
    theirs = service.party("aud", await service.tenant("globex"), Role.AUDITOR)
    path = f"/v1/keys/rotations/{rotation_id}"
    assert (await mine.ask("GET", path)).status_code == 200
    assert (await theirs.ask("GET", path)).status_code == 404
    missing = await service.operator.ask("POST", "/v1/keys/rotations", {"kek": "f" * 32})
    assert missing.status_code == 404


async def test_a_rotation_that_was_asked_for_does_not_wait_for_the_next_round(
    scene: Scene,
) -> None:
    import asyncio

    assert scene.service.runtime.settings.rotation_check_s == 60
    asked = await scene.service.operator.post("/v1/keys/rotations", {"kek": scene.tenant})
    async with asyncio.timeout(20):
        while asked["state"] != "done":
            asked = await scene.service.operator.get(f"/v1/keys/rotations/{asked['id']}")


async def test_entries_are_purged_after_their_time_and_not_before(scene: Scene) -> None:
    await scene.grant(scene.alice)
    count = len(await uses_of(scene.service.operator))
    moment = datetime.now(UTC)
    database = scene.service.runtime.database
    async with database.writers.begin() as session:
        assert await uses.purge(session, moment - timedelta(hours=1)) == 0
    assert len(await uses_of(scene.service.operator)) == count
    async with database.writers.begin() as session:
        assert await uses.purge(session, moment + timedelta(hours=1)) == count
    assert await uses_of(scene.service.operator) == []
