"""Why something was not served: the words of audit and metrics. The engine never hears them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The layer that missed or refused (DESIGN section 10)."""

    NONE = ""
    HOST = "host"
    NVME = "nvme"
    ABSENT = "absent"
    """Granted, and nothing of it is stored."""
    PERMISSION = "permission"
    IDENTITY = "identity"
    EXPIRED = "expired"
    INTEGRITY = "integrity"
    QUOTA = "quota"
    BACKPRESSURE = "backpressure"
    LEASE = "lease"
    REVOKED = "revoked"
    PROMPT = "prompt"
    PROTOCOL = "protocol"
    AUDIT = "audit"
    """No access record could be written, so nothing was served."""
    COST = "cost"
    """Stored, and computed anew, all or a part: that is expected to be sooner."""
    PARENT = "parent"
    """A block before it in its chain was not stored, so it could never match."""
    CANCELLED = "cancelled"
    BREAKER = "breaker"
    """A second look stopped a release, or a security breaker has tripped since: not even the
    engine's own prefix cache may be used."""
