"""The operator's door: metrics, health, state, events, and clearing a breaker, over HTTP.

Rules:
- Off unless `metrics_listen` says where: a loopback address, or a Unix socket that is ours alone.
  Another address needs `metrics_beyond_loopback` in so many words, and a TLS proxy in front.
- `/metrics`, `/healthz`, `/readyz` and `/v1/state` hold counts, and ids of engines and tenants.
  Events and a breaker's evidence name requests too: over TCP they need the operator's token.
- Clearing needs the token everywhere. Without a token file nothing can be cleared here.
- A request brings no body. Every error is problem details (RFC 9457), and repeats no input.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from sidecar.degrade.conditions import Armed, Condition
from sidecar.degrade.watch import Watch
from sidecar.engines.server import listening
from sidecar.operations.metrics import CONTENT_TYPE, Snapshot, exposition
from sidecar.operations.view import state_of
from sidecar.record.events import json_lines
from strongroom.errors import (
    Conflict,
    Missing,
    Misuse,
    Refused,
    StrongroomError,
    Unavailable,
)
from strongroom.private_files import read_private
from strongroom.problem import CHALLENGE, MEDIA_TYPE, encode_problem, problem_document

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

EVENTS_PAGE_MAX: Final = 10_000
_TOKEN_BYTES_MAX: Final = 4096
_BREAKER = re.compile(r"/v1/breakers/([a-z_]{1,40})(/clear)?")
_JSON: Final = "application/json"
_STATUS: Final[tuple[tuple[type[StrongroomError], HTTPStatus], ...]] = (
    (Refused, HTTPStatus.FORBIDDEN),
    (Missing, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Misuse, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    status: HTTPStatus
    body: bytes
    kind: str
    headers: Mapping[str, str]


class Unproven(Refused):
    """The caller did not show the operator's token."""

    code = "unauthenticated"


class Operations:
    """An ASGI application over one sidecar. `local`: whoever connects runs as our own user."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        watch: Watch,
        token_file: Path | None,
        *,
        local: bool,
    ) -> None:
        self._snapshot = snapshot
        self._watch = watch
        self._token_file = token_file
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise Misuse("only HTTP is spoken here")
        try:
            answer = await self._answer(scope)
        except StrongroomError as error:
            answer = _problem_of(error)
        except Exception:  # noqa: BLE001 - the cause goes to the log, never to the caller
            _log.exception("a request to the operator's door failed")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            answer = problem(status, "error", "this failed; the log has the cause")
        headers = {
            "content-type": answer.kind,
            "content-length": str(len(answer.body)),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            **answer.headers,
        }
        await send(
            {
                "type": "http.response.start",
                "status": int(answer.status),
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, scope: Scope) -> Answer:
        method, path = scope["method"], scope["path"]
        breaker = _BREAKER.fullmatch(path)
        wanted = "POST" if breaker is not None and breaker[2] else "GET"
        known = breaker is not None or path in _PATHS
        if not known:
            raise Missing("there is nothing here")
        if method != wanted:
            return problem(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this is done by another method",
                headers={"allow": wanted},
            )
        if breaker is not None:
            return self._clear(breaker[1], scope) if breaker[2] else self._show(breaker[1], scope)
        match path:
            case "/healthz":
                return _json({"status": "ok"})
            case "/readyz":
                return self._ready()
            case "/v1/state":
                return _json(state_of(self._snapshot()))
            case "/v1/events":
                return await self._events(scope)
            case _:
                snapshot = self._snapshot()
                text = await asyncio.to_thread(exposition, snapshot)
                return Answer(HTTPStatus.OK, text, CONTENT_TYPE, {})

    def _ready(self) -> Answer:
        gate = self._snapshot().statistics.gate
        if gate.open:
            return _json({"status": "ready"})
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, Unavailable.code, gate.reason)

    async def _events(self, scope: Scope) -> Answer:
        if not self._local:
            self._prove(scope)
        query = parse_qs(scope["query_string"].decode("ascii", "replace"))
        after = _number(query, "after", 0, 2**62)
        limit = _number(query, "limit", 1000, EVENTS_PAGE_MAX)
        found = self._watch.events.after(after, limit)
        headers = {
            "strongroom-events-next": str(found[-1].seq if found else after),
            "strongroom-events-lost": "true" if self._watch.events.lost(after) else "false",
        }
        lines = await asyncio.to_thread(json_lines, found)
        return Answer(HTTPStatus.OK, lines, "application/x-ndjson", headers)

    def _show(self, name: str, scope: Scope) -> Answer:
        if not self._local:
            self._prove(scope)
        state = self._watch.breakers.states().get(_condition(name), Armed())
        trip = None if isinstance(state, Armed) else state.trip
        body = {
            "name": name,
            "state": type(state).__name__.lower(),
            "tripped_for": self._watch.breakers.tripped_for(_condition(name)),
            "trip": trip,
        }
        return Answer(HTTPStatus.OK, msgspec.json.encode(body), _JSON, {})

    def _clear(self, name: str, scope: Scope) -> Answer:
        self._prove(scope)
        self._watch.breakers.clear(name)
        return _json({"name": name, "state": "armed"})

    def _prove(self, scope: Scope) -> None:
        """Raises unless the request carries what the token file holds now."""
        if self._token_file is None:
            raise Refused("no operator token file is set", field="operator_token_file")
        try:
            expected = read_private(self._token_file)[:_TOKEN_BYTES_MAX].strip()
        except (OSError, Misuse) as error:
            # Where it lies is nobody's business who has not shown what is in it.
            _log.warning("the operator token file: %s", error)
            raise Unavailable("the operator token file cannot be read, or others can") from error
        shown = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                shown = value[7:].strip()
        if len(expected) < 16 or not hmac.compare_digest(shown, expected):
            raise Unproven("this needs the operator's token")


_PATHS: Final = frozenset({"/metrics", "/healthz", "/readyz", "/v1/state", "/v1/events"})


def problem(
    status: HTTPStatus,
    code: str,
    detail: str,
    *,
    field: str | None = None,
    limit: str | int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One problem document (RFC 9457)."""
    document = problem_document(status, code, detail, field=field, limit=limit)
    return Answer(status, encode_problem(document), MEDIA_TYPE, headers or {})


def _problem_of(error: StrongroomError) -> Answer:
    if isinstance(error, Unproven):
        return problem(
            HTTPStatus.UNAUTHORIZED,
            error.code,
            error.message,
            headers={"www-authenticate": CHALLENGE},
        )
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), None)
    return problem(
        status or HTTPStatus.INTERNAL_SERVER_ERROR,
        error.code,
        error.message,
        field=error.field,
        limit=error.limit,
    )


def _json(body: object) -> Answer:
    return Answer(HTTPStatus.OK, json.dumps(body).encode(), _JSON, {})


def _number(query: Mapping[str, list[str]], name: str, default: int, most: int) -> int:
    raw = query.get(name, [str(default)])[-1]
    if not raw.isascii() or not raw.isdigit() or len(raw) > 19 or int(raw) > most:
        raise Misuse(f"{name} is a number from 0", field=name, limit=most)
    return int(raw)


def _condition(name: str) -> Condition:
    try:
        return Condition(name)
    except ValueError as error:
        raise Missing("there is no such breaker", field="name") from error


# Listening


@dataclass(frozen=True, slots=True)
class TcpPlace:
    """A numeric address and a port; port 0 takes a free one."""

    host: str
    port: int


Place = TcpPlace | Path


def place_of(text: str, *, beyond_loopback: bool) -> Place:
    """Where `text` says: `127.0.0.1:9464`, `[::1]:9464` or `unix:/run/strongroom/metrics.sock`.

    Raises `Misuse` for anything else, and for an address that others can reach.
    """
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        if not path.is_absolute():
            raise Misuse("a Unix socket has an absolute path", field="metrics_listen")
        return path
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError as error:
        raise Misuse(
            "say a numeric address and a port, or unix:/path", field="metrics_listen"
        ) from error
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise Misuse("the port is a number", field="metrics_listen", limit=65535)
    if not address.is_loopback and not beyond_loopback:
        raise Misuse(
            "other machines could reach this, and it is plain HTTP: put a TLS proxy in front, or "
            "set metrics_beyond_loopback",
            field="metrics_listen",
        )
    return TcpPlace(str(address), int(port))


@contextmanager
def open_place(place: Place) -> Iterator[socket.socket]:
    """A listening socket there; a Unix socket is 0600 in a folder that is ours alone."""
    if isinstance(place, Path):
        with listening(place) as listener:
            yield listener
        return
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.create_server((place.host, place.port), family=family) as listener:
        listener.setblocking(False)
        yield listener
