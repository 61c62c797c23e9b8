"""An engine's connections as blocking sockets: raw frames, nothing of the connector in between.

A `Scheduler` times one `Open` to its `Verdict`; a `Worker` saves and loads through staging. Both
say hello with the digests and format that the tests' control plane grants for.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    Copied,
    EngineFrame,
    Failure,
    Filled,
    Finish,
    Hello,
    LayoutFields,
    Load,
    LoadDone,
    LoadFailed,
    Open,
    Part,
    Ping,
    Pong,
    Save,
    SaveDone,
    SidecarFrame,
    Slots,
    Verdict,
    Welcome,
)
from strongroom.wire.framing import PREFIX_BYTES, body_length, decode_sidecar_frame, encode_frame
from tests.sidecar.harness import DIGESTS, FORMAT, LAYERS, PAGE

FrameT = TypeVar("FrameT", bound=SidecarFrame)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sidecar listens, and as whom one connects."""

    socket_path: str
    engine: str
    token: str
    page_bytes: int
    """Bytes of one page of one layer."""

    def hello(self, role: str) -> Hello:
        layout = LayoutFields("cpu:nhd", "bench", PAGE, (self.page_bytes,) * LAYERS, 1, 0, 1, 0)
        return Hello(PROTOCOL_VERSION, self.engine, role, self.token, DIGESTS, FORMAT, layout)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what a gateway would hand over with it."""

    packed: bytes
    grant: str
    salt: str

    @property
    def tokens(self) -> int:
        return len(self.packed) // 4


class Connection:
    """One blocking connection; frames that nobody waits for are dropped."""

    def __init__(self, address: Address, role: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.connect(address.socket_path)
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self.send(address.hello(role))
        self.welcome = self.expect(Welcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def send(self, frame: EngineFrame) -> None:
        self._socket.sendall(encode_frame(frame))

    def receive(self) -> SidecarFrame:
        """The next frame."""
        self._fill(PREFIX_BYTES)
        length = PREFIX_BYTES + body_length(bytes(self._buffer[:PREFIX_BYTES]))
        self._fill(length)
        body = bytes(self._buffer[PREFIX_BYTES:length])
        del self._buffer[:length]
        frame = decode_sidecar_frame(body)
        if isinstance(frame, Failure):
            raise ConnectionError(f"the sidecar refused: {frame.code}, {frame.message}")
        return frame

    def expect(self, kind: type[FrameT]) -> FrameT:
        """The next frame of `kind`."""
        while True:
            frame = self.receive()
            if isinstance(frame, kind):
                return frame

    def take_descriptor(self) -> int:
        """The descriptor that came with the welcome."""
        return self._descriptors.pop()

    def ping(self, number: int) -> float:
        """Seconds of one empty round trip."""
        started = time.perf_counter()
        self.send(Ping(number))
        self.expect(Pong)
        return time.perf_counter() - started

    def _fill(self, wanted: int) -> None:
        while len(self._buffer) < wanted:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 4)
            if not data:
                raise ConnectionError("the sidecar closed the connection")
            self._descriptors += descriptors
            self._buffer += data


class Scheduler(Connection):
    """The connection that asks."""

    def __init__(self, address: Address) -> None:
        super().__init__(address, "scheduler")

    def open(self, name: str, prompt: Prompt) -> Verdict:
        """Open a request."""
        self.send(Open(name, prompt.grant, prompt.salt, prompt.packed, "none"))
        return self.expect(Verdict)

    def look_up(self, name: str, prompt: Prompt) -> tuple[float, Verdict]:
        """Open a request, and end it again outside the clock: seconds, and the verdict."""
        started = time.perf_counter()
        verdict = self.open(name, prompt)
        seconds = time.perf_counter() - started
        self.send(Finish(name))
        return seconds, verdict


class Worker(Connection):
    """The connection that moves bytes."""

    def __init__(self, address: Address) -> None:
        super().__init__(address, "worker")
        descriptor = self.take_descriptor()
        self.staging = mmap.mmap(descriptor, self.welcome.staging_bytes)
        os.close(descriptor)

    def save(self, request: str, tokens: int, content: bytes) -> int:
        """Save the first `tokens` tokens, every block with this content; blocks stored."""
        stored = 0
        for number in itertools.count(1):
            self.send(Save(request, number, tokens))
            slots = self.expect(Slots).slots
            for slot in slots:
                self.staging[slot.offset : slot.offset + len(content)] = content
                self.send(Filled(number, slot.offset, True))
            stored += self.expect(SaveDone).stored
            if not slots:
                break
        return stored

    def load(
        self, request: str, number: int, tokens: int, part: Callable[[Part], None] = lambda _: None
    ) -> int:
        """Load the first `tokens` tokens; each part is answered at once. Parts received."""
        self.send(Load(request, number, 0, tokens))
        parts = 0
        while True:
            match self.receive():
                case Part() as frame:
                    part(frame)
                    parts += 1
                    self.send(Copied(number, frame.offset))
                case LoadDone():
                    return parts
                case LoadFailed() as failed:
                    raise ConnectionError(f"the load failed at token {failed.start}")
                case _:
                    pass


def read_token(path: Path) -> str:
    """An engine's token."""
    return path.read_text().strip()


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that `share` of all are at or below."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
