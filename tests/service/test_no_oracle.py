"""Absent, denied, revoked and corrupt look alike from outside, by the clock as well."""

from __future__ import annotations

import itertools
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest

from policy import grants
from service.auth.tokens import Role
from service.keys.models import Component
from service.settings import ServiceSettings
from strongroom.identity import ComponentId, NamespaceId
from tests.service.house import Service
from tests.service.sidecar_party import enrolled
from tests.service.test_grants import TOKENS, Scene
from tests.timing import Ask, told_apart

GROUPS: Final = 4
SHARED_MEMORY: Final = Path("/dev/shm")
SQLITE: Final = "sqlite+aiosqlite:///"


def fresh() -> str:
    return secrets.token_hex(16)


@pytest.fixture
def settings(settings: ServiceSettings) -> Iterator[ServiceSettings]:
    """No limits of rate; and SQLite in memory, since a disk only hides what is to be seen."""
    url = settings.database
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as home:
        if url.startswith(SQLITE):
            url = SQLITE + shutil.copy(url.removeprefix(SQLITE), home)
        limits = ("principal", "tenant", "sidecar")
        unlimited = {f"{name}_requests_per_min": 10_000_000 for name in limits}
        yield settings.model_copy(update={"database_url": url, **unlimited})


def absent_ids() -> Iterator[str]:
    """As many, which nobody has registered."""
    return itertools.cycle([fresh() for _ in range(GROUPS)])


async def denied_documents(scene: Scene) -> Iterator[str]:
    """Documents that bob may not see, of several groups, over and over."""
    ids = []
    for number in range(GROUPS):
        group = await scene.service.group(scene.tenant, f"closed-{number}")
        ids.append(await scene.service.document(scene.tenant, f"closed-{number}", group))
    return itertools.cycle(ids)


async def test_the_clock_does_not_tell_a_denied_document_from_an_absent_one(
    service: Service,
) -> None:
    scene = await Scene(service).set_up()
    closed = await denied_documents(scene)

    def asks(document: Callable[[], str]) -> Ask:
        async def ask() -> None:
            spans = [{"end": 30, "group": "everyone"}, {"end": TOKENS, "document": document()}]
            answer = await scene.bob.post("/v1/grants", scene.body(spans=spans))
            assert answer["granted_tokens"] == 30

        return ask

    told = await told_apart(asks(closed.__next__), asks(absent_ids().__next__))
    assert told.is_a_guess, told


async def test_the_clock_does_not_tell_why_a_key_is_not_leased(service: Service) -> None:
    scene = await Scene(service).set_up()
    other = await service.tenant("other")
    party = await enrolled(service, other)
    here = await enrolled(service, scene.tenant, name="node-2")
    answer, claims = await scene.grant(scene.alice)

    def absent() -> str:
        spans = tuple(
            msgspec.structs.replace(span, namespace=NamespaceId(secrets.token_hex(32)))
            for span in claims.spans
        )
        return grants.mint(msgspec.structs.replace(claims, spans=spans), service.runtime.signer)

    nowhere = absent()

    async def denied() -> None:
        assert (await party.key_lease(answer["grant"])).status_code == 403

    async def unknown() -> None:
        assert (await here.key_lease(nowhere)).status_code == 403

    told = await told_apart(denied, unknown)
    assert told.is_a_guess, told


async def test_the_clock_does_not_tell_anothers_artefact_from_an_absent_one(
    service: Service,
) -> None:
    tenant, other = await service.tenant(), await service.tenant("other")
    foreign = (await service.artefacts(scope=other)).model
    unknown = fresh()
    admin = service.party("admin", tenant, Role.TENANT_ADMIN)

    def asks(artefact: Callable[[], str]) -> Ask:
        async def ask() -> None:
            answer = await admin.ask("GET", f"/v1/artefacts/{artefact()}")
            assert answer.status_code == 404

        return ask

    told = await told_apart(asks(lambda: foreign), asks(lambda: unknown))
    assert told.is_a_guess, told


async def test_a_damaged_secret_looks_like_an_absent_document_and_gets_no_key(
    service: Service,
) -> None:
    scene = await Scene(service).set_up()
    party = await enrolled(service, scene.tenant)
    good, _ = await scene.grant(scene.alice)
    assert good["granted_tokens"] == TOKENS
    assert (await party.key_lease(good["grant"])).is_success
    async with service.runtime.database.writers.begin() as session:
        row = await session.get_one(Component, ComponentId(scene.document))
        assert row.wrapped is not None
        row.wrapped = row.wrapped[:-1] + bytes([row.wrapped[-1] ^ 1])
    absent = [{"end": 30, "group": "everyone"}, {"end": TOKENS, "document": fresh()}]
    damaged = await scene.alice.ask("POST", "/v1/grants", scene.body())
    unknown = await scene.alice.ask("POST", "/v1/grants", scene.body(spans=absent))
    assert shape(damaged) == shape(unknown)
    assert damaged.json()["granted_tokens"] == 30
    forged = await party.key_lease(good["grant"][:-8] + "A" * 8)
    refused = await party.key_lease(good["grant"])
    assert refused.status_code == forged.status_code == 403
    assert refused.content == forged.content
    assert shape(refused) == shape(forged)


def shape(answer: httpx.Response) -> tuple[object, ...]:
    """Status, headers but for what counts down, and the size of the body."""
    headers = {name: value for name, value in answer.headers.items() if name != "ratelimit"}
    return answer.status_code, headers, len(answer.content)
