"""One authenticated connection: frames in, frames out, and the tasks that serve them.

Rules:
- A frame that is too large, malformed or out of place gets one `Failure`, and the connection is
  closed; nothing outside of it is harmed.
- Every queue is bounded. An engine that does not read what it is sent loses its connection.
- When a connection ends, its transfers end with it, and then its staging is zeroed. Of one that
  was closed no frame is handled any more, also where it had been received before.
- Nothing is in the way of a frame: it is received where it is decoded, handled in the step in
  which its last byte came, and sent by whoever says it, as long as the socket takes it. What it
  does not take is queued. Each turn of the loop in between would be a time at which restores may
  take the interpreter.
- What was received is handled until something has to wait, or a handler gives way to others: the
  rest is the reader's, in its turn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Never

from sidecar.engines.incoming import Incoming
from strongroom.errors import Overloaded, StrongroomError
from strongroom.wire.frames import EngineFrame, Failure, Ping, Pong, SidecarFrame
from strongroom.wire.framing import decode_engine_frame, encode_frame

_log = logging.getLogger(__name__)
_GOODBYE_S: Final = 0.5
_DISCARDS_MAX: Final = 64

Later = Callable[[], Awaitable[None]]
Handler = Callable[[EngineFrame], Later | None]
"""What handling a frame has to wait for is handed back; no frame is handled before it has ended."""


class ConnectionClosed(Exception):
    """The peer went away, or was sent away. Ends the connection's task group."""


class SessionOver(Exception):
    """The connection has ended: end the tasks that serve it."""


def end_session() -> Never:
    """Called in the task group that serves a connection, once the connection has ended."""
    raise SessionOver


class Connection:
    """Reads and writes frames over an accepted socket, which it closes when it has been served."""

    def __init__(self, peer: socket.socket, *, queue_max: int, send_timeout_s: float) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._incoming = Incoming()
        self._reading = False
        self._handle: Handler | None = None
        self._idle = False
        """The reader waits, with nothing to do: what arrives is handled as it does."""
        self._left: Later | Exception | None = None
        """What came of a frame that was handled so, for the reader to go on with."""
        self._arrived = asyncio.Event()
        """Something was received, or nothing more will be."""
        self._queue_max = queue_max
        self._send_timeout_s = send_timeout_s
        self._outgoing: deque[bytes | memoryview] = deque()
        self._too_slow: asyncio.TimerHandle | None = None
        """Runs while something is queued; every byte that the peer takes sets it back."""
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._gone = False
        self._closing = asyncio.Event()
        self.failure: Failure | None = None
        self.frames_in = 0
        self.frames_out = 0

    def send(self, frame: SidecarFrame) -> None:
        """Send a frame, or queue it. When the engine does not read, its connection is closed."""
        if self._closing.is_set():
            return
        if len(self._outgoing) >= self._queue_max:
            self.close(Overloaded("the engine does not read what it is sent"))
            return
        self._put(encode_frame(frame))

    def close(self, error: StrongroomError | None = None) -> None:
        """End the connection, after what is queued, with one `Failure` when there is an error."""
        if self._closing.is_set():
            return
        if error is not None:
            self.failure = failure_frame(error)
        self._closing.set()

    async def serve(self, handle: Handler) -> None:
        """Until the peer is gone, `close` was called, or a frame broke the protocol."""
        self._handle = handle
        try:
            self._listen()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(), name="read")
                tasks.create_task(self._until_closed(), name="close")
        except* ConnectionClosed:
            pass
        finally:
            self._closing.set()
            await self._say_goodbye()

    # In

    @property
    def has_more(self) -> bool:
        """Whether more than the frame that is being handled has been received."""
        return self._incoming.holds

    async def _read(self) -> None:
        while True:
            try:
                later = await self._next()
                if later is not None:
                    await later()
            except StrongroomError as error:
                self.close(error)
                return

    async def _next(self) -> Later | None:
        """Handle one frame, or wait until those that come have left something to do."""
        if self._closing.is_set():
            raise ConnectionClosed
        if (body := self._incoming.take()) is not None:
            return self._handled(body)
        if self._gone:
            raise ConnectionClosed
        self._arrived.clear()
        self._listen()
        self._idle = True
        try:
            await self._arrived.wait()
        finally:
            self._idle = False
        left, self._left = self._left, None
        if isinstance(left, Exception):
            raise left
        return left

    def _handled(self, body: memoryview) -> Later | None:
        assert self._handle is not None
        frame = decode_engine_frame(body)
        if isinstance(frame, Ping):
            self.send(Pong(frame.number))
            later = None
        else:
            later = self._handle(frame)
        self.frames_in += 1
        return later

    def _handle_at_once(self) -> None:
        try:
            while self._may_go_on and (body := self._incoming.take()) is not None:
                self._left = self._handled(body)
        except Exception as error:  # noqa: BLE001 - it is raised in the reader
            self._left = error
        if self._left is not None:
            self._idle = False
            self._arrived.set()

    @property
    def _may_go_on(self) -> bool:
        return self._left is None and not self._closing.is_set()

    def _listen(self) -> None:
        if not self._reading and not self._gone:
            self._reading = True
            self._loop.add_reader(self._peer, self._receive)

    def _deafen(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._peer)

    def _receive(self) -> None:
        room = self._incoming.room()
        if not room:
            self._deafen()  # whoever takes the frames that are here listens again
            return
        try:
            count = self._peer.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self._lose()
            return
        self._incoming.received(count)
        if self._idle:
            self._handle_at_once()
        else:
            self._arrived.set()

    # Out

    def _put(self, data: bytes) -> None:
        self.frames_out += 1
        if self._gone:
            return
        rest = data if self._outgoing else self._send_now(data)
        if rest:
            if not self._outgoing:
                self._flushed.clear()
                self._loop.add_writer(self._peer, self._send_queued)
                self._set_back()
            self._outgoing.append(rest)

    def _send_now(self, data: bytes | memoryview) -> bytes | memoryview:
        """What the socket did not take."""
        try:
            count = self._peer.send(data)
        except (BlockingIOError, InterruptedError):
            return data
        except OSError:
            self._lose()
            return b""
        return b"" if count == len(data) else memoryview(data)[count:]

    def _send_queued(self) -> None:
        while self._outgoing:
            waiting = self._outgoing[0]
            rest = self._send_now(waiting)
            if self._gone:
                return
            if len(rest) < len(waiting):
                self._set_back()
            if rest:
                self._outgoing[0] = rest
                return
            self._outgoing.popleft()
        self._end_queue()

    def _set_back(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
        self._too_slow = self._loop.call_later(
            self._send_timeout_s,
            self.close,
            Overloaded("the engine does not read what it is sent"),
        )

    def _end_queue(self) -> None:
        """Nothing is queued any more, or nobody is there to send it to."""
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None
            self._loop.remove_writer(self._peer)
        self._outgoing.clear()
        self._flushed.set()

    # The end

    def _lose(self) -> None:
        """The peer is gone."""
        self._gone = True
        self._deafen()
        self._end_queue()
        self._arrived.set()

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise ConnectionClosed

    async def _say_goodbye(self) -> None:
        """What is queued, then the failure; bounded, for the peer may not listen."""
        self._deafen()
        try:
            if self.failure is not None:
                _log.info("a connection is closed: %s", self.failure.code)
                self._put(encode_frame(self.failure))
            async with asyncio.timeout(_GOODBYE_S):
                await self._flushed.wait()
        except TimeoutError:
            pass
        finally:
            self._end_queue()
            self._discard()
            self._peer.close()

    def _discard(self) -> None:
        """What is left unread would reach the peer as an error, before what was said to it."""
        room = memoryview(bytearray(64 * 1024))
        try:
            for _ in range(_DISCARDS_MAX):
                if not self._peer.recv_into(room):
                    return
        except OSError:
            return


def failure_frame(error: StrongroomError) -> Failure:
    """The one thing that the peer is told."""
    return Failure(error.code, error.message, error.field, error.limit)
