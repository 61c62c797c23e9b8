"""Everything that a question finds, as JSON Lines, CSV, Parquet or OCSF, batch by batch.

Rules:
- Memory holds one batch (Parquet: one row group), however much is exported.
- In CSV a cell that a spreadsheet would take for a formula begins with an apostrophe: names and
  reasons are chosen by callers, and an auditor's spreadsheet must not run them (CWE-1236).
- Parquet needs `pyarrow`, the optional extra `parquet`: its wheels are larger than all else.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from typing import Any, Final

from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from service.audit import ocsf
from service.audit.schemas import EventAnswer
from strongroom.errors import Misuse, Unavailable

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")


class Format(StrEnum):
    """What an answer is written as."""

    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    OCSF = "ocsf"


MEDIA_TYPES: Final[Mapping[Format, str]] = {
    Format.JSON: "application/json",
    Format.JSONL: "application/jsonl",
    Format.CSV: "text/csv",
    Format.PARQUET: "application/vnd.apache.parquet",
    Format.OCSF: "application/x-ndjson",
}
_SUFFIXES: Final[Mapping[Format, str]] = {
    Format.JSON: "json",
    Format.JSONL: "jsonl",
    Format.CSV: "csv",
    Format.PARQUET: "parquet",
    Format.OCSF: "ocsf.jsonl",
}

Batches = AsyncIterator[Sequence[BaseModel]]


def check(form: Format) -> None:
    """Raise `Unavailable` for a format whose library is not installed."""
    if form is Format.PARQUET and find_spec("pyarrow") is None:
        raise Unavailable(
            "Parquet needs pyarrow: install strongroom[parquet] beside the service",
            field="format",
        )


def response(form: Format, name: str, body: AsyncIterator[bytes]) -> StreamingResponse:
    """A stream that a browser saves under a name of its own."""
    disposition = f'attachment; filename="audit-{name}.{_SUFFIXES[form]}"'
    return StreamingResponse(
        body, media_type=MEDIA_TYPES[form], headers={"Content-Disposition": disposition}
    )


def of_events(form: Format, batches: AsyncIterator[list[EventAnswer]]) -> AsyncIterator[bytes]:
    """Events in a format."""
    return _ocsf(batches) if form is Format.OCSF else of_rows(form, EventAnswer, batches)


def of_rows(
    form: Format, row: type[BaseModel], batches: AsyncIterator[Sequence[Any]]
) -> AsyncIterator[bytes]:
    """Rows of one model in a format. Raises `Misuse` for OCSF, which is for events."""
    match form:
        case Format.JSON | Format.JSONL:
            return _json_lines(batches)
        case Format.CSV:
            return _csv(list(row.model_fields), batches)
        case Format.PARQUET:
            check(form)
            from service.audit import parquet  # noqa: PLC0415 - an optional extra

            return parquet.write(row, batches)
        case Format.OCSF:
            raise Misuse("OCSF is for events", field="format", limit="jsonl, csv, parquet")


async def once(rows: Sequence[Any]) -> AsyncIterator[Sequence[Any]]:
    """Rows that fit into one batch."""
    yield rows


async def _json_lines(batches: Batches) -> AsyncIterator[bytes]:
    async for batch in batches:
        yield b"".join(row.model_dump_json().encode() + b"\n" for row in batch)


async def _ocsf(batches: AsyncIterator[list[EventAnswer]]) -> AsyncIterator[bytes]:
    async for batch in batches:
        yield b"".join(
            json.dumps(ocsf.api_activity(event), separators=(",", ":")).encode() + b"\n"
            for event in batch
        )


async def _csv(names: Sequence[str], batches: Batches) -> AsyncIterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    async for batch in batches:
        for row in batch:
            values = row.model_dump(mode="json")
            writer.writerow([cell(values[name]) for name in names])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    if text.tell():
        yield text.getvalue().encode()


def cell(value: Any) -> str:
    """One value as a CSV cell that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text
