"""Errors as problem details (RFC 9457). The only module that knows status codes.

Every answer that is no success has one shape: type, title, status, detail, `code`, and where
an input was at fault `field` and `limit`. What was not foreseen is a plain 500: its cause goes
to the log, never to the caller. Details never repeat the input, which may hold a secret.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from policy.documents import PolicyInvalid
from service.auth.errors import Unauthenticated
from service.policies.errors import TOLD_MAX, PolicyTestsFailed
from service.preconditions import Stale, Unconditional
from service.rates import TooMany
from strongroom.errors import (
    Conflict,
    Corrupt,
    Missing,
    Misuse,
    Overloaded,
    QuotaExceeded,
    Refused,
    StrongroomError,
    Unavailable,
)
from strongroom.problem import CHALLENGE, MEDIA_TYPE, problem_document

_DATA_EXCEPTION: Final = "22"
"""The class of SQLSTATE for values that cannot be stored, such as text with a NUL."""
_log = logging.getLogger("strongroom.service")

# The first class that fits decides, so subclasses come before what they derive from.
_STATUS: Final[tuple[tuple[type[StrongroomError], HTTPStatus], ...]] = (
    (Unauthenticated, HTTPStatus.UNAUTHORIZED),
    (Refused, HTTPStatus.FORBIDDEN),
    (Missing, HTTPStatus.NOT_FOUND),
    (Stale, HTTPStatus.PRECONDITION_FAILED),
    (Conflict, HTTPStatus.CONFLICT),
    (Unconditional, HTTPStatus.PRECONDITION_REQUIRED),
    (Misuse, HTTPStatus.UNPROCESSABLE_ENTITY),
    (QuotaExceeded, HTTPStatus.TOO_MANY_REQUESTS),
    (TooMany, HTTPStatus.TOO_MANY_REQUESTS),
    (Overloaded, HTTPStatus.SERVICE_UNAVAILABLE),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (Corrupt, HTTPStatus.INTERNAL_SERVER_ERROR),
)
_HTTP_CODES: Final = {
    HTTPStatus.BAD_REQUEST: Misuse.code,
    HTTPStatus.UNAUTHORIZED: Unauthenticated.code,
    HTTPStatus.FORBIDDEN: Refused.code,
    HTTPStatus.NOT_FOUND: Missing.code,
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "media_type",
}


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    type: str = Field(examples=["urn:strongroom:missing"])
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["there is no such tenant"])
    code: str = Field(examples=["missing"])
    field: str | None = Field(default=None, examples=["tenant"])
    limit: str | int | None = None
    errors: list[dict[str, str | int]] | None = Field(
        default=None, examples=[[{"line": 7, "field": "effect", "detail": "must be allow or deny"}]]
    )
    """What is wrong one by one: of a policy document its lines, of failing tests their cases."""


def _documented(description: str, *, wait: bool = False) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if wait:
        answer["headers"] = {
            "Retry-After": {
                "description": "Whole seconds to wait.",
                "schema": {"type": "integer", "minimum": 1},
            }
        }
    return answer


PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    400: _documented("The body cannot be read."),
    401: _documented("The caller did not prove who it is."),
    403: _documented("The caller's roles do not allow this."),
    404: _documented("It is not there, or not yours: the two look alike."),
    409: _documented("It contradicts what is already there."),
    413: _documented("The body is too large."),
    415: _documented("A body is JSON, and says so."),
    422: _documented("A value could never be accepted; `field` names it."),
    429: _documented("Too many requests, or a quota is used up: see `Retry-After`.", wait=True),
    503: _documented("A bound was reached or a part is away: try again.", wait=True),
}
"""What any route may answer besides its success, for the OpenAPI document."""
CONDITIONAL: Final[dict[int | str, dict[str, Any]]] = {
    412: _documented("It was changed since: read it again."),
    428: _documented("This change needs an `If-Match`."),
}
"""What a route with an `If-Match` may answer besides (`service.preconditions`)."""


def problem(
    status: HTTPStatus,
    code: str,
    detail: str,
    *,
    field: str | None = None,
    limit: str | int | None = None,
    headers: dict[str, str] | None = None,
    errors: Sequence[Mapping[str, str | int]] = (),
) -> JSONResponse:
    """One problem document as a response."""
    body = problem_document(status, code, detail, field=field, limit=limit, errors=errors)
    extra = dict(headers or {})
    if status is HTTPStatus.UNAUTHORIZED:
        extra["WWW-Authenticate"] = CHALLENGE
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        extra.setdefault("Retry-After", "1")
    return JSONResponse(body, int(status), headers=extra, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of `app` as a problem document."""
    app.add_exception_handler(StrongroomError, _on_strongroom)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DBAPIError, _on_database)
    app.add_exception_handler(PoolTimeout, _on_database)
    app.add_exception_handler(Exception, _on_unforeseen)


async def _on_strongroom(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StrongroomError)
    status = next(
        (status for kind, status in _STATUS if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    if status is HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("%s %s failed: %s", request.method, request.url.path, error.code)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, TooMany) else None
    return problem(
        status,
        error.code,
        error.message,
        field=error.field,
        limit=error.limit,
        headers=headers,
        errors=_listed(error),
    )


def _listed(error: StrongroomError) -> list[dict[str, str | int]]:
    match error:
        case PolicyInvalid():
            return [
                {"line": each.line, "field": each.field, "detail": each.detail}
                for each in error.errors
            ]
        case PolicyTestsFailed():
            return [
                {
                    "case": each.case.name,
                    "expected": each.case.expect.value,
                    "detail": each.reason,
                }
                for each in error.failures[:TOLD_MAX]
            ]
        case _:
            return []


async def _on_validation(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return problem(
            HTTPStatus.BAD_REQUEST, Misuse.code, "the body is not valid JSON", field="body"
        )
    place = [str(part) for part in first["loc"]]
    field = ".".join(place[1:] if len(place) > 1 else place)
    context = first.get("ctx", {})
    limits = ("max_length", "min_length", "le", "ge", "lt", "gt", "pattern", "expected")
    limit = next((context[name] for name in limits if name in context), None)
    return problem(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        Misuse.code,
        f"{field}: {first['msg']}",
        field=field,
        limit=limit if isinstance(limit, str | int) or limit is None else str(limit),
    )


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    detail = str(error.detail) if error.detail else status.phrase
    headers = dict(error.headers) if error.headers else None
    return problem(status, _HTTP_CODES.get(status, "http_error"), detail, headers=headers)


async def _on_database(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, IntegrityError):
        # Repositories turn the conflicts that they foresee into their own; this is a race.
        return problem(HTTPStatus.CONFLICT, Conflict.code, "this was changed by another request")
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    if isinstance(error, DataError) or state.startswith(_DATA_EXCEPTION):
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, Misuse.code, "a value cannot be stored")
    _log.error("%s %s: database error", request.method, request.url.path, exc_info=error)
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, Unavailable.code, "the database does not answer")


async def _on_unforeseen(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, StrongroomError.code, "the service failed")


class BodyDoor:
    """ASGI middleware: what a body has to be before anybody parses it.

    More than `bytes_max` bytes are refused as they come in, announced or not; on the paths in
    `smaller`, which anybody may call, less is enough. A body that is not said to be JSON is
    refused too.
    """

    def __init__(self, app: ASGIApp, bytes_max: int, smaller: Mapping[str, int]) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._smaller = smaller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        bytes_max = min(self._bytes_max, self._smaller.get(scope["path"], self._bytes_max))
        detail = f"a body holds at most {bytes_max} bytes"
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > bytes_max:
            refusal = problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "body_too_large",
                detail,
                field="body",
                limit=bytes_max,
            )
            await refusal(scope, receive, send)
            return
        has_body = announced != b"0" or b"transfer-encoding" in headers
        if has_body and not _says_json(headers.get(b"content-type", b"")):
            refusal = problem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "media_type",
                "a body is JSON: say Content-Type: application/json",
                field="Content-Type",
            )
            await refusal(scope, receive, send)
            return
        taken = 0

        async def capped() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > bytes_max:
                    # Only an HTTPException passes through the framework's reading of bodies.
                    raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
            return message

        await self._app(scope, capped, send)


def _says_json(content_type: bytes) -> bool:
    essence = content_type.partition(b";")[0].strip().lower()
    return essence == b"application/json" or (
        essence.startswith(b"application/") and essence.endswith(b"+json")
    )
