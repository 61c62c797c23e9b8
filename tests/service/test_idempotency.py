"""The same key and the same request get the same answer, also at once; another request does not."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from service.db.base import now
from service.registry.idempotency import KEPT
from service.registry.models import Artefact, IdempotentAnswer
from service.revocation.models import Revocation
from tests.service.house import Service, digest


def artefact(revision: str = "1") -> dict[str, Any]:
    return {
        "kind": "model",
        "name": "llama",
        "revision": revision,
        "digest": digest(revision),
        "scope": "shared",
    }


async def at_once(
    service: Service, path: str, bodies: list[dict[str, Any]], key: str = "k"
) -> list[httpx.Response]:
    headers = {"Idempotency-Key": key}
    asks = [service.operator.ask("POST", path, body, headers=headers) for body in bodies]
    return list(await asyncio.gather(*asks))


async def test_many_at_once_get_one_answer_and_one_artefact(service: Service) -> None:
    answers = await at_once(service, "/v1/artefacts", [artefact()] * 8)
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.text for answer in answers}) == 1
    async with service.runtime.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(Artefact)) == 1


async def test_of_different_requests_at_once_under_one_key_one_is_made(service: Service) -> None:
    bodies = [artefact(str(number)) for number in range(6)]
    answers = await at_once(service, "/v1/artefacts", bodies)
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 5
    refused = [answer.json() for answer in answers if answer.status_code == 409]
    assert {problem["field"] for problem in refused} == {"Idempotency-Key"}
    async with service.runtime.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(Artefact)) == 1


async def test_a_revocation_asked_for_many_times_at_once_is_one(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "staff")
    body = {"axis": "group", "target": group, "tenant": tenant, "reason": "closed"}
    answers = await at_once(service, "/v1/revocations", [body] * 5)
    assert {answer.status_code for answer in answers} <= {200, 201, 202}, answers[0].text
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = await at_once(service, "/v1/revocations", [{**body, "reason": "another"}])
    assert other[0].status_code == 409
    async with service.runtime.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(Revocation)) == 1


async def test_a_key_is_free_again_after_a_day_and_its_answer_is_gone(service: Service) -> None:
    (first,) = await at_once(service, "/v1/artefacts", [artefact("1")])
    (refused,) = await at_once(service, "/v1/artefacts", [artefact("2")])
    assert (first.status_code, refused.status_code) == (201, 409)
    async with service.runtime.database.writers() as session, session.begin():
        old = now() - KEPT - timedelta(seconds=1)
        await session.execute(update(IdempotentAnswer).values(created_at=old))
    (second,) = await at_once(service, "/v1/artefacts", [artefact("2")])
    assert second.status_code == 201, second.text
    async with service.runtime.sessions() as session:
        rows = (await session.scalars(select(IdempotentAnswer))).all()
    assert [second.json()["id"] in row.answer for row in rows] == [True]


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize("key", ["", "with space", "x" * 129, "n\u00e4in"])
async def test_a_key_is_plain_and_short(service: Service, key: str) -> None:
    answer = await service.http.post(
        "/v1/artefacts",
        json=artefact(),
        headers={
            b"Authorization": f"Bearer {service.operator.token}".encode(),
            b"Idempotency-Key": key.encode("latin-1"),
        },
    )
    assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key")
