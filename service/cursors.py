"""Opaque cursors: a place in one listing, and a MAC that says whose listing it was.

Rules:
- A cursor goes on only in the listing that gave it out: the same tenant of the caller, the same
  path, the same filters. `listing` takes all three from the request itself, so that no route
  can leave one out; only `cursor` and `limit` may differ from page to page.
- Another tenant's, another filter's, a changed and an invented cursor are refused alike.
- The MAC's key lies in the key directory, so that every replica takes every replica's cursors.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Annotated, Final

from fastapi import Depends, Query, Request

from policy.signing import decode_base64url, encode_base64url
from service.auth.actor import Actor
from service.auth.scope import ActorDep
from service.runtime import RuntimeDep
from strongroom.canonical import canonical_json
from strongroom.errors import Misuse

CURSOR_CHARS_MAX: Final = 256
_VERSION: Final = b"\x02"
_MAC_BYTES: Final = 16
_NO_FILTER: Final = ("cursor", "limit")

CursorQuery = Annotated[
    str | None,
    Query(
        max_length=CURSOR_CHARS_MAX,
        description="`next_cursor` of the page before, with the same filters.",
    ),
]
"""The query parameter of every listing."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One listing of one caller. `about` is the digest of tenant, path and filters."""

    about: bytes
    key: bytes = field(repr=False)

    def cursor(self, place: bytes) -> str:
        """A cursor that goes on after `place`, in this listing alone."""
        return encode_base64url(_VERSION + self._mac(place) + place)

    def place(self, cursor: str | None) -> bytes | None:
        """The place that `cursor` names; None without one. Raises `Misuse`."""
        if cursor is None:
            return None
        raw = decode_base64url(cursor, "cursor")
        mac, place = raw[1 : 1 + _MAC_BYTES], raw[1 + _MAC_BYTES :]
        if raw[:1] != _VERSION or not hmac.compare_digest(mac, self._mac(place)):
            raise Misuse("this cursor was not given out by this listing", field="cursor")
        return place

    def _mac(self, place: bytes) -> bytes:
        # The digest's width is fixed, so that no place runs into what the MAC is about.
        return hmac.digest(self.key, _VERSION + self.about + place, "sha256")[:_MAC_BYTES]


def listing_of(actor: Actor, request: Request, key: bytes) -> Listing:
    """The listing that `request` asks for, as `actor` may see it."""
    filters = sorted(
        [name, value]
        for name, value in request.query_params.multi_items()
        if name not in _NO_FILTER
    )
    about = canonical_json(
        {"tenant": actor.tenant or "", "path": request.url.path, "filters": filters}
    )
    return Listing(hashlib.sha256(about).digest(), key)


async def listing(request: Request, runtime: RuntimeDep, actor: ActorDep) -> Listing:
    """A dependency: the listing that this request asks for."""
    return listing_of(actor, request, runtime.cursor_key)


ListingDep = Annotated[Listing, Depends(listing)]
