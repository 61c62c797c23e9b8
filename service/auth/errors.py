"""Refusals at the door. `service.http_errors` turns them into status codes."""

from __future__ import annotations

from strongroom.errors import Refused


class Unauthenticated(Refused):
    """The caller did not prove who it is."""

    code = "unauthenticated"


class Forbidden(Refused):
    """The caller is known, and its roles do not allow this kind of request at all."""

    code = "forbidden"
