"""The one shape of an error over HTTP: problem details (RFC 9457), of service and sidecar alike.

`type` is `urn:strongroom:<code>`, `title` the status in words. `field` and `limit` are there
where an input was at fault. A detail never repeats the input, which may hold a secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

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
    errors: Sequence[Mapping[str, str | int]] = (),
) -> dict[str, Any]:
    """The members of one problem document, in their order.

    `errors` are what is wrong one by one, where more than one thing may be.
    """
    document: dict[str, Any] = {
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
    if errors:
        document["errors"] = [dict(error) for error in errors]
    return document


def encode_problem(document: Mapping[str, Any]) -> bytes:
    """As it is sent: JSON in UTF-8."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
