"""The residency catalogue: who may say what lies where, who sees it, and that it proves nothing."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from policy.signing import decode_base64url
from strongroom.control import RESIDENCY_ROWS_MAX
from tests.service.house import Artefacts, Service
from tests.service.sidecar_party import SidecarParty, enrolled
from tests.service.test_policies import document, reads
from tests.service.test_revocation import body
from tests.service.test_sidecars import World


def namespaces_of(grant: str) -> list[str]:
    claims = msgspec.json.decode(decode_base64url(grant.split(".")[1], "grant"))
    return [span["namespace"] for span in claims["spans"]]


def amount(namespace: str, blocks: int, tier: str = "host") -> dict[str, Any]:
    return {"namespace": namespace, "tier": tier, "blocks": blocks, "bytes": 1000 * blocks}


class Node:
    """A sidecar that reports; `run` and `number` as it would count them."""

    def __init__(self, party: SidecarParty) -> None:
        self.party = party
        self.run, self.number = secrets.token_hex(16), 0

    async def say(self, *amounts: dict[str, Any]) -> bool:
        answer = await self.send(self.number, *amounts)
        self.number += 1
        return answer

    async def send(self, number: int, *amounts: dict[str, Any]) -> bool:
        response = await self.party.send(
            "POST", "/residency", {"run": self.run, "number": number, "amounts": list(amounts)}
        )
        assert response.status_code == 200, response.text
        return bool(response.json()["restart"])


async def seen(service: Service, tenant: str, **params: str) -> dict[str, Any]:
    found: dict[str, Any] = await service.operator.get(f"/v1/tenants/{tenant}/residency", **params)
    return found


def places(found: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    return [
        (place["tier"], place["namespaces"], place["blocks"], place["bytes"])
        for place in found["places"]
    ]


async def granted(world: World, artefacts: Artefacts) -> list[str]:
    return namespaces_of((await world.grant(artefacts))["grant"])


async def test_amounts_are_added_up_by_node_and_tier_and_followed(service: Service) -> None:
    world = await World(service).build()
    everyone, book, own = await granted(world, await service.artefacts())
    before = await seen(service, world.tenant)
    assert (before["kept"], before["bytes"], before["places"]) == (False, 0, [])
    one = Node(await enrolled(service, world.tenant))
    two = Node(await enrolled(service, name="node-2"))
    assert not await one.say(amount(everyone, 4), amount(book, 3), amount(book, 2, "nvme"))
    assert not await two.say(amount(book, 5))
    found = await seen(service, world.tenant)
    assert (found["kept"], found["namespaces"], found["blocks"]) == (True, 2, 14)
    assert sorted(places(found)) == [
        ("host", 1, 5, 5000),
        ("host", 2, 7, 7000),
        ("nvme", 1, 2, 2000),
    ]
    assert found["oldest_report_at"] == min(each["reported_at"] for each in found["places"])
    of_book = await seen(service, world.tenant, component=world.document)
    assert (of_book["namespaces"], of_book["blocks"]) == (1, 10)
    assert not await one.say(amount(book, 1), amount(book, 0, "nvme"), amount(own, 0))
    assert (await seen(service, world.tenant))["blocks"] == 4 + 1 + 5


async def test_a_report_that_comes_twice_late_or_never_harms_nothing(service: Service) -> None:
    world = await World(service).build()
    everyone, book, _ = await granted(world, await service.artefacts())
    node = Node(await enrolled(service, world.tenant))
    assert not await node.say(amount(everyone, 1), amount(book, 1))
    assert not await node.say(amount(everyone, 2))
    assert not await node.send(0, amount(everyone, 9))
    assert not await node.send(1, amount(everyone, 9))
    assert (await seen(service, world.tenant))["blocks"] == 3
    assert await node.send(3, amount(everyone, 9)), "number 2 never came"
    assert (await seen(service, world.tenant))["blocks"] == 3
    node.run, node.number = secrets.token_hex(16), 0
    assert await node.send(1, amount(everyone, 9)), "a run whose beginning is not known"
    assert not await node.say(amount(book, 7))
    assert (await seen(service, world.tenant))["blocks"] == 7


async def test_a_sidecar_says_nothing_about_what_is_not_its_own(service: Service) -> None:
    world = await World(service).build()
    other = await World(service).build("globex")
    artefacts = await service.artefacts()
    mine = (await granted(world, artefacts))[1]
    theirs = (await granted(other, artefacts))[1]
    node = Node(await enrolled(service, world.tenant))
    assert not await node.say(amount(mine, 1), amount(theirs, 1), amount("f" * 64, 1))
    assert (await seen(service, world.tenant))["blocks"] == 1
    assert (await seen(service, other.tenant))["blocks"] == 0
    both = Node(await enrolled(service, name="node-2"))
    assert not await both.say(amount(mine, 1), amount(theirs, 1))
    assert (await seen(service, other.tenant))["blocks"] == 1


async def test_one_tenant_never_counts_anothers(service: Service) -> None:
    from service.residency import catalogue
    from strongroom.identity import ComponentId

    world = await World(service).build()
    other = await World(service).build("globex")
    artefacts = await service.artefacts()
    node = Node(await enrolled(service))
    assert not await node.say(
        amount((await granted(world, artefacts))[1], 1),
        amount((await granted(other, artefacts))[1], 2),
    )
    found = await seen(service, world.tenant, component=artefacts.model)
    assert found["blocks"] == 1
    async with service.runtime.sessions() as session:
        model = [ComponentId(artefacts.model)]
        assert (await catalogue.of_components(session, model, None)).blocks == 3
        theirs = await catalogue.of_components(session, model, ComponentId(other.tenant))
        assert theirs.blocks == 2


async def test_what_a_revoked_sidecar_said_counts_no_more(service: Service) -> None:
    world = await World(service).build()
    namespaces = await granted(world, await service.artefacts())
    gone, stays = Node(await enrolled(service)), Node(await enrolled(service, name="node-2"))
    assert not await gone.say(amount(namespaces[0], 5))
    assert not await stays.say(amount(namespaces[0], 1))
    await service.operator.post("/v1/revocations", body("sidecar", gone.party.id, wait=False))
    assert (await seen(service, world.tenant))["blocks"] == 1


async def test_a_full_report_fits_and_a_larger_or_odd_one_is_refused(service: Service) -> None:
    node = Node(await enrolled(service))
    full = [amount(f"{number:064x}", 1) for number in range(RESIDENCY_ROWS_MAX)]
    assert not await node.say(*full)
    wrong: list[dict[str, Any]] = [
        {"amounts": [*full, amount("e" * 64, 1)]},
        {"amounts": [amount("e" * 64, -1)]},
        {"amounts": [amount("e" * 64, 2**62 + 1)]},
        {"amounts": [amount("e" * 64, 1, "gpu")]},
        {"amounts": [amount("e" * 63, 1)]},
        {"run": "x"},
        {"number": -1},
    ]
    for changes in wrong:
        report = {"run": node.run, "number": node.number, "amounts": []} | changes
        response = await node.party.send("POST", "/residency", report)
        assert response.status_code == 422, (changes, response.text)


async def test_a_lie_about_what_lies_where_changes_no_grant_and_no_lease(service: Service) -> None:
    world = await World(service).build()
    artefacts = await service.artefacts()
    first = await world.grant(artefacts)
    party = await enrolled(service)
    leased = await party.key_lease(first["grant"])
    assert leased.status_code == 200
    await Node(party).say(*(amount(each, 2**40) for each in namespaces_of(first["grant"])))
    again = await world.grant(artefacts)
    assert again["salt"] == first["salt"]
    assert (await party.key_lease(again["grant"])).status_code == 200
    revoked = await service.operator.post(
        "/v1/revocations", body("document_version", world.document, wait=False)
    )
    assert revoked["components"] == [world.document]
    assert (await party.key_lease(again["grant"])).status_code != 200


async def test_a_dry_run_says_how_many_bytes_nobody_could_read_any_more(service: Service) -> None:
    world = await World(service).build()
    namespaces = await granted(world, await service.artefacts())
    node = Node(await enrolled(service))
    path = f"/v1/tenants/{world.tenant}/policy/dry-run"
    deny = {"form": "yaml", "document": document(reads("user:alice", world.group, "deny"))}
    unknown = (await service.operator.post(path, deny))["invalidation"]
    assert (unknown["namespaces_abandoned"], unknown["bytes"]) == (2, None)
    assert not await node.say(*(amount(each, 1) for each in namespaces))
    told = (await service.operator.post(path, deny))["invalidation"]
    assert (told["namespaces_abandoned"], told["bytes"]) == (2, 2000)
