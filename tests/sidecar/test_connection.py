"""One connection: what it does with frames that came before it was closed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sidecar.engines.connection import Connection, Later
from strongroom.errors import Conflict
from strongroom.wire.frames import Cancel, EngineFrame, Failure
from strongroom.wire.framing import encode_frame
from tests.sidecar.harness import Wire


@pytest.mark.parametrize("waits", [False, True], ids=["handled as it came", "by the reader"])
async def test_no_frame_is_handled_once_the_connection_is_closed(*, waits: bool) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = Connection(ours, queue_max=16, send_timeout_s=10)
    handled: list[str] = []

    def handle(frame: EngineFrame) -> Later | None:
        assert isinstance(frame, Cancel)
        handled.append(frame.request)
        if frame.request == "last":
            connection.close(Conflict("a newer connection took over"))
        return (lambda: asyncio.sleep(0)) if waits else None

    with theirs:
        # All of it comes in one go.
        theirs.sendall(b"".join(encode_frame(Cancel(name)) for name in ("first", "last", "x", "y")))
        await connection.serve(handle)
        assert handled == ["first", "last"]
        theirs.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=theirs)
        failure = await Wire(reader, writer).expect(Failure)
        assert failure.code == "conflict"
        writer.close()
