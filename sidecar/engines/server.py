"""The Unix socket: accept, authenticate, open the session, hand over to it.

Rules:
- The socket is 0600 in a folder that is 0700 and ours. A socket left by a dead process is
  replaced; one that answers belongs to a living sidecar, and is a `Conflict`.
- The hello is read from the raw socket, under a deadline, since the descriptor of the staging
  memfd can only be passed there: it goes out with the very bytes of `Welcome`.
- A connection that fails in any way ends alone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sidecar.engines.connection import Connection, failure_frame
from sidecar.engines.gateways import Gateways
from sidecar.engines.hello import Doorkeeper, GatewayGreeting, Greeting
from sidecar.engines.session import SchedulerSession, Sessions, SessionSet, WorkerSession
from sidecar.transfers.slots import Rooms, Slots
from storage.memfd import MemoryOptions
from storage.staging import Staging
from storage.workers import Workers
from strongroom.errors import (
    Conflict,
    Overloaded,
    ProtocolViolation,
    StrongroomError,
    Unavailable,
)
from strongroom.private_files import private_directory
from strongroom.wire.frames import PROTOCOL_VERSION, Greet, Hello, Welcome
from strongroom.wire.framing import PREFIX_BYTES, body_length, decode_engine_frame, encode_frame

_log = logging.getLogger(__name__)
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """See `SidecarSettings`."""

    connections_max: int
    hello_timeout_s: float
    send_queue_max: int
    send_timeout_s: float
    staging_bytes: int
    tokens_per_block: int
    memory: MemoryOptions
    staging_wipe_s: float


@dataclass(slots=True)
class ServerCounts:
    """Since start, but for `connections`, which is now."""

    connections: int = 0
    accepted: int = 0
    refused: int = 0
    violations: int = 0
    crashed: int = 0


class Server:
    """Accepts engines until it is left."""

    def __init__(
        self,
        doorkeeper: Doorkeeper,
        sessions: Sessions,
        limits: ServerLimits,
        rooms: Rooms,
        wiping: Workers,
    ) -> None:
        self._rooms = rooms
        self._wiping = wiping
        self._doorkeeper = doorkeeper
        self._sessions = sessions
        self._limits = limits
        # An engine has two connections and more; a gateway has one for each engine.
        self._gateways = Gateways(sessions.hints, limits.connections_max // 4)
        self.counts = ServerCounts()
        self._open: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def accepting(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve who connects to `listener` while the block runs; leaving it closes them all."""
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(self._accept(listener, tasks), name="accept")
            try:
                yield
            finally:
                accepting.cancel()
                for task in tuple(self._open):
                    task.cancel()

    async def _accept(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, say: those who are connected go on being served.
                _log.warning("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(0.05)
                continue
            task = tasks.create_task(self._serve(peer), name="connection")
            self._open.add(task)
            task.add_done_callback(partial(self._ended, peer))

    def _ended(self, peer: socket.socket, task: asyncio.Task[None]) -> None:
        # Here and not in the task, which never ran if it was cancelled before its first step.
        self._open.discard(task)
        peer.close()

    async def _serve(self, peer: socket.socket) -> None:
        self.counts.connections += 1
        try:
            await self._greet(peer)
        except Exception:  # noqa: BLE001 - see below
            # A fault of ours on one connection must not end the others.
            self.counts.crashed += 1
            _log.exception("a connection failed")
        finally:
            self.counts.connections -= 1

    async def _greet(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        try:
            if self.counts.connections > self._limits.connections_max:
                raise Overloaded("too many connections", limit=self._limits.connections_max)
            self._doorkeeper.check_peer(peer)
            hello = await self._hello(peer)
            if isinstance(hello, Greet):
                await self._gateway(peer, self._doorkeeper.check_greet(hello))
                return
            greeting = self._doorkeeper.check_hello(hello)
            joined = self._sessions.join(greeting)
        except StrongroomError as error:
            self._count(error)
            await _refuse(peer, error)
            return
        except OSError:
            return  # the peer is gone
        try:
            if greeting.role == "scheduler":
                await self._session(peer, joined, greeting, None)
                return
            try:
                staging = await self._staging()
            except StrongroomError as error:
                # No memory for it: this connection alone does without.
                _log.warning("a connection is refused: %s", error.message)
                self._count(error)
                await _refuse(peer, error)
                return
            slots = Slots(staging, self._wiping, wipe_after_s=self._limits.staging_wipe_s)
            self._rooms.add(slots)
            try:
                await self._session(peer, joined, greeting, slots)
            finally:
                # The session's task group has ended: no thread works on a slot any more.
                try:
                    await slots.close()
                finally:
                    self._rooms.remove(slots)
        finally:
            self._sessions.leave(joined)

    async def _staging(self) -> Staging:
        """Made in a thread: locking it touches every page, and no lookup waits for that."""
        making = asyncio.get_running_loop().run_in_executor(
            None, Staging, self._limits.staging_bytes, self._limits.memory
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            (await making).close()
            raise

    async def _hello(self, peer: socket.socket) -> Hello | Greet:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                length = body_length(await _read_exactly(peer, PREFIX_BYTES))
                frame = decode_engine_frame(await _read_exactly(peer, length))
        except TimeoutError as error:
            raise Unavailable("no hello in time") from error
        if not isinstance(frame, Hello | Greet):
            raise ProtocolViolation("the first frame must be hello", field="frame")
        return frame

    async def _gateway(self, peer: socket.socket, greeting: GatewayGreeting) -> None:
        with self._gateways.admitted(greeting):
            # A session of its own: it is told nothing of the engine's.
            connection = self._welcome(peer, secrets.token_hex(16), None)
            if connection is None:
                return
            facts = partial(self._sessions.facts, greeting.engine)
            await self._gateways.serve(greeting, facts, connection)
            self._count_failure(connection)

    async def _session(
        self,
        peer: socket.socket,
        joined: SessionSet,
        greeting: Greeting,
        slots: Slots | None,
    ) -> None:
        connection = self._welcome(peer, joined.session, slots)
        if connection is None:
            return
        if slots is None:
            await SchedulerSession(joined, connection).serve()
        else:
            await WorkerSession(joined, greeting, connection, slots).serve()
        self._count_failure(connection)

    def _welcome(self, peer: socket.socket, session: str, slots: Slots | None) -> Connection | None:
        """The first answer, with the descriptor of `slots`; None when the peer is gone."""
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            session=session,
            tokens_per_block=self._limits.tokens_per_block,
            staging_bytes=0 if slots is None else slots.size_bytes,
        )
        try:
            _send_welcome(peer, welcome, [] if slots is None else [slots.fd])
        except OSError:
            return None
        self.counts.accepted += 1
        return Connection(
            peer,
            queue_max=self._limits.send_queue_max,
            send_timeout_s=self._limits.send_timeout_s,
        )

    def _count_failure(self, connection: Connection) -> None:
        if connection.failure is not None:
            self.counts.violations += 1

    def _count(self, error: StrongroomError) -> None:
        if isinstance(error, ProtocolViolation):
            self.counts.violations += 1
        else:
            self.counts.refused += 1


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path`, which nobody but us can open; removed on leaving."""
    listener = _listen(path)
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    private_directory(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if path.is_socket():
            _replace_dead_socket(path)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _replace_dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise Conflict("another sidecar serves this socket", field="socket_path")


def _send_welcome(peer: socket.socket, welcome: Welcome, descriptors: list[int]) -> None:
    """The frame in one piece; a fresh socket's buffer always has room for it."""
    data = encode_frame(welcome)
    if socket.send_fds(peer, [data], descriptors) != len(data):
        raise ConnectionError("the peer's buffer is full")


async def _read_exactly(peer: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        data = await loop.sock_recv(peer, min(count - len(received), 256 * 1024))
        if not data:
            raise ConnectionError("the peer closed the connection")
        received += data
    return bytes(received)


async def _refuse(peer: socket.socket, error: StrongroomError) -> None:
    """One `Failure`; the peer may be gone or deaf, and nothing waits for it for long."""
    _log.info("a connection is refused: %s", error.code)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.get_running_loop().sock_sendall(peer, encode_frame(failure_frame(error)))
