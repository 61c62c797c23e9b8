"""One shape of an error, for service and sidecar."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

from service.http_errors import problem as of_service
from sidecar.operations.door import problem as of_sidecar
from strongroom.problem import MEDIA_TYPE, encode_problem, problem_document

ROOT = Path(__file__).parents[2]


def test_a_document_holds_what_rfc_9457_names_and_nothing_that_is_not_said() -> None:
    bare = problem_document(HTTPStatus.NOT_FOUND, "missing", "there is nothing here")
    assert list(bare) == ["type", "title", "status", "detail", "code"]
    full = problem_document(HTTPStatus.CONFLICT, "conflict", "no", field="name", limit=0)
    assert (full["type"], full["title"]) == ("urn:strongroom:conflict", "Conflict")
    assert (full["field"], full["limit"]) == ("name", 0)
    assert json.loads(encode_problem(full)) == full


def test_service_and_sidecar_answer_with_the_same_document() -> None:
    service = of_service(HTTPStatus.CONFLICT, "conflict", "no", field="name", limit=7)
    sidecar = of_sidecar(HTTPStatus.CONFLICT, "conflict", "no", field="name", limit=7)
    assert bytes(service.body) == sidecar.body
    assert service.media_type == sidecar.kind == MEDIA_TYPE


def test_the_shape_is_written_down_once() -> None:
    rooms = ("service", "sidecar", "cli", "policy", "storage", "strongroom")
    writers = [
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if "urn:strongroom:{" in path.read_text()
        or '"application/problem+json"' in path.read_text()
    ]
    assert writers == ["strongroom/problem.py"]
