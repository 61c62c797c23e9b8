"""Rows as Parquet, one row group a batch. The only module that needs pyarrow.

The file's footer comes last, so that what is written so far can leave at once.
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet as pq
from pydantic import BaseModel

_NUMBERS: Final = ("seq", "tokens", "bytes", "count")
_FLAGS: Final = ("retired",)


def schema_of(row: type[BaseModel]) -> pa.Schema:
    """Numbers and flags as such, everything else as text; lists and objects are JSON text."""
    return pa.schema([(name, _type(name)) for name in row.model_fields])


def _type(name: str) -> pa.DataType:
    if name in _NUMBERS:
        return pa.int64()
    return pa.bool_() if name in _FLAGS else pa.string()


async def write(
    row: type[BaseModel], batches: AsyncIterator[Sequence[BaseModel]]
) -> AsyncIterator[bytes]:
    """The bytes of one Parquet file."""
    schema = schema_of(row)
    sink = io.BytesIO()
    stream = _Unclosed(sink)
    writer = pq.ParquetWriter(stream, schema, compression="zstd")
    async for batch in batches:
        if batch:
            dumped = [each.model_dump(mode="json") for each in batch]
            columns = {name: [_value(values[name]) for values in dumped] for name in schema.names}
            writer.write_table(pa.table(columns, schema=schema))
            yield stream.drain()
    writer.close()
    yield stream.drain()


def _value(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value, separators=(",", ":"))
    return value


class _Unclosed(io.RawIOBase):
    """A sink that hands on what was written, and remembers how much that was."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer = buffer
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = self._buffer.write(data)
        self._at += written
        return written

    def tell(self) -> int:
        return self._at

    def drain(self) -> bytes:
        """What was written since the last call."""
        raw = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return raw
