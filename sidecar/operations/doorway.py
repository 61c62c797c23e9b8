"""The HTTP server below the operator's door, with bounds on who only holds it open.

Rules:
- Whoever connects and asks nothing is closed after `HEAD_S`, and so is a request whose head is
  not whole by then.
- Beyond `CONNECTIONS_MAX` the oldest connection goes, an idle one first: who comes now is served,
  whoever sits there. Health and `clear` are not to be had only when nobody else is here.
- What is no HTTP gets problem details too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sidecar.operations.door import Operations, problem

HEAD_S: Final = 5.0
CONNECTIONS_MAX: Final = 64


class Connection(H11Protocol):
    """One connection; `connections` are those of its server, oldest first."""

    def __init__(self, *given: Any, everyone: dict[Connection, None], **named: Any) -> None:
        super().__init__(*given, **named)
        self._everyone = everyone
        self._late: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request of it is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._everyone[self] = None
        if len(self._everyone) > CONNECTIONS_MAX:
            oldest = next(iter(self._everyone))
            leaving = next((each for each in self._everyone if each.idle), oldest)
            self._everyone.pop(leaving)
            leaving.transport.abort()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._everyone.pop(self, None)
        self._no_longer_late()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """It was no request."""
        answer = problem(HTTPStatus.BAD_REQUEST, "protocol", "this is no HTTP request")
        head = (
            f"HTTP/1.1 {int(answer.status)} {answer.status.phrase}\r\n"
            f"content-type: {answer.kind}\r\n"
            f"content-length: {len(answer.body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + answer.body)
        self.transport.close()

    def _watch_head(self) -> None:
        if not self.idle:
            self._no_longer_late()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _no_longer_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


@asynccontextmanager
async def serving(app: Operations, listener: socket.socket) -> AsyncIterator[None]:
    """Answer on `listener` while the block runs."""
    everyone: dict[Connection, None] = {}
    server = _Server(
        uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(Connection, everyone=everyone)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]), name="operations")
        await server.answering.wait()
        try:
            yield
        finally:
            server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn as a guest: signals are the process's own, and it says when it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()
