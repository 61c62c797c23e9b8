"""Errors, split by whose fault it is.

Every error carries a stable `code`, and where an input was at fault the name of its `field`
and the `limit` that it broke. A message never holds a secret, a token or plaintext.
"""

from __future__ import annotations

from typing import ClassVar


class StrongroomError(Exception):
    """The root of every error that Strongroom raises on purpose."""

    code: ClassVar[str] = "error"

    def __init__(
        self, message: str, *, field: str | None = None, limit: str | int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = limit


class Misuse(StrongroomError):
    """The caller sent something that no state of the system could accept."""

    code = "misuse"


class Refused(StrongroomError):
    """The caller may not have this, whether or not it exists."""

    code = "refused"


class Missing(StrongroomError):
    """What was asked for is not here; the caller may create or recompute it."""

    code = "missing"


class Conflict(StrongroomError):
    """The request contradicts what is already there."""

    code = "conflict"


class Corrupt(StrongroomError):
    """Stored bytes are not what was written; they are quarantined and never served."""

    code = "corrupt"


class Overloaded(StrongroomError):
    """A bound was reached; the same request may succeed later."""

    code = "overloaded"


class Unavailable(StrongroomError):
    """A part that is needed cannot be reached, or may not serve now."""

    code = "unavailable"


class QuotaExceeded(Overloaded):
    """A tenant's quota in one tier is used up; nothing was stored."""

    code = "quota_exceeded"


class LeaseExpired(Unavailable):
    """The sidecar may not serve until the control plane has answered again."""

    code = "lease_expired"


class ProtocolViolation(Misuse):
    """A frame on the socket broke the protocol; the session is closed."""

    code = "protocol"
