"""A whole sidecar in this process: real socket, real storage, a fake control plane.

    async with harness(tmp_path) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(300))
        verdict = await engine.open("r1", granted)

`world.socket_path` and `world.token_path` are what an engine's connector needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sidecar.clocks import Clocks
from sidecar.compose import Sidecar, running
from sidecar.settings import load_settings
from strongroom.blocks import pack_tokens
from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    Copied,
    Digests,
    EngineFrame,
    Filled,
    Finish,
    Hello,
    KVFormatFields,
    LayoutFields,
    Load,
    LoadDone,
    LoadFailed,
    Open,
    Part,
    Save,
    SaveDone,
    SidecarFrame,
    Slot,
    Slots,
    Verdict,
    Welcome,
)
from strongroom.wire.framing import PREFIX_BYTES, body_length, decode_sidecar_frame, encode_frame
from tests.sidecar.control_plane import (
    MODEL,
    TEMPLATE,
    TOKENIZER,
    FakeControlPlane,
    Granted,
    Tenant,
)

FrameT = TypeVar("FrameT", bound=SidecarFrame)
ENGINE = "engine-a"
PAGE = 16
LAYERS = 2
PAGE_BYTES = 512
MIB = 1024 * 1024
DIGESTS = Digests(MODEL, TOKENIZER, TEMPLATE)
FORMAT = KVFormatFields("float32", "none", LAYERS, 2, 8, "gqa", "rope:10000")


def layout(tp_size: int = 1, tp_rank: int = 0, page_tokens: int = PAGE) -> LayoutFields:
    return LayoutFields(
        "cpu:nhd", "test", page_tokens, (PAGE_BYTES,) * LAYERS, tp_size, tp_rank, 1, 0
    )


def page_content(prompt: list[int], page: int, layer: int, rank: int = 0) -> bytes:
    """What the pretended engine computes: a function of all tokens up to the page's end."""
    seed = pack_tokens(prompt[: (page + 1) * PAGE]) + bytes((layer, rank))
    return hashlib.shake_256(seed).digest(PAGE_BYTES)


def block_content(prompt: list[int], start: int, end: int, rank: int = 0) -> bytes:
    pages = range(start // PAGE, end // PAGE)
    return b"".join(page_content(prompt, p, layer, rank) for layer in range(LAYERS) for p in pages)


class ManualClock:
    """A boot clock that tests move by hand."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class Wire:
    """One connection, as an engine has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.staging: mmap.mmap | None = None
        self.welcome: Welcome | None = None
        self.unread: list[SidecarFrame] = []

    @classmethod
    async def connect(cls, path: Path, hello: Hello) -> Wire:
        """Connect and say hello; raises what the sidecar answers if it is no welcome."""
        loop = asyncio.get_running_loop()
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.setblocking(False)
        try:
            await loop.sock_connect(raw, str(path))
            await loop.sock_sendall(raw, encode_frame(hello))
            data, descriptors = await _receive(raw)
            frame = decode_sidecar_frame(data)
            reader, writer = await asyncio.open_unix_connection(sock=raw)
        except BaseException:
            raw.close()
            raise
        wire = cls(reader, writer)
        if not isinstance(frame, Welcome):
            await wire.close()
            raise RefusedHello(frame)
        wire.welcome = frame
        if descriptors:
            (descriptor,) = descriptors
            wire.staging = mmap.mmap(descriptor, frame.staging_bytes)
            os.close(descriptor)
        return wire

    def send(self, frame: EngineFrame) -> None:
        self.writer.write(encode_frame(frame))

    async def receive(self) -> SidecarFrame:
        length = body_length(await self.reader.readexactly(PREFIX_BYTES))
        return decode_sidecar_frame(await self.reader.readexactly(length))

    async def expect(self, kind: type[FrameT]) -> FrameT:
        """The next frame of `kind`; others are kept in `unread`."""
        while True:
            async with asyncio.timeout(20):
                frame = await self.receive()
            if isinstance(frame, kind):
                return frame
            self.unread.append(frame)

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()
        if self.staging is not None:
            self.staging.close()
            self.staging = None


class RefusedHello(Exception):
    """The sidecar answered something else than welcome."""

    def __init__(self, frame: SidecarFrame) -> None:
        super().__init__(frame)
        self.frame = frame


async def _receive(raw: socket.socket) -> tuple[bytes, list[int]]:
    """One frame and the descriptors that came with it."""
    loop = asyncio.get_running_loop()
    data, descriptors = bytearray(), []
    wanted = PREFIX_BYTES
    while len(data) < wanted:
        ready = asyncio.Event()
        loop.add_reader(raw.fileno(), ready.set)
        try:
            await asyncio.wait_for(ready.wait(), 20)
        finally:
            loop.remove_reader(raw.fileno())
        # Not a byte more: what follows the welcome is the stream reader's.
        more, passed, _, _ = socket.recv_fds(raw, wanted - len(data), 4)
        if not more:
            raise ConnectionError("closed before an answer")
        data += more
        if len(data) == PREFIX_BYTES:
            wanted += body_length(bytes(data))
        descriptors += passed
    return bytes(data[PREFIX_BYTES:]), descriptors


@dataclass
class Restored:
    """What a load brought: bytes by block start, and how it ended."""

    blocks: dict[int, bytes] = field(default_factory=dict)
    end: LoadDone | LoadFailed | None = None

    @property
    def ok(self) -> bool:
        return isinstance(self.end, LoadDone)


class Engine:
    """A pretended engine: one scheduler and its workers."""

    def __init__(self, scheduler: Wire, workers: list[Wire]) -> None:
        self.scheduler = scheduler
        self.workers = workers
        self._number = 0

    async def open(self, request: str, granted: Granted, **changes: object) -> Verdict:
        fields: dict[str, object] = {
            "request": request,
            "grant": granted.token,
            "salt": granted.salt,
            "tokens": pack_tokens(granted.prompt),
            "adapter": "none",
        }
        self.scheduler.send(Open(**(fields | changes)))  # type: ignore[arg-type]
        return await self.scheduler.expect(Verdict)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def save(self, request: str, prompt: list[int], end: int, rank: int = 0) -> int:
        """Save the first `end` tokens; returns how many blocks were stored."""
        wire, number = self.workers[rank], self.next_number()
        wire.send(Save(request, number, end))
        slots = await wire.expect(Slots)
        for slot in slots.slots:
            self.fill(wire, slot, prompt, rank)
            wire.send(Filled(number, slot.offset, True))
        return (await wire.expect(SaveDone)).stored

    @staticmethod
    def fill(wire: Wire, slot: Slot, prompt: list[int], rank: int = 0) -> None:
        content = block_content(prompt, slot.start, slot.end, rank)
        assert wire.staging is not None
        wire.staging[slot.offset : slot.offset + len(content)] = content

    async def load(self, request: str, start: int, end: int, rank: int = 0) -> Restored:
        wire, number = self.workers[rank], self.next_number()
        wire.send(Load(request, number, start, end))
        restored = Restored()
        while True:
            async with asyncio.timeout(20):
                frame = await wire.receive()
            match frame:
                case Part():
                    restored.blocks[frame.start] = self.read_part(wire, frame)
                    wire.send(Copied(number, frame.offset))
                case LoadDone() | LoadFailed():
                    restored.end = frame
                    return restored
                case _:
                    wire.unread.append(frame)

    @staticmethod
    def read_part(wire: Wire, part: Part) -> bytes:
        size = (part.end - part.start) // PAGE * PAGE_BYTES * LAYERS
        assert wire.staging is not None
        return bytes(wire.staging[part.offset : part.offset + size])

    async def compute_and_save(self, request: str, granted: Granted) -> int:
        """Open, save the whole prompt, finish; returns the blocks stored."""
        await self.open(request, granted)
        whole = len(granted.prompt) - len(granted.prompt) % PAGE
        stored = await self.save(request, granted.prompt, whole)
        self.scheduler.send(Finish(request))
        return stored

    async def close(self) -> None:
        for wire in (self.scheduler, *self.workers):
            await wire.close()


@dataclass
class World:
    """Everything a test talks to."""

    sidecar: Sidecar
    control: FakeControlPlane
    tenant: Tenant
    directory: Path
    socket_path: Path
    token_path: Path
    token: str
    engines: list[Engine] = field(default_factory=list)

    def hello(self, role: str, **changes: object) -> Hello:
        fields: dict[str, object] = {
            "version": PROTOCOL_VERSION,
            "engine": ENGINE,
            "role": role,
            "token": self.token,
            "digests": DIGESTS,
            "format": FORMAT,
            "layout": layout(),
        }
        return Hello(**(fields | changes))  # type: ignore[arg-type]

    async def connect(self, role: str, **changes: object) -> Wire:
        return await Wire.connect(self.socket_path, self.hello(role, **changes))

    async def engine(self, tp_size: int = 1, **changes: object) -> Engine:
        workers = [
            await self.connect("worker", layout=layout(tp_size, rank), **changes)
            for rank in range(tp_size)
        ]
        scheduler = await self.connect("scheduler", layout=layout(tp_size), **changes)
        engine = Engine(scheduler, workers)
        self.engines.append(engine)
        return engine


@asynccontextmanager
async def harness(
    directory: Path,
    control: FakeControlPlane | None = None,
    *,
    clocks: Clocks | None = None,
    wait: bool = True,
    **overrides: object,
) -> AsyncIterator[World]:
    """A running sidecar below `directory`, enrolled, with its first lease (`wait`)."""
    control = control or FakeControlPlane()
    tokens = directory / "tokens"
    tokens.mkdir(exist_ok=True)
    token_path = tokens / f"{ENGINE}.token"
    if not token_path.exists():
        token_path.touch(mode=0o600)
        token_path.write_text(secrets.token_urlsafe(32))
    fields: dict[str, object] = {
        "state_directory": directory / "state",
        "socket_path": directory / "run" / "s.sock",
        "engine_tokens": tokens,
        "nvme_path": directory / "nvme",
        "service_url": "http://control.invalid",
        "join_token": "join-me",
        "tokens_per_block": 64,
        "staging_bytes": MIB,
        "host_bytes": 8 * MIB,
        "nvme_bytes": 8 * MIB,
        "region_bytes": MIB,
        "crypto_threads": 1,
        "ship_interval_s": 0.01,
        "prefetch_read_s": 3600.0,
    }
    settings = load_settings({}, **(fields | overrides))
    async with running(settings, clocks=clocks, transport=control) as sidecar:
        if wait:
            async with asyncio.timeout(20):
                await sidecar.serving_begun()
        world = World(
            sidecar, control, control.tenant(), directory,
            settings.socket_path, token_path, token_path.read_text(),
        )  # fmt: skip
        try:
            yield world
        finally:
            for engine in world.engines:
                await engine.close()
