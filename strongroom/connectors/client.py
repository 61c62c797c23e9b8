"""The connection to the sidecar: one socket, one IO thread, no engine.

Rules:
- `send` never waits. While the sidecar is away it takes nothing and says so; nothing is kept
  for a later connection, since a new sidecar knows no old request.
- `generation` is 0 while the sidecar is away, and another positive number for every session.
  What was learnt in one session means nothing in the next.
- The receiver's methods run on the IO thread alone, in the order of the wire. Bytes that are no
  frame, a silence longer than `silence_s` or an exception in the receiver end the session.
- A lost session is retried for as long as the engine lives, with a growing pause. Who accepts
  and does not welcome is given up after `welcome_s`: a sidecar that ends may do that.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from strongroom.clock import Clock, boot_ns
from strongroom.errors import Misuse, ProtocolViolation, StrongroomError, Unavailable
from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    EngineFrame,
    Failure,
    Hello,
    Ping,
    Pong,
    SidecarFrame,
    Welcome,
)
from strongroom.wire.framing import PREFIX_BYTES, body_length, decode_sidecar_frame, encode_frame

_log = logging.getLogger(__name__)

OUTBOX_BYTES_MAX: Final = 64 * 1024 * 1024
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_LAST_S: Final = 1.0
_READ_BYTES: Final = 256 * 1024
_DESCRIPTORS_MAX: Final = 4
_TOKEN_BYTES_MAX: Final = 4096
_NS: Final = 1_000_000_000


class Receiver(Protocol):
    """Who is told what the sidecar says. Every method runs on the IO thread."""

    def opened(self, welcome: Welcome, staging: mmap.mmap | None) -> None:
        """A session has begun. `staging` is there for a worker alone."""

    def received(self, frame: SidecarFrame) -> None:
        """A frame other than `Welcome`, `Pong` or `Failure`."""

    def closed(self) -> None:
        """The session is over; nothing of it may be used any more."""

    def due(self, now_ns: int) -> int | None:
        """Do what is due at `now_ns` and say when to be asked again (boot clock)."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds; see `ConnectorSettings`."""

    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    welcome_s: float = 2.0
    """How long an attempt waits for `Welcome`; after each that waited in vain twice as long,
    never longer than `silence_s`: a slow sidecar must get its turn."""


class SidecarLink:
    """Keeps one session with the sidecar at `path` open from a thread of its own.

    The lock guards the outbox and the socket's sending side; nothing is called back under it.
    """

    def __init__(
        self,
        path: Path,
        hello: Callable[[], Hello],
        receiver: Receiver,
        *,
        times: LinkTimes | None = None,
        clock: Clock = boot_ns,
    ) -> None:
        self._path = path
        self._hello = hello
        self._receiver = receiver
        self._times = times or LinkTimes()
        self._clock = clock
        self._lock = threading.Lock()
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._socket: socket.socket | None = None
        self._sessions = 0
        self._generation = 0
        self._opened = threading.Event()
        self._told = False
        self._closing = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="strongroom-io", daemon=True)
        self._complaint = ""

    @property
    def generation(self) -> int:
        """The session's number, 0 while there is none. A plain memory read."""
        return self._generation

    @property
    def alive(self) -> bool:
        """Whether the IO thread still runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the IO thread; it connects at once."""
        self._thread.start()

    def wait_open(self, timeout_s: float) -> bool:
        """Wait for a session; for the engine's start only."""
        return self._opened.wait(timeout_s)

    def send(self, frame: EngineFrame) -> bool:
        """Queue `frame`; false when there is no session or the frame cannot be sent."""
        try:
            encoded = encode_frame(frame)
        except (StrongroomError, msgspec.MsgspecError, ValueError, OverflowError, TypeError):
            _log.warning("a %s frame could not be encoded", type(frame).__name__)
            return False
        with self._lock:
            if not self._generation:
                return False
            return self._push(encoded)

    def wake(self) -> None:
        """Have the IO thread call `due` soon."""
        try:
            self._wake_write.send(b"\0")
        except OSError:  # full: a wake-up is pending already; closed: there is no one to wake
            return

    def close(self, timeout_s: float = 2.0) -> None:
        """End the session and the thread."""
        self._closing.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._wake_read.close()
            self._wake_write.close()

    def _push(self, encoded: bytes) -> bool:
        """Send at once what the socket takes, queue the rest. The lock is held.

        The IO thread only queues: it sends what one batch of frames gave rise to in one go.
        """
        view = memoryview(encoded)
        if self._outbox_bytes + len(view) > OUTBOX_BYTES_MAX:
            _log.warning("the sidecar does not read: a frame was dropped and the session ends")
            self._generation = 0
            self.wake()
            return False
        ours = threading.current_thread() is self._thread
        if self._socket is not None and not self._outbox and not ours:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                return False
        if view:
            self._outbox.append(view)
            self._outbox_bytes += len(view)
            if not ours:
                self.wake()
        return True

    def _run(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        patience_first_s = patience_s = min(self._times.welcome_s, self._times.silence_s)
        while not self._closing.is_set():
            before, began = self._sessions, self._clock()
            try:
                self._session(patience_s)
            except (OSError, StrongroomError) as error:
                self._complain(str(error))
            except Exception:  # noqa: BLE001 - the engine must outlive whatever the receiver does
                _log.exception("the session with the sidecar failed")
            finally:
                self._end()
            if self._sessions != before:
                backoff_s, patience_s = BACKOFF_FIRST_S, patience_first_s
            elif self._clock() - began >= patience_s * _NS:
                patience_s = min(2 * patience_s, self._times.silence_s)
            self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_LAST_S)

    def _complain(self, text: str) -> None:
        """Log why there is no session, once for each reason."""
        if text != self._complaint:
            self._complaint = text
            _log.warning("no session with the sidecar at %s: %s", self._path, text)

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; deadlines go on being served meanwhile."""
        until = self._clock() + int(seconds * _NS)
        while not self._closing.is_set():
            now = self._clock()
            if now >= until:
                return
            due = self._due(now)
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_read, selectors.EVENT_READ)
                if selector.select(max(min(due, until) - now, 0) / _NS):
                    self._drain_wakeups()

    def _session(self, patience_s: float) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        reader = _FrameReader(connection)
        try:
            connection.settimeout(patience_s)
            connection.connect(str(self._path))
            connection.sendall(encode_frame(self._hello()))
            connection.setblocking(False)
            self._socket = connection
            self._serve(connection, reader, patience_s)
        finally:
            reader.close()
            connection.close()

    def _serve(self, connection: socket.socket, reader: _FrameReader, patience_s: float) -> None:
        heard = pinged = self._clock()
        session = 0
        number = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing.is_set():
                if session and self._generation != session:
                    raise Unavailable("the sidecar did not read what was sent")
                now = self._clock()
                silence_s = self._times.silence_s if session else patience_s
                if now - heard > silence_s * _NS:
                    raise Unavailable("the sidecar is silent")
                if session and now - pinged > self._times.heartbeat_s * _NS:
                    pinged = now
                    number += 1
                    self.send(Ping(number))
                with self._lock:
                    wants_write = bool(self._outbox)
                mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)
                selector.modify(connection, mask)
                until = min(self._due(now), now + int(self._times.heartbeat_s * _NS / 2))
                ready = {
                    key.fileobj: events for key, events in selector.select((until - now) / _NS)
                }
                if self._wake_read in ready:
                    self._drain_wakeups()
                if ready.get(connection, 0) & selectors.EVENT_WRITE:
                    self._flush()
                if ready.get(connection, 0) & selectors.EVENT_READ:
                    for frame in reader.frames():
                        heard = self._clock()
                        if session:
                            self._hand_over(frame)
                        else:
                            session = self._open(frame, reader)
                    self._flush()

    def _open(self, frame: SidecarFrame, reader: _FrameReader) -> int:
        if isinstance(frame, Failure):
            raise Unavailable(f"the sidecar refused this engine: {frame.code}: {frame.message}")
        if not isinstance(frame, Welcome):
            raise ProtocolViolation("the first frame must be welcome", field="frame")
        if frame.version != PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"the sidecar speaks version {frame.version}",
                field="version",
                limit=PROTOCOL_VERSION,
            )
        staging = None
        if frame.staging_bytes:
            staging = map_staging(reader.take_descriptor(), frame.staging_bytes)
        self._sessions += 1
        self._told = True
        self._receiver.opened(frame, staging)
        self._complaint = ""
        _log.info("session %s with the sidecar at %s", frame.session, self._path)
        with self._lock:
            self._generation = self._sessions
        self._opened.set()
        return self._sessions

    def _hand_over(self, frame: SidecarFrame) -> None:
        match frame:
            case Welcome():
                raise ProtocolViolation("a second welcome", field="frame")
            case Failure():
                _log.warning("the sidecar reports %s: %s", frame.code, frame.message)
            case Pong():
                return
            case _:
                self._receiver.received(frame)

    def _flush(self) -> None:
        with self._lock:
            while self._outbox and self._socket is not None:
                head = self._outbox[0]
                try:
                    sent = self._socket.send(head)
                except BlockingIOError:
                    return
                self._outbox_bytes -= sent
                if sent == len(head):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = head[sent:]

    def _end(self) -> None:
        with self._lock:
            self._generation = 0
            self._socket = None
            self._outbox.clear()
            self._outbox_bytes = 0
        self._opened.clear()
        if self._told:
            self._told = False
            try:
                self._receiver.closed()
            except Exception:  # noqa: BLE001 - see _run
                _log.exception("ending the session failed")

    def _due(self, now: int) -> int:
        later = now + int(self._times.heartbeat_s * _NS)
        try:
            due = self._receiver.due(now)
        except Exception:  # noqa: BLE001 - see _run
            _log.exception("a deadline could not be served")
            return later
        return later if due is None else min(due, later)

    def _drain_wakeups(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            return


class _FrameReader:
    """Cuts the stream into frames and keeps the descriptors that came with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def frames(self) -> list[SidecarFrame]:
        """Every whole frame that has arrived; raises `Unavailable` at the end of the stream."""
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, _READ_BYTES, _DESCRIPTORS_MAX
            )
        except BlockingIOError:
            return []
        self._descriptors.extend(descriptors)
        if not data:
            raise Unavailable("the sidecar closed the connection")
        self._buffer += data
        found: list[SidecarFrame] = []
        position = 0
        while len(self._buffer) - position >= PREFIX_BYTES:
            start = position + PREFIX_BYTES
            end = start + body_length(bytes(self._buffer[position:start]))
            if len(self._buffer) < end:
                break
            found.append(decode_sidecar_frame(bytes(self._buffer[start:end])))
            position = end
        del self._buffer[:position]
        return found

    def take_descriptor(self) -> int:
        """The one descriptor that came; the caller owns it."""
        if len(self._descriptors) != 1:
            raise ProtocolViolation(
                f"expected one descriptor, got {len(self._descriptors)}", field="staging", limit=1
            )
        return self._descriptors.pop()

    def close(self) -> None:
        """Close what nobody took."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def map_staging(descriptor: int, size: int) -> mmap.mmap:
    """Map the staging memfd and close the descriptor.

    It must be sealed against shrinking: else its owner could take mapped pages away, and the
    engine would die of SIGBUS at the next copy. The mapping stays out of the engine's core
    dumps: that is a mark of each mapping, so the sidecar's own does not cover this one.
    """
    try:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolViolation("staging is not a memfd", field="staging") from error
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < size:
            raise ProtocolViolation(
                "staging must be sealed and as long as announced", field="staging", limit=size
            )
        staging = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        staging.madvise(mmap.MADV_DONTDUMP)
        return staging
    finally:
        os.close(descriptor)


def read_token(path: Path) -> str:
    """The per-engine token; read anew for every session, since it may be rotated."""
    with path.open("rb") as file:
        raw = file.read(_TOKEN_BYTES_MAX + 1)
    if len(raw) > _TOKEN_BYTES_MAX:
        raise Misuse("the token file is too long", field="token_file", limit=_TOKEN_BYTES_MAX)
    try:
        return raw.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise Misuse("the token file holds no text", field="token_file") from error
