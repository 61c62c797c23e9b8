"""Times that nobody can stretch by setting the host's clock.

Leases count on the boot clock alone. A grant's expiry is in wall-clock seconds, since another
host wrote it; here it is judged by the later of the wall clock and the wall clock at start
moved on by the boot clock, so that setting the host's clock back keeps no grant alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from strongroom.clock import Clock, boot_ns

NS: Final = 1_000_000_000


class Clocks:
    """The boot clock and the guarded wall clock. Both are injected in tests."""

    def __init__(self, boot: Clock = boot_ns, wall_s: Callable[[], float] = time.time) -> None:
        self.boot = boot
        self._wall_s = wall_s
        self._anchor_s = wall_s() - boot() / NS

    def now_s(self) -> int:
        """Seconds since the Unix epoch, never earlier than start plus what has passed since."""
        return int(max(self._wall_s(), self._anchor_s + self.boot() / NS))

    def timestamp(self) -> str:
        """RFC 3339, UTC, microseconds: for records, never for decisions."""
        return datetime.fromtimestamp(self._wall_s(), UTC).isoformat(timespec="microseconds")
