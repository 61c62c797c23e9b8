"""The one shape of an error over HTTP: problem details (RFC 9457), of service and sidecar alike.

`type` is `urn:strongroom:<code>`, `title` the status in words. `field` and `limit` are there
where an input was at fault. A detail never repeats the input, which may hold a secret.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Final

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:strongroom:"
CHALLENGE: Final = 'Bearer realm="strongroom"'
"""`WWW-Authenticate` of every 401."""


def problem_document(
    status: HTTPStatus,
    code: str,
    detail: str,
    *,
    field: str | None = None,
    limit: str | int | None = None,
) -> dict[str, str | int]:
    """The members of one problem document, in their order."""
    document: dict[str, str | int] = {
        "type": f"{TYPE_PREFIX}{code}",
        "title": status.phrase,
        "status": int(status),
        "detail": detail,
        "code": code,
    }
    if field is not None:
        document["field"] = field
    if limit is not None:
        document["limit"] = limit
    return document


def encode_problem(document: dict[str, str | int]) -> bytes:
    """As it is sent: JSON in UTF-8."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
