"""Who may open a session, and what it declares (DESIGN section 2).

Rules:
- The peer's uid must be on the list, and its token must equal the content of that engine's token
  file, which only that engine can read. Both must hold; a uid alone authenticates nothing.
- A gateway is no engine: it greets with a token file of its own, `<name>.gateway` in the same
  folder, and may give hints alone. One kind of token never opens the other kind of session.
- Whatever is wrong with the credentials, the answer is one and the same `Refused`.
- Format and layout must be ones that blocks can be cut from: anything else is `Misuse`, and
  names the field, since it is the engine's operator who has to repair it.
"""

from __future__ import annotations

import hmac
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from strongroom.blocks import Grid
from strongroom.errors import Misuse, ProtocolViolation, Refused, StrongroomError
from strongroom.kvformat import KVFormat, Layout
from strongroom.limits import SEGMENT_BYTES_MAX
from strongroom.private_files import read_private
from strongroom.wire.frames import PROTOCOL_VERSION, Digests, Greet, Hello

Role = Literal["scheduler", "worker"]
_UCRED: Final = struct.Struct("3i")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_RANKS_MAX: Final = 1024

_ENGINE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Greeting:
    """A hello that was accepted, parsed."""

    engine: str
    role: Role
    digests: Digests
    format: KVFormat
    layout: Layout
    grid: Grid

    @property
    def ranks(self) -> int:
        """How many shards a block has."""
        return self.layout.tp_size * self.layout.pp_size

    def agrees_with(self, other: Greeting) -> bool:
        """Whether both are of one engine: the same measurements, format and parallel shape."""
        mine, theirs = self.layout, other.layout
        return (self.digests, self.format, self.grid, mine.tp_size, mine.pp_size) == (
            other.digests,
            other.format,
            other.grid,
            theirs.tp_size,
            theirs.pp_size,
        )


@dataclass(frozen=True, slots=True)
class GatewayGreeting:
    """A gateway's greeting that was accepted. Its hints are for `engine`, connected or not."""

    name: str
    engine: str


class Doorkeeper:
    """Checks peers and hellos against the settings."""

    def __init__(
        self,
        allowed_uids: frozenset[int],
        engine_tokens: Path,
        tokens_per_block: int,
        staging_bytes: int,
    ) -> None:
        self._allowed_uids = allowed_uids
        self._engine_tokens = engine_tokens
        self._tokens_per_block = tokens_per_block
        self._staging_bytes = staging_bytes

    def check_peer(self, peer: socket.socket) -> None:
        """Refuse a process whose uid is not on the list."""
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(raw)
        if uid not in self._allowed_uids:
            raise Refused("this process may not open a session")

    def check_hello(self, hello: Hello) -> Greeting:
        """Parse and authenticate. Reads the token file anew, since it may have been rotated."""
        _check_version(hello.version)
        self._authenticate(hello.engine, "token", hello.token)
        if hello.role not in {"scheduler", "worker"}:
            raise ProtocolViolation("a role is scheduler or worker", field="role")
        for name in ("model", "tokenizer", "template"):
            if _DIGEST.fullmatch(getattr(hello.digests, name)) is None:
                raise Misuse("not a SHA-256 in hexadecimal", field=f"digests.{name}")
        kv_format, layout = _parse_format(hello), _parse_layout(hello)
        grid = Grid(self._tokens_per_block, layout.page_tokens)
        self._check_sizes(kv_format, layout)
        role: Role = "worker" if hello.role == "worker" else "scheduler"
        return Greeting(hello.engine, role, hello.digests, kv_format, layout, grid)

    def check_greet(self, greet: Greet) -> GatewayGreeting:
        """Authenticate a gateway. Whether the engine exists is not looked at."""
        _check_version(greet.version)
        self._authenticate(greet.name, "gateway", greet.token)
        try:
            engine = check_engine_name(greet.engine)
        except Misuse as error:
            raise Refused("this process may not open a session") from error
        return GatewayGreeting(greet.name, engine)

    def _authenticate(self, name: str, kind: Literal["token", "gateway"], token: str) -> None:
        """`kind` is how the names of these token files end: an engine's is no gateway's."""
        try:
            name = check_engine_name(name)
            expected = read_private(self._engine_tokens / f"{name}.{kind}").strip()
        except (OSError, StrongroomError) as error:
            raise Refused("this process may not open a session") from error
        if not expected or not hmac.compare_digest(expected, token.encode()):
            raise Refused("this process may not open a session")

    def _check_sizes(self, kv_format: KVFormat, layout: Layout) -> None:
        layers, held = kv_format.layers, len(layout.page_bytes)
        if held > layers or (layout.pp_size == 1 and held != layers):
            raise Misuse("layout and format have other layers", field="layout", limit=layers)
        if layout.tp_size * layout.pp_size > _RANKS_MAX:
            raise Misuse("too many ranks", field="layout.tp_size", limit=_RANKS_MAX)
        largest = max(layout.segment_bytes(self._tokens_per_block))
        if largest > SEGMENT_BYTES_MAX:
            raise Misuse("a segment is too large", field="layout", limit=SEGMENT_BYTES_MAX)
        if layout.block_bytes(self._tokens_per_block) > self._staging_bytes:
            raise Misuse(
                "staging does not hold one block", field="layout", limit=self._staging_bytes
            )


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolViolation("another protocol version", field="version", limit=PROTOCOL_VERSION)


def _parse_format(hello: Hello) -> KVFormat:
    fields = hello.format
    return KVFormat(
        dtype=fields.dtype,
        quantization=fields.quantization,
        layers=fields.layers,
        kv_heads=fields.kv_heads,
        head_size=fields.head_size,
        attention=fields.attention,
        rope=fields.rope,
    )


def _parse_layout(hello: Hello) -> Layout:
    fields = hello.layout
    return Layout(
        order=fields.order,
        isa=fields.isa,
        page_tokens=fields.page_tokens,
        page_bytes=fields.page_bytes,
        tp_size=fields.tp_size,
        tp_rank=fields.tp_rank,
        pp_size=fields.pp_size,
        pp_rank=fields.pp_rank,
    )


def check_engine_name(engine: str) -> str:
    """An engine's id names its token file, so it must be a plain file name."""
    if _ENGINE_NAME.fullmatch(engine) is None:
        raise Misuse("an engine id is 1 to 64 of A-Z a-z 0-9 . _ -", field="engine", limit=64)
    return engine
