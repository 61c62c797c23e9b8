"""How a route goes out of use without breaking who still calls it.

The path's first part is the version of the whole API (`/v1`). What is only added stays in it: new
routes, new optional fields of a request, new fields of an answer. What would break a caller gets
a new path beside the old one, and the old one is listed in `DEPRECATED`. From then on:
- its answers, problems included, carry `Deprecation` (RFC 9745), `Sunset` (RFC 8594) and a `Link`
  to what comes after it;
- the OpenAPI document says `deprecated`;
- until `sunset` it works as before. It is taken out in a release after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import MappingProxyType
from typing import Any, Final

from fastapi import Depends, FastAPI, Request

from service.http_headers import tell
from strongroom.errors import Misuse

NOTICE: Final = timedelta(days=180)
"""The least time between the two moments."""


@dataclass(frozen=True, slots=True)
class Deprecation:
    """A route that goes: since when it is deprecated, until when it answers, what to use."""

    since: datetime
    sunset: datetime
    successor: str
    """The path that comes after it."""

    def __post_init__(self) -> None:
        if self.since.tzinfo is None or self.sunset.tzinfo is None:
            raise Misuse("a deprecation's moments have a zone", field="sunset")
        if self.sunset - self.since < NOTICE:
            raise Misuse("callers get half a year", field="sunset", limit=NOTICE.days)

    def headers(self) -> dict[str, str]:
        """What an answer of the route says about it."""
        return {
            "Deprecation": f"@{int(self.since.timestamp())}",
            "Sunset": format_datetime(self.sunset.astimezone(UTC), usegmt=True),
            "Link": f'<{self.successor}>; rel="successor-version"',
        }


DEPRECATED: Final[Mapping[str, Deprecation]] = MappingProxyType({})
"""By `METHOD /path` as the document has it. Nothing is deprecated yet."""


def telling(deprecated: Mapping[str, Deprecation]) -> Any:
    """A dependency of every route: those that go say so."""

    async def dependency(request: Request) -> None:
        path = getattr(request.scope.get("route"), "path", "")
        found = deprecated.get(f"{request.method} {path}")
        if found is not None:
            tell(request, found.headers())

    return Depends(dependency)


def mark(document: dict[str, Any], deprecated: Mapping[str, Deprecation]) -> None:
    """Say it in the OpenAPI document. Raises `Misuse` for a route that there is not."""
    for route, deprecation in deprecated.items():
        method, _, path = route.partition(" ")
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is None:
            raise Misuse("a deprecated route is not there", field=route)
        operation["deprecated"] = True
        operation["x-sunset"] = deprecation.sunset.astimezone(UTC).date().isoformat()


def install(app: FastAPI, deprecated: Mapping[str, Deprecation]) -> None:
    """Have every route of `app` that is added from now on say when it goes."""
    app.router.dependencies.append(telling(deprecated))
