"""One authenticated connection: frames in, frames out, and the tasks that serve them.

Rules:
- A frame that is too large, malformed or out of place gets one `Failure`, and the connection is
  closed; nothing outside of it is harmed.
- Every queue is bounded. An engine that does not read what it is sent loses its connection.
- When a connection ends, its transfers end with it, and then its staging is zeroed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Never

from strongroom.errors import Overloaded, StrongroomError
from strongroom.wire.frames import EngineFrame, Failure, Ping, Pong, SidecarFrame
from strongroom.wire.framing import PREFIX_BYTES, body_length, decode_engine_frame, encode_frame

_log = logging.getLogger(__name__)

Handler = Callable[[EngineFrame], Awaitable[None]]


class ConnectionClosed(Exception):
    """The peer went away, or was sent away. Ends the connection's task group."""


class SessionOver(Exception):
    """The connection has ended: end the tasks that serve it."""


def end_session() -> Never:
    """Called in the task group that serves a connection, once the connection has ended."""
    raise SessionOver


class Connection:
    """Reads and writes frames over an accepted stream. One reader task, one writer task."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        queue_max: int,
        send_timeout_s: float,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue(queue_max)
        self._send_timeout_s = send_timeout_s
        self._closing = asyncio.Event()
        self.failure: Failure | None = None
        self.frames_in = 0
        self.frames_out = 0

    def send(self, frame: SidecarFrame) -> None:
        """Queue a frame. When the engine does not read, its connection is closed instead."""
        if self._closing.is_set():
            return
        try:
            self._outgoing.put_nowait(encode_frame(frame))
        except asyncio.QueueFull:
            self.close(Overloaded("the engine does not read what it is sent"))

    def close(self, error: StrongroomError | None = None) -> None:
        """End the connection, after what is queued, with one `Failure` when there is an error."""
        if self._closing.is_set():
            return
        if error is not None:
            self.failure = failure_frame(error)
        self._closing.set()

    async def serve(self, handle: Handler) -> None:
        """Until the peer is gone, `close` was called, or a frame broke the protocol."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(handle), name="read")
                tasks.create_task(self._write(), name="write")
                tasks.create_task(self._until_closed(), name="close")
        except* ConnectionClosed:
            pass
        finally:
            self._closing.set()
            await self._say_goodbye()

    async def _read(self, handle: Handler) -> None:
        while True:
            try:
                frame = await self._frame()
                if isinstance(frame, Ping):
                    self.send(Pong(frame.number))
                else:
                    await handle(frame)
            except StrongroomError as error:
                self.close(error)
                return
            except (asyncio.IncompleteReadError, ConnectionError, OSError) as error:
                raise ConnectionClosed from error
            self.frames_in += 1

    async def _frame(self) -> EngineFrame:
        length = body_length(await self._reader.readexactly(PREFIX_BYTES))
        return decode_engine_frame(await self._reader.readexactly(length))

    async def _write(self) -> None:
        while True:
            data = await self._outgoing.get()
            self._writer.write(data)
            self.frames_out += 1
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    await self._writer.drain()
            except TimeoutError:
                self.close(Overloaded("the engine does not read what it is sent"))
                return
            except OSError as error:
                raise ConnectionClosed from error

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise ConnectionClosed

    async def _say_goodbye(self) -> None:
        """What is queued, then the failure; bounded, for the peer may not listen."""
        try:
            while not self._outgoing.empty():
                self._writer.write(self._outgoing.get_nowait())
            if self.failure is not None:
                _log.info("a connection is closed: %s", self.failure.code)
                self._writer.write(encode_frame(self.failure))
            async with asyncio.timeout(0.5):
                await self._writer.drain()
        except (TimeoutError, OSError):
            self._writer.transport.abort()
        self._writer.close()
        try:
            async with asyncio.timeout(0.5):
                await self._writer.wait_closed()
        except TimeoutError:
            # The peer does not read the little that is left, and closing would wait for it for
            # ever, with a socket that the server is about to close.
            self._writer.transport.abort()
        except OSError:
            return


def failure_frame(error: StrongroomError) -> Failure:
    """The one thing that the peer is told."""
    return Failure(error.code, error.message, error.field, error.limit)
