"""The composed application: authentication everywhere, problems, limits, the OpenAPI document."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import text

from service.app import create_app
from service.auth.tokens import Role
from service.settings import ServiceSettings, read_settings
from strongroom.errors import Misuse
from strongroom.problem import MEDIA_TYPE
from tests.service.house import Party, Service

OPEN = {"/healthz", "/readyz", "/openapi.json"}
"""Says that it lives, and what it offers: nothing about anybody."""


def _concrete(path: str) -> str:
    for name in ("tenant", "group", "artefact", "document", "rule", "role", "revocation"):
        path = path.replace("{" + name + "}", "0" * 32)
    return path.replace("{", "").replace("}", "")


def _routes(service: Service) -> list[tuple[str, str]]:
    """Every method and path that is served, documented or not."""
    return [
        (method, context.path or "")
        for context in iter_route_contexts(service.app.routes)
        for method in sorted((context.methods or set()) - {"HEAD"})
    ]


async def test_every_route_refuses_a_caller_without_a_token(service: Service) -> None:
    asked = 0
    for method, path in _routes(service):
        if path in OPEN:
            continue
        response = await service.nobody.ask(method, _concrete(path), {})
        enrolling = (method, path) == ("POST", "/v1/sidecars")
        # Enrolment is proven by a join token in the body, which is looked at first.
        expected = {401, 422} if enrolling else {401}
        assert response.status_code in expected, (method, path, response.text)
        assert response.headers["content-type"] == MEDIA_TYPE
        asked += 1
    assert asked > 30


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_every_route_is_in_the_document(service: Service) -> None:
    documented = set(service.app.openapi()["paths"])
    assert {path for _, path in _routes(service)} - documented == {"/openapi.json"}


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_token_that_is_wrong_in_any_way_gets_one_answer(service: Service) -> None:
    good = service.token("root", "", Role.OPERATOR)
    head, body, tail = good.split(".")
    wrong = ("", "x", f"{head}.{body}.", f"{head}.{body}.{tail[:-4]}AAAA", good + "\u00e9")
    answers = set()
    for token in wrong:
        response = await service.http.get(
            "/v1/tenants", headers={b"Authorization": f"Bearer {token}".encode()}
        )
        answers.add((response.status_code, response.text))
    assert {status for status, _ in answers} == {401}
    assert len(answers) <= 2
    assert (await Party(service.http, good).ask("GET", "/v1/tenants")).status_code == 200


@pytest.mark.parametrize(
    ("role", "method", "path", "status"),
    [
        (Role.AUDITOR, "POST", "/v1/tenants", 403),
        (Role.GATEWAY, "POST", "/v1/tenants", 403),
        (Role.GATEWAY, "GET", "/v1/tenants", 403),
        (Role.AUDITOR, "GET", "/v1/tenants", 200),
        (Role.OPERATOR, "POST", "/v1/tenants", 201),
    ],
)
async def test_roles_bound_what_a_caller_may_ask(
    service: Service, role: Role, method: str, path: str, status: int
) -> None:
    party = service.party("someone", "", role)
    response = await party.ask(method, path, {"name": "acme"} if method == "POST" else None)
    assert response.status_code == status, response.text


async def test_a_body_over_the_limit_is_refused_whether_announced_or_not(
    settings: ServiceSettings, service: Service
) -> None:
    limit = settings.body_bytes_max
    big = json.dumps({"name": "x" * limit}).encode()

    async def pieces() -> Any:
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    for content in (big, pieces()):
        response = await service.http.post(
            "/v1/tenants",
            content=content,
            headers={
                "Authorization": f"Bearer {service.operator.token}",
                "Content-Type": "application/json",
            },
        )
        assert response.status_code == 413
        assert response.json()["code"] == "body_too_large"


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_body_announced_too_large_is_not_even_read(
    settings: ServiceSettings, service: Service
) -> None:
    read = 0

    async def pieces() -> Any:
        nonlocal read
        read += 1
        yield b"{}"

    response = await service.http.post(
        "/v1/tenants",
        content=pieces(),
        headers={"Content-Length": str(settings.body_bytes_max + 1)},
    )
    assert (response.status_code, read) == (413, 0)
    assert response.json()["limit"] == settings.body_bytes_max


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("content", "status", "field"),
    [
        (b"{", 400, "body"),
        (b"\xff\xfe", 400, "body"),
        (b"[" * 100_000, 400, None),
        (b"[]", 422, "body"),
        (b"{}", 422, "name"),
        (b'{"name": "acme", "admin": true}', 422, "admin"),
        (b'{"name": 7}', 422, "name"),
        (b'{"name": "with space"}', 422, "name"),
        (b'{"name": "nul\\u0000"}', 422, "name"),
        (b'{"name": "line\\n"}', 422, "name"),
        (b'{"name": "\\ud800"}', 422, "name"),
        (b'{"name": ""}', 422, "name"),
    ],
)
async def test_bad_bodies_are_problems_that_name_the_field(
    service: Service, content: bytes, status: int, field: str | None
) -> None:
    response = await service.http.post(
        "/v1/tenants",
        content=content,
        headers={
            "Authorization": f"Bearer {service.operator.token}",
            "Content-Type": "application/json",
        },
    )
    problem = response.json()
    assert response.status_code == status, problem
    assert response.headers["content-type"] == MEDIA_TYPE
    assert problem["status"] == status
    assert problem.get("field") == field


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 201),
        ("Application/JSON; charset=utf-8", 201),
        ("application/problem+json", 201),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/json", 415),
        ("", 415),
        (None, 415),
    ],
)
async def test_a_body_says_that_it_is_json(
    service: Service, content_type: str | None, status: int
) -> None:
    headers = {"Authorization": f"Bearer {service.operator.token}"}
    if content_type is not None:
        headers["Content-Type"] = content_type
    response = await service.http.post("/v1/tenants", content=b'{"name": "a"}', headers=headers)
    assert response.status_code == status, response.text
    if status == 415:
        assert response.headers["content-type"] == MEDIA_TYPE
        assert response.json()["field"] == "Content-Type"


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_whoever_has_proven_nothing_may_send_little(service: Service) -> None:
    body = {"join_token": "x" * 20_000, "name": "n", "signing_key": "k", "hpke_key": "k"}
    response = await service.nobody.ask("POST", "/v1/sidecars", body)
    assert (response.status_code, response.json()["limit"]) == (413, 16 * 1024)
    body["join_token"] = "x"
    assert (await service.nobody.ask("POST", "/v1/sidecars", body)).status_code == 422


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_no_answer_is_to_be_stored_or_guessed_at(service: Service) -> None:
    for path in ("/healthz", "/v1/tenants", "/v1/nothing", "/openapi.json"):
        for party in (service.operator, service.nobody):
            headers = (await party.ask("GET", path)).headers
            assert headers["cache-control"] == "no-store", path
            assert headers["x-content-type-options"] == "nosniff", path


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_path_or_method_that_is_not_there_is_a_problem(service: Service) -> None:
    missing = await service.operator.ask("GET", "/v1/nothing")
    wrong = await service.operator.ask("PUT", "/v1/tenants", {})
    assert (missing.status_code, missing.json()["code"]) == (404, "missing")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"] or "POST" in wrong.headers["allow"]
    for answer in (missing, wrong):
        assert answer.headers["content-type"] == MEDIA_TYPE


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_what_was_not_foreseen_tells_the_caller_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def explode(*args: Any) -> None:
        raise RuntimeError("canary in a stack")

    monkeypatch.setattr("service.tenancy.store.get_tenant", explode)
    with caplog.at_level(logging.ERROR):
        response = await service.operator.ask("GET", f"/v1/tenants/{'0' * 32}")
    assert response.status_code == 500
    assert response.json()["detail"] == "the service failed"
    assert "canary" not in response.text


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_the_problem_never_repeats_the_input(service: Service) -> None:
    canary = "canary-9f86d081"
    bodies: list[Any] = [{"name": f"{canary} "}, {canary: 1}, {"name": {canary: canary}}]
    for body in bodies[:1] + bodies[2:]:
        response = await service.operator.ask("POST", "/v1/tenants", body)
        assert response.status_code == 422
        assert canary not in response.text


async def test_liveness_and_readiness_need_no_token(service: Service) -> None:
    for path in ("/healthz", "/readyz"):
        response = await service.nobody.ask("GET", path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_a_database_that_fell_behind_is_not_ready_but_alive(service: Service) -> None:
    async with service.runtime.database.writers.begin() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '0000'"))
    ready = await service.nobody.ask("GET", "/readyz")
    assert ready.status_code == 503
    assert "migration 0000" in ready.json()["detail"]
    assert (await service.nobody.ask("GET", "/healthz")).status_code == 200


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_the_document_has_a_scheme_and_examples(service: Service) -> None:
    response = await service.nobody.ask("GET", "/openapi.json")
    document = response.json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = (method, path)
            assert operation.get("summary"), where
            assert operation.get("description"), where
            if path in OPEN:
                continue
            body = operation.get("requestBody")
            if body is not None:
                schema = body["content"]["application/json"]["schema"]
                name = schema["$ref"].rpartition("/")[2]
                full = document["components"]["schemas"][name]
                bare = "sidecars" in path or not full.get("required")
                assert bare or full.get("examples"), name


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_public_keys_are_those_that_sign(service: Service) -> None:
    keys = await service.operator.get("/v1/keys")
    kids = {key["use"]: key["kid"] for key in keys["keys"]}
    assert kids == {
        "service": service.runtime.signer.kid,
        "token": service.runtime.issuer.signer.kid,
    }


def test_a_wide_key_directory_stops_the_service(tmp_path: Path) -> None:
    settings = ServiceSettings(state_directory=tmp_path)
    (tmp_path / "keys").mkdir(mode=0o755)
    with pytest.raises(Misuse, match="chmod 0700"):
        create_app(settings)


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"STRONGROOM_SERVICE_BODY_BYTES": "1"}, "STRONGROOM_SERVICE_BODY_BYTES"),
        ({"STRONGROOM_SERVICE_GRANT_LIFE_S": "301"}, "grant_life_s"),
        ({"STRONGROOM_SERVICE_PORT": "http"}, "port"),
    ],
)
def test_an_unknown_or_impossible_setting_is_named(environment: dict[str, str], field: str) -> None:
    with pytest.raises(Misuse) as refusal:
        read_settings(environment)
    assert refusal.value.field == field


def test_settings_come_from_the_environment_and_values_win(tmp_path: Path) -> None:
    environment = {"STRONGROOM_SERVICE_PORT": "9000", "STRONGROOM_SERVICE_ISSUER": "acme"}
    settings = read_settings(environment, port=9001, state_directory=tmp_path)
    assert (settings.port, settings.issuer) == (9001, "acme")
    assert settings.database == f"sqlite+aiosqlite:///{tmp_path / 'strongroom.db'}"


async def test_no_connection_outlives_the_service(settings: ServiceSettings) -> None:
    from tests.service.house import running

    async with running(settings) as service:
        await service.tenant()
    with pytest.raises(RuntimeError):
        await service.http.get("/healthz")
    assert isinstance(service.http, httpx.AsyncClient)
