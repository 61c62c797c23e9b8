"""May this sidecar serve at this instant, and until when?

One place answers, so that no path forgets a condition: the serving lease, the log, the audit
spool, and whether the sidecar itself was retired. Reasons go to events and audit only.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.clocks import Clocks
from sidecar.control.logstate import LogState
from strongroom.errors import LeaseExpired, Unavailable


@dataclass(frozen=True, slots=True)
class GateState:
    """What the gate says now; `reason` is empty while it is open."""

    open: bool
    reason: str
    deadline_ns: int


class Gate:
    """Closed at start; open while a lease runs under a log that is whole."""

    def __init__(self, log: LogState, clocks: Clocks) -> None:
        self._log = log
        self._clocks = clocks
        self._deadline_ns = 0
        self._shut = ""

    @property
    def deadline_ns(self) -> int:
        """The serving lease's end on the boot clock; 0 before the first."""
        return self._deadline_ns

    def extend(self, deadline_ns: int) -> None:
        """A newer lease; an answer that arrives out of order never shortens or stretches it."""
        self._deadline_ns = max(self._deadline_ns, deadline_ns)

    def end_lease(self) -> None:
        """The lease is void: the epoch changed, or the log broke."""
        self._deadline_ns = 0

    def shut(self, reason: str) -> None:
        """Closed for the rest of this process's life."""
        self._shut = self._shut or reason

    def require(self) -> int:
        """The deadline under which one may serve now; raises `Unavailable` otherwise."""
        if self._shut:
            raise Unavailable(self._shut)
        if not self._log.usable:
            raise Unavailable("the log has no verified head")
        if self._clocks.boot() >= self._deadline_ns:
            raise LeaseExpired("the serving lease has run out")
        return self._deadline_ns

    def state(self) -> GateState:
        """For metrics and health."""
        try:
            return GateState(True, "", self.require())
        except Unavailable as error:
            return GateState(False, error.message, self._deadline_ns)
