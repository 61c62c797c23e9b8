"""A preview tells what the revocation then takes, on every axis, and takes nothing itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import func, select

from service.auth.tokens import Role
from service.grants.models import NamespaceComponent
from service.keys.models import Component
from service.log.models import LogRow
from tests.service.house import Artefacts, Service
from tests.service.sidecar_party import SidecarParty, enrolled
from tests.service.test_residency import Node, amount, granted
from tests.service.test_revocation import body
from tests.service.test_sidecars import World

PREVIEW = "/v1/revocations/preview"


@dataclass
class Scene:
    service: Service
    world: World
    other: World
    artefacts: Artefacts
    adapter: str
    book: str
    sidecar: SidecarParty
    abroad: SidecarParty

    async def namespaces_alive(self) -> set[str]:
        """Those of which every component has its secret."""
        async with self.service.runtime.sessions() as session:
            dead = select(NamespaceComponent.namespace).join(
                Component, Component.id == NamespaceComponent.component
            ).where(Component.wrapped.is_(None))  # fmt: skip
            rows = await session.scalars(
                select(NamespaceComponent.namespace)
                .where(NamespaceComponent.namespace.not_in(dead))
                .distinct()
            )
            return set(rows)

    async def components_alive(self) -> set[str]:
        async with self.service.runtime.sessions() as session:
            rows = await session.scalars(select(Component.id).where(Component.wrapped.is_not(None)))
            return set(rows)

    async def log_length(self) -> int:
        async with self.service.runtime.sessions() as session:
            return await session.scalar(select(func.count()).select_from(LogRow)) or 0


async def scene_of(service: Service) -> Scene:
    world, other = await World(service).build(), await World(service).build("globex")
    artefacts = await service.artefacts()
    adapter = await service.operator.post(
        "/v1/artefacts",
        {
            "kind": "adapter", "name": "a", "revision": "1", "digest": "0" * 64,
            "scope": world.tenant,
        },
    )  # fmt: skip
    await service.subject(world.tenant, "bob", [world.group])
    await service.subject(world.tenant, "carol")
    documents = f"/v1/tenants/{world.tenant}/documents"
    book = await service.operator.post(documents, {"name": "book"})
    for text in ("1", "2"):
        version = {"content_digest": text * 64, "group": world.group}
        await service.operator.post(f"{documents}/{book['id']}/versions", version)
    for each in (world, other):
        await each.grant(artefacts)
    sidecar = await enrolled(service, world.tenant)
    abroad = await enrolled(service, other.tenant, name="node-2")
    return Scene(service, world, other, artefacts, adapter["id"], book["id"], sidecar, abroad)


Asked = Callable[[Scene], dict[str, Any]]
CASES: dict[str, tuple[Asked, str, int]] = {
    # What is asked; which grants die; how many subjects could read it.
    "subject": (lambda s: body("subject", "alice", tenant=s.world.tenant), "subject", 1),
    "membership": (lambda s: body("membership", "alice", group=s.world.group), "tenant", 1),
    "group": (lambda s: body("group", s.world.group), "tenant", 2),
    "document": (lambda s: body("document", s.book), "dependent", 2),
    "document_version": (lambda s: body("document_version", s.world.document), "dependent", 2),
    "model": (lambda s: body("model", s.artefacts.model), "dependent", 4),
    "adapter": (lambda s: body("adapter", s.adapter), "dependent", 3),
    "tokenizer": (lambda s: body("tokenizer", s.artefacts.tokenizer), "dependent", 4),
    "template": (lambda s: body("template", s.artefacts.template), "dependent", 4),
    "policy": (lambda s: body("policy", s.artefacts.policy), "dependent", 4),
    "tenant": (lambda s: body("tenant", s.world.tenant), "tenant", 3),
    "sidecar": (lambda s: body("sidecar", s.sidecar.id), "sidecar", 0),
}


@pytest.mark.parametrize("axis", CASES)
async def test_a_preview_tells_what_is_then_taken(service: Service, axis: str) -> None:
    scene = await scene_of(service)
    asked, grants, subjects = CASES[axis]
    components, namespaces = await scene.components_alive(), await scene.namespaces_alive()
    length = await scene.log_length()
    told = await service.operator.post(PREVIEW, asked(scene))
    assert (told["grants"], told["subjects"]) == (grants, subjects)
    assert (told["blocks"], told["bytes"]) == (None, None)
    assert "unknown" in told["held_note"]
    # It has changed nothing.
    assert await scene.components_alive() == components
    assert await scene.log_length() == length
    done = await service.operator.post("/v1/revocations", asked(scene))
    taken = components - await scene.components_alive()
    lost = namespaces - await scene.namespaces_alive()
    assert set(told["components"]) == taken == set(done["components"])
    assert told["components_total"] == len(taken)
    assert told["namespaces"] == len(lost)
    assert {each["sidecar"] for each in told["sidecars"]} == {
        each["sidecar"] for each in done["sidecars"]
    }
    assert (scene.abroad.id in {each["sidecar"] for each in told["sidecars"]}) == (
        axis in {"model", "tokenizer", "template", "policy"}
    )


async def test_a_namespace_that_is_lost_already_is_not_counted_again(service: Service) -> None:
    scene = await scene_of(service)
    group = body("group", scene.world.group)
    before = await service.operator.post(PREVIEW, group)
    assert before["namespaces"] > 0
    await service.operator.post("/v1/revocations", body("model", scene.artefacts.model))
    after = await service.operator.post(PREVIEW, group)
    assert (after["namespaces"], after["components"]) == (0, before["components"])


async def test_a_preview_tells_a_stranger_no_more_than_a_revocation(service: Service) -> None:
    scene = await scene_of(service)
    admin = service.party("boss", scene.world.tenant, Role.TENANT_ADMIN)
    other = scene.other
    refused = [
        await admin.ask("POST", PREVIEW, asked)
        for asked in (
            body("document_version", other.document),
            body("document_version", "0" * 32),
            body("group", other.group, tenant=other.tenant),
            body("subject", "alice", tenant=other.tenant),
            body("model", scene.artefacts.model),
            body("tenant", other.tenant),
            body("tenant", scene.world.tenant),
            body("sidecar", scene.sidecar.id),
        )
    ]
    assert {response.status_code for response in refused} == {404}
    assert len({response.text for response in refused}) == 1
    assert (await admin.ask("POST", PREVIEW, body("group", scene.world.group))).status_code == 200
    mallory: Awaitable[Any] = scene.world.alice.ask("POST", PREVIEW, body("group", "0" * 32))
    assert (await mallory).status_code == 403


async def test_blocks_and_bytes_are_what_sidecars_reported_and_else_unknown(
    service: Service,
) -> None:
    world, other = await World(service).build(), await World(service).build("globex")
    artefacts = await service.artefacts()
    everyone, book, own = await granted(world, artefacts)
    [abroad, *_] = await granted(other, artefacts)
    asked = body("document_version", world.document)
    unknown = await service.operator.post(PREVIEW, asked)
    assert (unknown["blocks"], unknown["bytes"]) == (None, None)
    assert "unknown" in unknown["held_note"]
    node = Node(await enrolled(service))
    await node.say(amount(everyone, 4), amount(book, 3), amount(own, 2), amount(abroad, 9))
    told = await service.operator.post(PREVIEW, asked)
    # By the union of labels, what follows the document depends on it too.
    assert (told["blocks"], told["bytes"], told["namespaces"]) == (5, 5000, 2)
    assert "hint" in told["held_note"]
    whole = await service.operator.post(PREVIEW, body("tenant", world.tenant))
    assert (whole["blocks"], whole["bytes"]) == (9, 9000)
    shared = await service.operator.post(PREVIEW, body("model", artefacts.model))
    assert shared["blocks"] == 18
