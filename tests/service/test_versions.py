"""A route that goes says so in its answers and in the document, and works until it is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from service import http_errors, versions
from service.app import create_app
from service.http_headers import AnswerHeaders
from service.settings import read_settings
from service.versions import DEPRECATED, Deprecation
from strongroom.errors import Missing, Misuse

SINCE = datetime(2027, 1, 1, tzinfo=UTC)
SUNSET = SINCE + timedelta(days=200)
OLD = {"GET /v1/things/{thing}": Deprecation(SINCE, SUNSET, "/v2/things/{thing}")}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    http_errors.install(app)
    versions.install(app, OLD)
    app.add_middleware(AnswerHeaders)
    router = APIRouter(prefix="/v1/things")

    @router.get("/{thing}")
    async def read(thing: str) -> str:
        if thing == "none":
            raise Missing("there is no such thing")
        return thing

    @router.post("/{thing}")
    async def write(thing: str) -> str:
        return thing

    app.include_router(router)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client


async def test_answers_and_problems_of_a_deprecated_route_say_until_when(
    http: httpx.AsyncClient,
) -> None:
    for thing, status in (("one", 200), ("none", 404)):
        answer = await http.get(f"/v1/things/{thing}")
        assert answer.status_code == status
        assert answer.headers["deprecation"] == f"@{int(SINCE.timestamp())}"
        assert parsedate_to_datetime(answer.headers["sunset"]) == SUNSET
        assert answer.headers["link"] == '</v2/things/{thing}>; rel="successor-version"'


async def test_its_other_methods_say_nothing(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/things/one")
    assert answer.status_code == 200
    assert not {"deprecation", "sunset"} & set(answer.headers)


def test_the_document_marks_it_and_nothing_else() -> None:
    document: dict[str, Any] = {"paths": {"/v1/things/{thing}": {"get": {}, "post": {}}}}
    versions.mark(document, OLD)
    assert document["paths"]["/v1/things/{thing}"] == {
        "get": {"deprecated": True, "x-sunset": SUNSET.date().isoformat()},
        "post": {},
    }
    with pytest.raises(Misuse):
        versions.mark({"paths": {}}, OLD)


@pytest.mark.parametrize(
    ("since", "sunset"),
    [
        (SINCE, SINCE + timedelta(days=179)),
        (SINCE.replace(tzinfo=None), SUNSET),
        (SINCE, SUNSET.replace(tzinfo=None)),
    ],
)
def test_callers_are_given_half_a_year(since: datetime, sunset: datetime) -> None:
    with pytest.raises(Misuse):
        Deprecation(since, sunset, "/v2/things")


def test_every_route_but_health_is_under_a_version(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    app = create_app(read_settings({}, state_directory=tmp_path_factory.mktemp("state") / "s"))
    paths = set(app.openapi()["paths"])
    assert {path for path in paths if not path.startswith("/v1/")} == {"/healthz", "/readyz"}
    for route in DEPRECATED:
        assert route.partition(" ")[2] in paths
