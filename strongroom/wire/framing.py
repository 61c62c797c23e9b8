"""Length-prefixed frames: u32 little-endian body length, then a msgpack body.

A body of zero or more than `FRAME_BYTES_MAX` bytes, an unknown tag, a missing or an
ill-typed field is a `ProtocolViolation`: the receiver says so once and closes the session.
Unknown fields of known frames are ignored, so that a newer minor version may add some.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from strongroom.errors import ProtocolViolation
from strongroom.limits import FRAME_BYTES_MAX
from strongroom.wire.frames import EngineFrame, SidecarFrame

PREFIX_BYTES: Final = 4
_PREFIX = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(EngineFrame)
_sidecar_decoder = msgspec.msgpack.Decoder(SidecarFrame)


def encode_frame(frame: EngineFrame | SidecarFrame) -> bytes:
    """Prefix and body of `frame`, ready to be sent."""
    body = _encoder.encode(frame)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolViolation("frame too large", field="frame", limit=FRAME_BYTES_MAX)
    return _PREFIX.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """The body length that a prefix announces, checked against the limit."""
    if len(prefix) != PREFIX_BYTES:
        raise ProtocolViolation("truncated frame", field="length", limit=PREFIX_BYTES)
    length = int(_PREFIX.unpack(prefix)[0])
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ProtocolViolation(
            "frame is empty or too large", field="length", limit=FRAME_BYTES_MAX
        )
    return length


def decode_engine_frame(body: bytes | memoryview) -> EngineFrame:
    """A frame that an engine sent."""
    try:
        return _engine_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"not a frame of this protocol: {error}", field="frame") from error


def decode_sidecar_frame(body: bytes | memoryview) -> SidecarFrame:
    """A frame that a sidecar sent."""
    try:
        return _sidecar_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"not a frame of this protocol: {error}", field="frame") from error
