"""Headers that every answer carries, whatever became of the request: also on problems.

A dependency that knows something about its request (what is left of a limit, that the route is
deprecated) says so with `tell`; the middleware puts it on the answer. Every answer says that it
is not to be stored or guessed at; a route that sets `Cache-Control` itself is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TOLD: Final = "strongroom.headers"
_ALWAYS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def tell(request: Request, headers: Mapping[str, str]) -> None:
    """Have `headers` on the answer to `request`."""
    request.scope[_TOLD].update(headers)


class AnswerHeaders:
    """ASGI middleware, outermost: it sees every answer of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told: dict[str, str] = {}
        scope[_TOLD] = told

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _ALWAYS.items():
                    headers.setdefault(name, value)
                headers.update(told)
            await send(message)

        await self._app(scope, receive, with_headers)
