"""Artefacts, documents and versions: registration, upgrade, idempotency."""

from __future__ import annotations

from typing import Any

import pytest

from service.auth.tokens import Role
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind
from tests.service.house import Service, digest
from tests.service.test_tenancy import alive, entries

MODEL = {"kind": "model", "name": "org/model", "revision": "r1", "digest": digest("r1")}


async def test_the_same_natural_key_again_is_a_conflict_that_names_the_first(
    service: Service,
) -> None:
    first = await service.operator.post("/v1/artefacts", MODEL)
    again = await service.operator.ask("POST", "/v1/artefacts", {**MODEL, "digest": digest("x")})
    assert again.status_code == 409
    assert again.json()["limit"] == first["id"]
    other = await service.operator.post("/v1/artefacts", {**MODEL, "revision": "r2"})
    assert other["id"] != first["id"]
    tenant = await service.tenant()
    own = await service.operator.post("/v1/artefacts", {**MODEL, "scope": tenant})
    assert own["scope"] == tenant


async def test_an_idempotency_key_gets_the_first_answer_again(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    documents = f"/v1/tenants/{tenant}/documents"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/artefacts", MODEL),
        (documents, {"name": "handbook.md"}),
    ]
    document = await service.operator.post(documents, {"name": "other.md"})
    version = {"content_digest": digest("text"), "group": group}
    cases.append((f"{documents}/{document['id']}/versions", version))
    for number, (path, body) in enumerate(cases):
        key = f"once-{number}"
        first = await service.operator.post(path, body, Idempotency_Key=key)
        again = await service.operator.post(path, body, Idempotency_Key=key)
        assert first == again
        without = await service.operator.ask("POST", path, body)
        assert without.status_code == 409
    changed = await service.operator.ask(
        "POST", "/v1/artefacts", {**MODEL, "revision": "r9"}, headers={"Idempotency-Key": "once-0"}
    )
    assert (changed.status_code, changed.json()["field"]) == (409, "Idempotency-Key")


async def test_a_key_of_another_caller_is_another_key(service: Service) -> None:
    await service.operator.post("/v1/artefacts", MODEL, Idempotency_Key="k")
    other = service.party("second", "", Role.OPERATOR)
    answer = await other.ask("POST", "/v1/artefacts", MODEL, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 409
    assert answer.json()["field"] == "revision"


async def test_an_upgrade_registers_and_destroys_in_one_entry(service: Service) -> None:
    old = await service.operator.post("/v1/artefacts", MODEL)
    count = len(await entries(service))
    new = await service.operator.post(
        f"/v1/artefacts/{old['id']}/upgrade", {"revision": "r2", "digest": digest("r2")}
    )
    assert (new["name"], new["revision"], new["replaced"]) == ("org/model", "r2", old["id"])
    log = await entries(service)
    assert len(log) == count + 1
    assert (log[-1].kind, log[-1].components) == (
        InvalidationKind.COMPONENTS,
        (ComponentId(old["id"]),),
    )
    assert not await alive(service, old["id"])
    assert await alive(service, new["id"])
    gone = await service.operator.ask("GET", f"/v1/artefacts/{old['id']}")
    assert gone.status_code == 404
    listed = await service.operator.get("/v1/artefacts", kind="model")
    assert [item["id"] for item in listed["items"]] == [new["id"]]


async def test_an_upgrade_that_cannot_register_destroys_nothing(service: Service) -> None:
    old = await service.operator.post("/v1/artefacts", MODEL)
    await service.operator.post("/v1/artefacts", {**MODEL, "revision": "r2"})
    count = len(await entries(service))
    answer = await service.operator.ask(
        "POST",
        f"/v1/artefacts/{old['id']}/upgrade",
        {"revision": "r2", "digest": digest("r2")},
    )
    assert answer.status_code == 409
    assert await alive(service, old["id"])
    assert len(await entries(service)) == count


async def test_a_tenants_artefact_is_not_there_for_another_tenant(service: Service) -> None:
    mine, other = await service.tenant("mine"), await service.tenant("other")
    own = await service.operator.post("/v1/artefacts", {**MODEL, "scope": mine})
    shared = await service.operator.post("/v1/artefacts", MODEL)
    insider = service.party("root", mine, Role.TENANT_ADMIN)
    outsider = service.party("root", other, Role.TENANT_ADMIN)
    assert (await insider.ask("GET", f"/v1/artefacts/{own['id']}")).status_code == 200
    theirs = await outsider.ask("GET", f"/v1/artefacts/{own['id']}")
    nobodys = await outsider.ask("GET", f"/v1/artefacts/{'0' * 32}")
    assert (theirs.status_code, theirs.text) == (404, nobodys.text)
    listed = await outsider.get("/v1/artefacts")
    assert [item["id"] for item in listed["items"]] == [shared["id"]]
    body = {"revision": "r2", "digest": digest("r2")}
    for artefact in (own, shared):
        refused = await outsider.ask("POST", f"/v1/artefacts/{artefact['id']}/upgrade", body)
        assert (refused.status_code, refused.text) == (404, nobodys.text)
    assert (await outsider.ask("POST", "/v1/artefacts", MODEL)).status_code == 404
    moved = await outsider.ask("POST", "/v1/artefacts", {**MODEL, "scope": mine})
    assert moved.status_code == 404
    upgraded = await insider.ask("POST", f"/v1/artefacts/{own['id']}/upgrade", body)
    assert upgraded.status_code == 201


async def test_a_version_has_one_group_of_its_own_tenant(service: Service) -> None:
    mine, other = await service.tenant("mine"), await service.tenant("other")
    group, foreign = await service.group(mine, "legal"), await service.group(other, "legal")
    documents = f"/v1/tenants/{mine}/documents"
    document = (await service.operator.post(documents, {"name": "handbook.md"}))["id"]
    versions = f"{documents}/{document}/versions"
    refused = await service.operator.ask(
        "POST", versions, {"content_digest": digest("a"), "group": foreign}
    )
    assert (refused.status_code, refused.json()["field"]) == (404, "group")
    first = await service.operator.post(versions, {"content_digest": digest("a"), "group": group})
    second = await service.operator.post(versions, {"content_digest": digest("b"), "group": group})
    assert first["id"] != second["id"]
    listed = await service.operator.get(versions)
    assert {item["id"] for item in listed["items"]} == {first["id"], second["id"]}
    elsewhere = await service.operator.ask(
        "GET", f"/v1/tenants/{other}/documents/{document}/versions"
    )
    assert elsewhere.status_code == 404


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "weights"}, "kind"),
        ({"kind": "tenant"}, "kind"),
        ({"digest": "00"}, "digest"),
        ({"digest": digest("x").upper()}, "digest"),
        ({"scope": "everyone"}, "scope"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 129}, "name"),
    ],
)
async def test_what_no_artefact_can_be_is_named(
    service: Service, change: dict[str, str], field: str
) -> None:
    answer = await service.operator.ask("POST", "/v1/artefacts", {**MODEL, **change})
    assert (answer.status_code, answer.json()["field"]) == (422, field)


async def test_an_artefact_of_an_unknown_tenant_is_not_registered(service: Service) -> None:
    answer = await service.operator.ask("POST", "/v1/artefacts", {**MODEL, "scope": "0" * 32})
    assert (answer.status_code, answer.json()["field"]) == (404, "tenant")
