"""Frames: what is sent comes back, and nothing else gets in."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ProtocolViolation
from strongroom.limits import FRAME_BYTES_MAX
from strongroom.wire import frames
from strongroom.wire.frames import EngineFrame, Open, Ping, SidecarFrame, Verdict
from strongroom.wire.framing import (
    body_length,
    decode_engine_frame,
    decode_sidecar_frame,
    encode_frame,
)

engine_frames = st.one_of([st.from_type(kind) for kind in get_args(EngineFrame)])
sidecar_frames = st.one_of([st.from_type(kind) for kind in get_args(SidecarFrame)])


def within_msgpack(frame: Any) -> bool:
    """msgpack holds integers from -2^63 to 2^64-1, and text that encodes as UTF-8."""
    try:
        encode_frame(frame)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@given(engine_frames.filter(within_msgpack))
def test_engine_frames_come_back_as_they_were(frame: EngineFrame) -> None:
    encoded = encode_frame(frame)
    assert body_length(encoded[:4]) == len(encoded) - 4
    assert decode_engine_frame(encoded[4:]) == frame


@given(sidecar_frames.filter(within_msgpack))
def test_sidecar_frames_come_back_as_they_were(frame: SidecarFrame) -> None:
    assert decode_sidecar_frame(encode_frame(frame)[4:]) == frame


@given(st.binary(max_size=200))
def test_random_bytes_are_a_frame_or_a_protocol_violation(raw: bytes) -> None:
    for decode in (decode_engine_frame, decode_sidecar_frame):
        with contextlib.suppress(ProtocolViolation):
            decode(raw)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0"], ids=["lists", "maps"])
def test_a_frame_nested_too_deep_is_a_protocol_violation(opening: bytes) -> None:
    # An unknown field is skipped, and skipping recurses: the parser's limit must not escape.
    body = b"\x83\xa4type\xa4ping\xa6number\x05\xa5added" + opening * 100_000 + b"\x00"
    for decode in (decode_engine_frame, decode_sidecar_frame):
        with pytest.raises(ProtocolViolation):
            decode(body)


@given(engine_frames.filter(within_msgpack), st.data())
def test_a_truncated_frame_is_a_protocol_violation(frame: EngineFrame, data: st.DataObject) -> None:
    body = encode_frame(frame)[4:]
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolViolation):
        decode_engine_frame(body[:cut])


def test_an_unknown_tag_is_refused_clearly() -> None:
    body = msgspec.msgpack.encode({"type": "hang_up", "number": 1})
    with pytest.raises(ProtocolViolation, match="hang_up"):
        decode_engine_frame(body)


def test_a_sidecars_frame_is_no_engines_frame() -> None:
    body = encode_frame(Verdict("r", allowed=True, tokens=1, save=True))[4:]
    assert decode_sidecar_frame(body).__class__ is Verdict
    with pytest.raises(ProtocolViolation):
        decode_engine_frame(body)


def test_an_unknown_field_of_a_known_frame_is_ignored() -> None:
    body = msgspec.msgpack.encode({"type": "ping", "number": 3, "added_later": True})
    assert decode_engine_frame(body) == Ping(3)


@pytest.mark.parametrize("length", [0, FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_empty_and_oversized_frames_are_refused_before_they_are_read(length: int) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        body_length(struct.pack("<I", length))
    assert caught.value.limit == FRAME_BYTES_MAX
    assert body_length(struct.pack("<I", FRAME_BYTES_MAX)) == FRAME_BYTES_MAX


@pytest.mark.parametrize("prefix", [b"", b"\1", b"\1\0\0"])
def test_a_truncated_prefix_is_refused(prefix: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        body_length(prefix)


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolViolation) as caught:
        encode_frame(Open("r", "", "", bytes(FRAME_BYTES_MAX), "none"))
    assert caught.value.limit == FRAME_BYTES_MAX


def test_tags_are_unique_and_frozen() -> None:
    kinds = [*get_args(EngineFrame), *get_args(SidecarFrame)]
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(kinds)
    with pytest.raises(AttributeError):
        Ping(1).number = 2  # type: ignore[misc]
    assert frames.PROTOCOL_VERSION == 1
