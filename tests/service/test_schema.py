"""Whatever the OpenAPI document allows, and what it does not: no answer is a 5xx, and none
tells more than a problem does."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation

from strongroom.problem import MEDIA_TYPE
from tests.service.house import Service

Case = schemathesis.Case[Any]
Operation = APIOperation[Any, Any, Any, Any]

EXAMPLES = 8
NEVER_ENDS = {"/v1/sidecars/self/invalidations/stream"}
"""A stream of server-sent events does not end by itself."""


async def _fuzz(service: Service, operation: Operation, mode: GenerationMode) -> list[str]:
    """What went wrong with some requests of `operation`."""
    wrong: list[str] = []
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
    for case in cases:
        given = case.as_transport_kwargs(base_url="http://service")
        headers = {
            **(given.pop("headers", None) or {}),
            "Authorization": f"Bearer {service.operator.token}",
        }
        given.pop("cookies", None)
        if isinstance(given.get("data"), bytes | str):
            given["content"] = given.pop("data")
        response = await service.http.request(**given, headers=headers)
        if response.status_code >= 500:
            wrong.append(f"{case.method} {case.path}: {response.status_code} {response.text}")
        elif response.status_code >= 400 and response.headers["content-type"] != MEDIA_TYPE:
            wrong.append(f"{case.method} {case.path}: {response.headers['content-type']}")
    return wrong


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
async def test_no_request_makes_the_service_fail(service: Service, mode: GenerationMode) -> None:
    await service.tenant()
    await service.artefacts()
    schema = schemathesis.openapi.from_dict(service.app.openapi())
    wrong: list[str] = []
    asked = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.path in NEVER_ENDS:
            continue
        wrong += await _fuzz(service, operation, mode)
        asked += 1
    assert not wrong
    assert asked > 30
