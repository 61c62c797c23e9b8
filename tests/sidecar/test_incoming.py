"""Frames come out as they were put in, however they were cut on the way, in bounded memory."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.engines.incoming import ROOM_BYTES, Incoming
from strongroom.errors import ProtocolViolation
from strongroom.limits import FRAME_BYTES_MAX

SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(ROOM_BYTES - 8, ROOM_BYTES + 8),
    st.integers(1, 2 * ROOM_BYTES),
)


def put(incoming: Incoming, data: memoryview) -> int:
    """As much of `data` as there is room for."""
    room = incoming.room()
    count = min(len(room), len(data))
    room[:count] = data[:count]
    incoming.received(count)
    return count


@given(st.lists(SIZES, max_size=8), st.data())
def test_frames_come_out_as_they_were_put_in(sizes: list[int], data: st.DataObject) -> None:
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    wire = memoryview(b"".join(struct.pack("<I", len(body)) + body for body in bodies))
    incoming, stuck = Incoming(), 0
    taken: list[bytes] = []
    while len(taken) < len(bodies):
        step = data.draw(st.sampled_from((1, 3, 700, ROOM_BYTES, 4 * ROOM_BYTES)))
        count = put(incoming, wire[:step])
        wire = wire[count:]
        before = len(taken)
        while (body := incoming.take()) is not None:
            taken.append(bytes(body))
        stuck = stuck + 1 if not count and len(taken) == before else 0
        assert stuck < 2, "there is always room for the frame that has begun"
        if step == 1 and count:  # not byte by byte through a large frame
            wire = wire[put(incoming, wire[:ROOM_BYTES]) :]
    assert taken == bodies
    assert incoming.take() is None
    assert len(incoming.room()) == ROOM_BYTES, "what a large frame needed was given back"


@pytest.mark.parametrize("length", [0, FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_no_room_is_made_for_a_frame_of_a_length_that_is_not_allowed(length: int) -> None:
    incoming = Incoming()
    put(incoming, memoryview(struct.pack("<I", length)))
    with pytest.raises(ProtocolViolation):
        incoming.take()
    assert len(incoming.room()) <= ROOM_BYTES
