"""Whatever the OpenAPI document allows, and what it does not, asked by every role: no answer is a
5xx, each has a status, a content type and a body that the document names, and none tells more
than a problem does."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation

from service.auth.tokens import Role
from strongroom.problem import MEDIA_TYPE
from tests.service.house import Service
from tests.service.sidecar_party import SidecarParty, enrolled

Case = schemathesis.Case[Any]
Operation = APIOperation[Any, Any, Any, Any]

EXAMPLES: Final = 5
NEVER_ENDS: Final = {"/v1/sidecars/self/invalidations/stream"}
"""A stream of server-sent events does not end by itself."""
LASTS_S: Final = 120.0
"""Of the processor: what others do meanwhile on the machine says nothing."""
ROLES: Final = {
    "operator": (Role.OPERATOR, False),
    "auditor": (Role.AUDITOR, False),
    "gateway": (Role.GATEWAY, False),
    "tenant_admin": (Role.TENANT_ADMIN, True),
    "tenant_auditor": (Role.AUDITOR, True),
    "subject": (Role.SUBJECT, True),
}
SIDECAR: Final = "sidecar"
NOBODY: Final = "nobody"


@dataclass(frozen=True, slots=True)
class Asked:
    """Everybody who asks, and one tenant that there is."""

    service: Service
    document: dict[str, Any]
    tenant: str
    tokens: dict[str, str]
    sidecar: SidecarParty

    def request(self, case: Case, who: str) -> httpx.Request:
        """The case as `who` sends it."""
        given = case.as_transport_kwargs(base_url="http://service")
        headers = dict(given.pop("headers", None) or {})
        headers.pop("Authorization", None)
        given.pop("cookies", None)
        if isinstance(given.get("data"), bytes | str):
            given["content"] = given.pop("data")
        if who in self.tokens:
            headers["Authorization"] = f"Bearer {self.tokens[who]}"
        request = self.service.http.build_request(**given, headers=headers)
        if who == SIDECAR:
            target = request.url.raw_path.decode("ascii")
            proof = self.sidecar.proof(
                request.method,
                target,
                b"",
                body_sha256=hashlib.sha256(request.read()).hexdigest(),
            )
            request.headers["Authorization"] = f"Sidecar {proof}"
        return request

    def wrong(self, case: Case, who: str, answer: httpx.Response) -> str | None:
        """What of this answer the document does not say."""
        where = f"{case.method} {case.path} by {who}: {answer.status_code}"
        if answer.status_code >= 500:
            return f"{where} {answer.text}"
        kind = answer.headers.get("content-type", "").partition(";")[0]
        operation = self.document["paths"][case.operation.path][case.method.lower()]
        documented = operation["responses"].get(str(answer.status_code))
        if documented is None:
            # A value in the path that is a path itself names another route, or none.
            if answer.status_code in {404, 405} and kind == MEDIA_TYPE and _leads_away(case):
                return None
            return f"{where} is not documented"
        content = documented.get("content", {})
        if not content and not answer.content:
            return None
        if kind not in content:
            return f"{where} has the content type {kind!r}"
        if kind in {"application/json", MEDIA_TYPE}:
            schema = content[kind]["schema"] | {"components": self.document["components"]}
            validator = jsonschema.Draft202012Validator(schema)
            for error in validator.iter_errors(answer.json()):
                return f"{where} has another shape: {error.message}"
        return None


def _leads_away(case: Case) -> bool:
    values = (case.path_parameters or {}).values()
    return any("/" in unquote(str(value)) or str(value) in {"", ".", ".."} for value in values)


def _cases(operation: Operation, mode: GenerationMode) -> list[Case]:
    cases: list[Case] = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def collect(case: Case) -> None:
        cases.append(case)

    # Nothing can be wrong with a request that takes nothing.
    with contextlib.suppress(Unsatisfiable):
        collect()
    return cases


async def _ask(asked: Asked, case: Case, who: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in who:
        answer = await asked.service.http.send(asked.request(case, name))
        told = asked.wrong(case, name, answer)
        if told is not None:
            found.append(told)
    return found


@pytest.fixture
async def asked(service: Service) -> Asked:
    tenant = await service.tenant()
    await service.subject(tenant, "alice")
    await service.artefacts()
    tokens = {
        name: service.token("alice", tenant if of_tenant else "", role)
        for name, (role, of_tenant) in ROLES.items()
    }
    document = service.app.openapi()
    return Asked(service, document, tenant, tokens, await enrolled(service))


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
async def test_no_request_of_anybody_makes_the_service_fail_or_say_what_it_should_not(
    asked: Asked, dialect: str, mode: GenerationMode
) -> None:
    began_s = time.process_time()
    # What a database may make of a value is seen by the operator, who gets everywhere.
    everybody = (*ROLES, SIDECAR, NOBODY)
    schema = schemathesis.openapi.from_dict(asked.document)
    wrong: list[str] = []
    operations = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.path in NEVER_ENDS:
            continue
        proven = {next(iter(each)) for each in operation.definition.raw.get("security", [])}
        for number, case in enumerate(_cases(operation, mode)):
            # Half of them name the tenant that there is, so that more than its absence answers.
            if number % 2 and "tenant" in (case.path_parameters or {}):
                case.path_parameters["tenant"] = asked.tenant
            if dialect == "sqlite":
                who: Sequence[str] = everybody
            else:
                who = (SIDECAR,) if "sidecar" in proven else ("operator",)
            wrong += await _ask(asked, case, who)
        operations += 1
    assert sorted(set(wrong)) == []
    assert operations > 30
    assert time.process_time() - began_s < LASTS_S
