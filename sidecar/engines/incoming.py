"""Bytes that have been received, and the frames in them.

Bytes go from the kernel to where a frame will be decoded, and are copied nowhere else. Rules:
- A frame is announced by its length, which is checked before any room is made for it.
- Memory is bounded: by one frame of the largest size, and by `ROOM_BYTES` for all smaller ones.
  What a large frame needed is given back as soon as nothing is left of it.
"""

from __future__ import annotations

from typing import Final

from strongroom.wire.framing import PREFIX_BYTES, body_length

ROOM_BYTES: Final = 256 * 1024


class Incoming:
    """The receiving side of one connection. `room`, fill, `received`, `take`, and again."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(ROOM_BYTES))
        self._first = 0
        self._last = 0

    def room(self) -> memoryview:
        """Where the next bytes go; empty while whole frames are waiting to be taken."""
        if not self.holds:
            self._begin_anew()
        return self._bytes[self._last :]

    @property
    def holds(self) -> bool:
        """Whether something that was received has not been taken."""
        return self._last > self._first

    def received(self, nbytes: int) -> None:
        """So many bytes were put into `room()`."""
        self._last += nbytes

    def take(self) -> memoryview | None:
        """The body of the next frame if all of it is here, good until the next call of any method.

        Raises `ProtocolViolation` for a frame that is empty or too large.
        """
        held = self._last - self._first
        if not held:
            self._begin_anew()
            return None
        if held < PREFIX_BYTES:
            self._need(PREFIX_BYTES)
            return None
        body = self._first + PREFIX_BYTES
        length = body_length(bytes(self._bytes[self._first : body]))
        if held < PREFIX_BYTES + length:
            self._need(PREFIX_BYTES + length)
            return None
        self._first = body + length
        return self._bytes[body : self._first]

    def _begin_anew(self) -> None:
        self._first = self._last = 0
        if len(self._bytes) > ROOM_BYTES:
            self._bytes = memoryview(bytearray(ROOM_BYTES))

    def _need(self, nbytes: int) -> None:
        """Have room for a frame of so many bytes, of which the first are here."""
        if self._first + nbytes <= len(self._bytes):
            return
        held = bytes(self._bytes[self._first : self._last])
        if nbytes > len(self._bytes):
            self._bytes = memoryview(bytearray(nbytes))
        self._bytes[: len(held)] = held
        self._first, self._last = 0, len(held)
