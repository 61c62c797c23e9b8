"""Every axis on the real service and a real sidecar: the right party hit before and misses after,
a grant minted before never serves after, and another party still hits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from service.auth.tokens import Role
from strongroom.blocks import pack_tokens, prompt_digest
from strongroom.wire.frames import Finish
from tests.sidecar.control_plane import MODEL, TEMPLATE, TOKENIZER, Granted
from tests.sidecar.harness import Engine, block_content
from tests.sidecar.real_service import POLICY, RealGrant, RealService, real_service, sidecar_of

PROMPT = list(range(4000, 4300))
WHOLE = 288
ADAPTER = "ad" * 32


@dataclass
class Party:
    """Somebody who asks for a prompt that depends on something."""

    tenant: str
    subject: str
    source: dict[str, str]
    artefacts: dict[str, str] = field(default_factory=dict)
    adapter: str = "none"
    """Its digest, as the engine measures it."""
    engine: Engine | None = None

    async def ask(self, service: RealService) -> RealGrant | None:
        """A new grant for the whole prompt; None: it is refused, or cut to nothing."""
        body = service.artefacts | {
            "adapter": "none",
            "spans": [{"end": len(PROMPT), **self.source}],
            "prompt_tokens": len(PROMPT),
            "prompt_digest": prompt_digest(pack_tokens(PROMPT)).hex(),
            "operations": ["read", "write"],
        }
        token = service.token(self.subject, self.tenant, Role.SUBJECT)
        answer = await service.http.request(
            "POST",
            "/v1/grants",
            json=body | self.artefacts,
            headers={"Authorization": f"Bearer {token}"},
        )
        assert answer.status_code < 500, answer.text
        if not answer.is_success:
            return None
        granted = answer.json()
        if not granted["granted_tokens"]:
            return None
        return RealGrant(granted["grant"], granted["salt"], list(PROMPT), granted["granted_tokens"])

    async def hit(self, name: str, grant: RealGrant) -> int:
        """The tokens that the sidecar would restore for `grant`; 0 also where it allows nothing."""
        verdict = await self._open(name, grant)
        return verdict.tokens if verdict.allowed else 0

    async def save(self, name: str, grant: RealGrant) -> None:
        assert (await self._open(name, grant)).allowed
        assert self.engine is not None
        await self.engine.save(name, PROMPT, WHOLE)
        self.engine.scheduler.send(Finish(name))

    async def _open(self, name: str, grant: RealGrant) -> Any:
        assert self.engine is not None
        return await self.engine.open(name, cast("Granted", grant), adapter=self.adapter)


@dataclass
class Case:
    """What is revoked, who depends on it, and who does not."""

    axis: str
    target: str
    victim: Party
    bystander: Party
    more: dict[str, str] = field(default_factory=dict)


@dataclass
class House:
    """Two tenants, two groups, two documents, and two revisions of every artefact."""

    service: RealService
    acme: str = ""
    globex: str = ""
    staff: str = ""
    sales: str = ""
    handbook: str = ""
    prices: str = ""
    others: dict[str, str] = field(default_factory=dict)
    adapter: str = ""

    async def build(self) -> House:
        service = self.service
        self.acme, self.globex = await service.tenant("acme"), await service.tenant("globex")
        self.staff = await service.group(self.acme, "staff")
        self.sales = await service.group(self.acme, "sales")
        await service.subject(self.acme, "alice", self.staff)
        await service.subject(self.acme, "bob", self.staff)
        await service.subject(self.acme, "carol", self.sales)
        await service.subject(self.globex, "dora")
        self.handbook = await service.document(self.acme, "handbook", self.staff)
        self.prices = await service.document(self.acme, "prices", self.sales)
        digests = {"model": MODEL, "tokenizer": TOKENIZER, "template": TEMPLATE, "policy": POLICY}
        for kind, digest in digests.items():
            self.others[kind] = await self._artefact(kind, digest, "2")
        self.adapter = await self._artefact("adapter", ADAPTER, "1")
        return self

    async def _artefact(self, kind: str, digest: str, revision: str) -> str:
        body = {"kind": kind, "name": kind, "revision": revision, "digest": digest}
        return str((await self.service.ask("POST", "/v1/artefacts", body))["id"])

    def alice(self, **source: str) -> Party:
        return Party(self.acme, "alice", source or {"group": "everyone"})

    async def document_of(self, version: str) -> str:
        documents = f"/v1/tenants/{self.acme}/documents"
        for document in (await self.service.ask("GET", documents))["items"]:
            path = f"{documents}/{document['id']}/versions"
            if version in {v["id"] for v in (await self.service.ask("GET", path))["items"]}:
                return str(document["id"])
        raise AssertionError("no document has this version")

    async def second_version(self) -> str:
        document = await self.document_of(self.handbook)
        body = {"content_digest": "2" * 64, "group": self.staff}
        path = f"/v1/tenants/{self.acme}/documents/{document}/versions"
        return str((await self.service.ask("POST", path, body))["id"])


async def subject(house: House) -> Case:
    bob = Party(house.acme, "bob", {"group": "everyone"})
    return Case("subject", "alice", house.alice(), bob, {"tenant": house.acme})


async def membership(house: House) -> Case:
    bob = Party(house.acme, "bob", {"document": house.handbook})
    return Case(
        "membership", "alice", house.alice(document=house.handbook), bob, {"group": house.staff}
    )


async def group(house: House) -> Case:
    carol = Party(house.acme, "carol", {"document": house.prices})
    return Case("group", house.staff, house.alice(document=house.handbook), carol)


async def document_version(house: House) -> Case:
    kept = await house.second_version()
    return Case(
        "document_version",
        house.handbook,
        house.alice(document=house.handbook),
        house.alice(document=kept),
    )


async def document(house: House) -> Case:
    carol = Party(house.acme, "carol", {"document": house.prices})
    return Case(
        "document",
        await house.document_of(house.handbook),
        house.alice(document=house.handbook),
        carol,
    )


def artefact(kind: str) -> Callable[[House], Awaitable[Case]]:
    async def case(house: House) -> Case:
        other = house.alice()
        other.artefacts = {kind: house.others[kind]}
        return Case(kind, house.service.artefacts[kind], house.alice(), other)

    return case


async def adapter(house: House) -> Case:
    adapted = house.alice()
    adapted.artefacts, adapted.adapter = {"adapter": house.adapter}, ADAPTER
    return Case("adapter", house.adapter, adapted, house.alice())


async def tenant(house: House) -> Case:
    dora = Party(house.globex, "dora", {"group": "everyone"})
    return Case("tenant", house.acme, house.alice(), dora)


AXES: dict[str, Callable[[House], Awaitable[Case]]] = {
    "subject": subject,
    "membership": membership,
    "group": group,
    "document": document,
    "document_version": document_version,
    "model": artefact("model"),
    "adapter": adapter,
    "tokenizer": artefact("tokenizer"),
    "template": artefact("template"),
    "policy": artefact("policy"),
    "tenant": tenant,
}


async def granted(party: Party, service: RealService) -> RealGrant:
    grant = await party.ask(service)
    assert grant is not None
    assert grant.granted_tokens == len(PROMPT)
    return grant


@pytest.mark.parametrize("axis", AXES)
async def test_the_right_party_misses_after_and_another_still_hits(
    tmp_path: Path, axis: str
) -> None:
    async with real_service(tmp_path) as service:
        house = await House(service).build()
        case = await AXES[axis](house)
        victim, bystander = case.victim, case.bystander
        async with sidecar_of(service, tmp_path) as world:
            victim.engine = bystander.engine = await world.engine()
            for name, party in (("v", victim), ("b", bystander)):
                await party.save(f"{name}-save", await granted(party, service))
                assert await party.hit(f"{name}-before", await granted(party, service)) == WHOLE
            unused = await granted(victim, service)
            async with asyncio.timeout(20):
                done = await service.revoke(case.axis, case.target, **case.more)
            assert done["state"] == "in_force"
            assert [each["state"] for each in done["sidecars"]] == ["fenced"]
            # A grant minted before never serves after, nor does what was open go on.
            assert await victim.hit("v-unused", unused) == 0
            assert not (await victim.engine.load("v-before", 0, WHOLE)).ok
            anew = await victim.ask(service)
            assert anew is None or await victim.hit("v-anew", anew) == 0
            assert await bystander.hit("b-after", await granted(bystander, service)) == WHOLE
            restored = await bystander.engine.load("b-after", 0, WHOLE)
            assert restored.ok
            assert restored.blocks[0] == block_content(PROMPT, 0, 64)


async def test_a_revoked_sidecar_serves_nobody_and_another_serves_on(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(real_service(tmp_path, serving_lease_s=2))
        house = await House(service).build()
        victim, bystander = house.alice(), house.alice()
        worlds = []
        for name, party in (("a", victim), ("b", bystander)):
            (tmp_path / name).mkdir()
            world = await stack.enter_async_context(sidecar_of(service, tmp_path / name))
            party.engine = await world.engine()
            await party.save(f"{name}-save", await granted(party, service))
            assert await party.hit(f"{name}-before", await granted(party, service)) == WHOLE
            worlds.append(world)
        unused = await granted(victim, service)
        async with asyncio.timeout(20):
            done = await service.revoke("sidecar", worlds[0].sidecar.enrolled.sidecar)
        assert done["state"] == "in_force"
        assert [each["sidecar"] for each in done["sidecars"]] == [
            worlds[0].sidecar.enrolled.sidecar
        ]
        assert await victim.hit("a-unused", unused) == 0
        assert await victim.hit("a-anew", await granted(victim, service)) == 0
        assert await bystander.hit("b-after", await granted(bystander, service)) == WHOLE
