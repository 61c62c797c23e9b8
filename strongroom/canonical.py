"""Canonical bytes: one encoding for whatever is hashed, signed or bound as AAD.

`encode_fields` writes a 4-byte magic, a u16 version, then every field as tag (u8), length
(u32) and value; all integers little-endian. Because each value is length-prefixed, no two
field lists share bytes: `(a, bc)` differs from `(ab, c)`. `canonical_json` is for messages
that people read too: sorted keys, no white space, UTF-8, no floats.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from strongroom.errors import Misuse

_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def encode_fields(magic: bytes, version: int, fields: Iterable[tuple[int, bytes]]) -> bytes:
    """Encode `fields` in the order given; see the module for the layout."""
    if len(magic) != 4:
        raise Misuse("a canonical encoding starts with a magic of 4 bytes", field="magic", limit=4)
    parts = [magic, struct.pack("<H", version)]
    for tag, value in fields:
        parts.append(struct.pack("<BI", tag, len(value)))
        parts.append(value)
    return b"".join(parts)


def canonical_json(message: Mapping[str, Any]) -> bytes:
    """Encode `message` so that equal messages have equal bytes.

    Raises `Misuse` for a float, whose text is not the same everywhere.
    """
    _refuse_floats(message)
    return _json.encode(message).encode()


def _refuse_floats(value: object) -> None:
    if isinstance(value, str | int):
        return
    if isinstance(value, float):
        raise Misuse("canonical JSON holds no floating point numbers", field="message")
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)
