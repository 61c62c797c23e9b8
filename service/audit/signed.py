"""A signed head as it is stored and shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The tree of `size` events had `root` (hexadecimal); `jws` says so, signed."""

    size: int
    root: str
    at: str
    jws: str
