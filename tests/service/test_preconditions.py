"""ETag, If-Match and If-None-Match over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Response

from service import http_errors
from service.preconditions import (
    Expected,
    IfMatch,
    IfNoneMatch,
    MaybeIfMatch,
    Stale,
    etag_of,
    parse_tags,
)
from strongroom.errors import Misuse
from strongroom.problem import MEDIA_TYPE

NOW = etag_of("policy", "a" * 32, 7)
OLD = etag_of("policy", "a" * 32, 6)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """An application with one thing, whose state is revision 7."""
    app = FastAPI()
    http_errors.install(app)

    @app.get("/thing", response_model=None)
    async def read(known: IfNoneMatch) -> Response:
        if known.shown(NOW):
            return Response(status_code=304, headers={"ETag": NOW})
        return Response("{}", headers={"ETag": NOW}, media_type="application/json")

    @app.put("/thing")
    async def replace(expected: IfMatch) -> None:
        expected.check(NOW)

    @app.delete("/thing")
    async def remove(expected: MaybeIfMatch) -> None:
        expected.check(NOW)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (NOW, 200, None),
        (f"{OLD}, {NOW}", 200, None),
        ("*", 200, None),
        (OLD, 412, "precondition_failed"),
        (f"W/{NOW}", 412, "precondition_failed"),
        ("7", 422, "misuse"),
        (f'{NOW}, "', 422, "misuse"),
        (None, 428, "precondition_required"),
    ],
)
async def test_a_change_is_made_only_to_the_state_that_was_seen(
    http: httpx.AsyncClient, sent: str | None, status: int, code: str | None
) -> None:
    answer = await http.put("/thing", headers={} if sent is None else {"If-Match": sent})
    assert answer.status_code == status, answer.text
    if code is not None:
        assert answer.headers["content-type"] == MEDIA_TYPE
        assert (answer.json()["code"], answer.json()["field"]) == (code, "If-Match")


async def test_where_the_header_may_be_left_out_it_still_binds(http: httpx.AsyncClient) -> None:
    assert (await http.delete("/thing")).status_code == 200
    assert (await http.delete("/thing", headers={"If-Match": NOW})).status_code == 200
    assert (await http.delete("/thing", headers={"If-Match": OLD})).status_code == 412


async def test_what_the_caller_has_is_not_sent_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/thing")
    assert first.headers["etag"] == NOW
    for sent, status in ((NOW, 304), (f"W/{NOW}", 304), ("*", 304), (OLD, 200)):
        answer = await http.get("/thing", headers={"If-None-Match": sent})
        assert answer.status_code == status
        assert answer.content == (b"" if status == 304 else b"{}")


def test_a_tag_names_one_state() -> None:
    assert etag_of("policy", "a" * 32, 7) == NOW
    assert len({NOW, OLD, etag_of("policy", "a" * 31, "a7"), etag_of("rule", "a" * 32, 7)}) == 4


def test_nothing_matches_what_is_not_there() -> None:
    with pytest.raises(Stale):
        parse_tags("*", "If-Match").check(None)
    Expected(None).check(None)
    with pytest.raises(Misuse):
        parse_tags('*, "a"', "If-Match")
