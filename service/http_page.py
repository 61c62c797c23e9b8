"""The query of a listing: how many rows, and from where on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query

from service.runtime import RuntimeDep
from strongroom.errors import Misuse


@dataclass(frozen=True, slots=True)
class Paging:
    """At most `limit` rows after `cursor`."""

    limit: int
    cursor: str | None


async def paging(
    runtime: RuntimeDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="Rows in one page.")] = 100,
    cursor: Annotated[
        str | None, Query(max_length=64, description="`next_cursor` of the page before.")
    ] = None,
) -> Paging:
    """Checked against the settings."""
    most = runtime.settings.page_items_max
    if limit > most:
        raise Misuse(f"a page holds at most {most} rows", field="limit", limit=most)
    return Paging(limit, cursor)


PagingDep = Annotated[Paging, Depends(paging)]
