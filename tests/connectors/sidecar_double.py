"""A sidecar of the tests: real socket, real frames, real memfd, plaintext in memory.

It knows no grant, key or tier; what it is for are the faults that a real one shows only once in
a long while: `faults` names them, and may be changed while it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from strongroom.blocks import Extent, Grid
from strongroom.clock import boot_ns
from strongroom.errors import StrongroomError
from strongroom.kvformat import Layout
from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    Copied,
    EngineFrame,
    Failure,
    Fenced,
    Filled,
    Finish,
    Hello,
    Lease,
    Load,
    LoadDone,
    LoadFailed,
    Open,
    Part,
    Ping,
    Pong,
    Report,
    Save,
    SaveDone,
    SidecarFrame,
    Slot,
    Slots,
    Verdict,
    Welcome,
)
from strongroom.wire.framing import (
    PREFIX_BYTES,
    body_length,
    decode_engine_frame,
    encode_frame,
)

TOKEN = "engine-token"
_NS = 1_000_000_000


@dataclass
class Faults:
    """Each is off by default."""

    silent_verdict: bool = False
    silent_load: bool = False
    silent_slots: bool = False
    garbage_verdict: bool = False
    garbage_load: bool = False
    outside_part: bool = False
    late_parts_from: int | None = None
    """Parts from this one on carry a deadline that is over."""
    late_done: bool = False
    fail_load_at: int | None = None
    """LoadFailed in place of this part."""
    fence_at: int | None = None
    kill_at: int | None = None
    """The connection is closed in place of this part."""
    refuse_hello: bool = False
    no_welcome: int = 0
    """So many connections are accepted, read, and never answered."""
    welcome_after_s: float = 0.0
    lease_s: float | None = 3600.0
    """Seconds that the lease after `Welcome` runs: negative has lapsed, None sends none."""
    staging_bytes: int | None = None
    slots_max: int | None = None
    no_read: bool = False


@dataclass
class _Request:
    open: Open
    allowed: bool


@dataclass
class _Session:
    """One connection of a worker."""

    staging: mmap.mmap
    layout: Layout
    next_offset: int = 0
    lent: dict[int, int] = field(default_factory=dict)
    filling: dict[int, dict[int, tuple[str, Extent]]] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)

    def lend(self, size: int) -> int | None:
        """Staging for `size` bytes, at its start again whenever all of it is free."""
        if not self.lent:
            self.next_offset = 0
        start = self.next_offset
        if start + size > len(self.staging):
            return None
        self.next_offset = start + -(-size // 4096) * 4096
        self.lent[start] = size
        return start


def _lease(seconds: float) -> Lease:
    return Lease(boot_ns() + int(seconds * _NS))


class SidecarDouble:
    """Serves engines at `path` until `close`. A grant that starts with `good` is allowed."""

    def __init__(
        self,
        path: Path,
        *,
        tokens_per_block: int = 256,
        staging_bytes: int = 64 * 1024 * 1024,
        judge: Callable[[Open], bool] = lambda frame: frame.grant.startswith("good"),
    ) -> None:
        self.path = path
        self.faults = Faults()
        self.blocks: dict[bytes, bytes] = {}
        self.frames: list[EngineFrame] = []
        self.verdicts: list[Verdict] = []
        self.fenced: list[str] = []
        self._tokens_per_block = tokens_per_block
        self._staging_bytes = staging_bytes
        self._judge = judge
        self._requests: dict[str, _Request] = {}
        self._changed = threading.Condition()
        self._connections: list[tuple[str, socket.socket]] = []
        self._closed = False
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        listener.listen(8)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gone: listener and connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self, role: str | None = None) -> None:
        """Close every connection (of `role`); the listener stays."""
        with self._changed:
            for its, connection in self._connections:
                if role in {None, its}:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """A new sidecar at the same path: it keeps what was stored and no request."""
        self.close()
        self._requests.clear()
        self._closed = False
        self._listener = self._listen()

    def fence(self) -> None:
        """Fence every open request, on every connection."""
        with self._changed:
            for name in self._requests:
                self.fenced.append(name)
                for _, connection in self._connections:
                    self._send(connection, Fenced(name))

    def renew(self, lease_s: float) -> None:
        """Tell every scheduler of a lease that runs so long from now on."""
        with self._changed:
            for role, connection in self._connections:
                if role == "scheduler":
                    self._send(connection, _lease(lease_s))

    def seen(self, kind: type[EngineFrame]) -> list[EngineFrame]:
        """Frames of this kind, in order."""
        with self._changed:
            return [frame for frame in self.frames if isinstance(frame, kind)]

    def wait(self, ready: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until `ready` is true; it is looked at again after every frame."""
        with self._changed:
            return self._changed.wait_for(ready, timeout_s)

    def wait_for(self, kind: type[EngineFrame], count: int = 1) -> bool:
        """Wait for `count` frames of this kind."""
        return self.wait(lambda: sum(isinstance(f, kind) for f in self.frames) >= count)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, StrongroomError), connection:
                self._converse(connection)
        finally:
            with self._changed:
                self._connections = [c for c in self._connections if c[1] is not connection]
                self._changed.notify_all()

    def _converse(self, connection: socket.socket) -> None:
        frames = self._read(connection)
        hello = next(frames)
        assert isinstance(hello, Hello)
        if self.faults.refuse_hello or hello.token != TOKEN:
            self._send(connection, Failure("refused", "who are you"))
            return
        # Known before it is welcomed: whoever was welcomed can be dropped.
        with self._changed:
            self._connections.append((hello.role, connection))
            self.frames.append(hello)
            self._changed.notify_all()
        if self.faults.no_welcome > 0:
            self.faults.no_welcome -= 1
            self._exactly(connection, 1)
            return
        threading.Event().wait(self.faults.welcome_after_s)
        session = None
        if hello.role == "worker":
            session = self._welcome_worker(connection, hello)
        else:
            self._send(connection, Welcome(PROTOCOL_VERSION, "s", self._tokens_per_block, 0))
            if self.faults.lease_s is not None:
                self._send(connection, _lease(self.faults.lease_s))
        for frame in frames:
            self._answer(connection, session, hello, frame)
            if not isinstance(frame, Ping):
                with self._changed:
                    self.frames.append(frame)
                    self._changed.notify_all()

    def _welcome_worker(self, connection: socket.socket, hello: Hello) -> _Session:
        size = self._staging_bytes
        descriptor = os.memfd_create("staging", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        announced = size if self.faults.staging_bytes is None else self.faults.staging_bytes
        welcome = Welcome(PROTOCOL_VERSION, "w", self._tokens_per_block, announced)
        socket.send_fds(connection, [encode_frame(welcome)], [descriptor])
        fields = hello.layout
        layout = Layout(**{name: getattr(fields, name) for name in fields.__struct_fields__})
        session = _Session(mmap.mmap(descriptor, size), layout)
        os.close(descriptor)
        return session

    def _read(self, connection: socket.socket) -> Iterator[EngineFrame]:
        while True:
            prefix = self._exactly(connection, PREFIX_BYTES)
            if prefix is None:
                return
            body = self._exactly(connection, body_length(prefix))
            if body is None:
                return
            yield decode_engine_frame(body)

    @staticmethod
    def _exactly(connection: socket.socket, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            more = connection.recv(size - len(data))
            if not more:
                return None
            data += more
        return data

    @staticmethod
    def _send(connection: socket.socket, frame: SidecarFrame) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(encode_frame(frame))

    def _answer(
        self, connection: socket.socket, session: _Session | None, hello: Hello, frame: EngineFrame
    ) -> None:
        match frame:
            case Ping():
                self._send(connection, Pong(frame.number))
            case Open():
                self._open(connection, hello, frame)
            case Load() if session:
                self._load(connection, session, frame)
            case Copied() if session:
                session.lent.pop(frame.offset, None)
            case Save() if session:
                self._save(connection, session, frame)
            case Filled() if session:
                self._filled(connection, session, frame)
            case Cancel() | Finish() | Report():
                pass
            case _:
                self._send(connection, Failure("protocol", "not here"))
                connection.close()

    def _open(self, connection: socket.socket, hello: Hello, frame: Open) -> None:
        allowed = self._judge(frame)
        with self._changed:
            self._requests[frame.request] = _Request(frame, allowed)
        if self.faults.silent_verdict:
            return
        if self.faults.garbage_verdict:
            connection.sendall(b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1")
            return
        page = hello.layout.page_tokens
        tokens = self._prefix(frame, page)[0] if allowed else 0
        verdict = Verdict(frame.request, allowed, tokens, allowed)
        self.verdicts.append(verdict)
        self._send(connection, verdict)

    def _key(self, frame: Open, extent: Extent) -> bytes:
        return frame.salt.encode() + b"|" + frame.tokens[: 4 * extent.end] + bytes([0])

    def _extents(self, frame: Open, page: int, end: int) -> tuple[Extent, ...]:
        return Grid(self._tokens_per_block, page).plan((len(frame.tokens) // 4,), end)

    def _prefix(self, frame: Open, page: int) -> tuple[int, list[Extent]]:
        grid = Grid(self._tokens_per_block, page)
        found: list[Extent] = []
        for extent in self._extents(frame, page, len(frame.tokens) // 4):
            if self._key(frame, extent) in self.blocks:
                found.append(extent)
                continue
            shorter = [e for e in grid.shorter(extent) if self._key(frame, e) in self.blocks]
            found.extend(shorter[:1])
            break
        return (found[-1].end if found else 0), found

    def _load(self, connection: socket.socket, session: _Session, frame: Load) -> None:
        faults = self.faults
        request = self._requests.get(frame.request)
        if faults.silent_load:
            return
        if faults.garbage_load:
            connection.sendall(b"\xff\xff\xff\xff")
            return
        if request is None or not request.allowed:
            self._send(connection, LoadFailed(frame.load, frame.start))
            return
        page = session.layout.page_tokens
        extents = [e for e in self._prefix(request.open, page)[1] if e.end > frame.start]
        for number, extent in enumerate(e for e in extents if e.start < frame.end):
            if faults.fail_load_at == number:
                self._send(connection, LoadFailed(frame.load, extent.start))
                return
            if faults.fence_at == number:
                self._send(connection, Fenced(frame.request))
                self._send(connection, LoadFailed(frame.load, frame.start))
                return
            if faults.kill_at == number:
                connection.shutdown(socket.SHUT_RDWR)
                return
            data = self.blocks[self._key(request.open, extent)]
            offset = session.lend(len(data))
            if offset is None:
                self._send(connection, LoadFailed(frame.load, extent.start))
                return
            session.staging[offset : offset + len(data)] = data
            late = faults.late_parts_from is not None and number >= faults.late_parts_from
            deadline = boot_ns() + (-1 if late else 5 * _NS)
            if faults.outside_part:
                offset = len(session.staging)
            self._send(connection, Part(frame.load, extent.start, extent.end, offset, deadline))
        self._send(connection, LoadDone(frame.load, 0 if faults.late_done else boot_ns() + 5 * _NS))

    def _save(self, connection: socket.socket, session: _Session, frame: Save) -> None:
        request = self._requests.get(frame.request)
        if self.faults.silent_slots:
            return
        slots: list[Slot] = []
        session.filling[frame.save] = {}
        session.stored[frame.save] = 0
        if request is not None and request.allowed:
            for extent in self._extents(request.open, session.layout.page_tokens, frame.end):
                key = self._key(request.open, extent)
                if key in self.blocks:
                    continue
                if self.faults.slots_max is not None and len(slots) >= self.faults.slots_max:
                    break
                offset = session.lend(session.layout.block_bytes(extent.tokens))
                if offset is None:
                    break
                session.filling[frame.save][offset] = (frame.request, extent)
                slots.append(Slot(extent.start, extent.end, offset))
        self._send(connection, Slots(frame.save, tuple(slots)))

    def _filled(self, connection: socket.socket, session: _Session, frame: Filled) -> None:
        waiting = session.filling[frame.save]
        name, extent = waiting.pop(frame.offset)
        size = session.lent.pop(frame.offset)
        if frame.ok:
            with self._changed:
                key = self._key(self._requests[name].open, extent)
                self.blocks[key] = bytes(session.staging[frame.offset : frame.offset + size])
            session.stored[frame.save] += 1
        if not waiting:
            self._send(connection, SaveDone(frame.save, session.stored[frame.save]))
