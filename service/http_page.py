"""The query of a listing: how many rows, and from where on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from service.cursors import CursorQuery, ListingDep
from service.db.pages import Paging
from service.runtime import RuntimeDep
from strongroom.errors import Misuse


async def paging(
    runtime: RuntimeDep,
    listing: ListingDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="Rows in one page.")] = 100,
    cursor: CursorQuery = None,
) -> Paging:
    """Checked against the settings and the listing."""
    most = runtime.settings.page_items_max
    if limit > most:
        raise Misuse(f"a page holds at most {most} rows", field="limit", limit=most)
    return Paging(limit, listing.place(cursor), listing.cursor)


PagingDep = Annotated[Paging, Depends(paging)]
