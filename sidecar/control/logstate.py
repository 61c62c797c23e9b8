"""What the invalidation log has said so far, and which grants are dead by it.

`LogState` is memory only: the follower feeds it verified entries in order, and the judge and
the gate read it. Rules (DESIGN section 6, "The log"):
- Entries are applied one after another under one epoch; a gap, a step back or a fork breaks
  the state, and a broken state serves nothing until the sidecar has started afresh.
- A grant is dead when it is of another epoch; was minted before the first head that was
  verified after start; names a retired component; is of a subject retired at a later seq; or
  of a tenant whose minimum revision is higher than its own.
- What is remembered is bounded: an entry is forgotten once every grant that it could kill, and
  every key lease that was asked for before it, has expired twice over.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from strongroom.errors import Corrupt
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId
from strongroom.limits import GRANT_LIFE_S_MAX
from strongroom.log import InvalidationKind, LogEntry, LogHead

HISTORY_MAX: Final = 4096
_REMEMBER_NS: Final = 2 * GRANT_LIFE_S_MAX * 1_000_000_000


class LogBroken(Corrupt):
    """The log has a gap, a step back or a fork: nothing may be served."""

    code = "log_broken"


class Dead(StrEnum):
    """Why a grant may not be used any more."""

    EPOCH = "epoch"
    BEFORE_START = "before_start"
    COMPONENT = "component"
    SUBJECT = "subject"
    REVISION = "revision"


@dataclass(frozen=True, slots=True)
class _Retired:
    seq: int
    at_ns: int


class LogState:
    """Position, history of hashes, and the dead. Used from the event loop only."""

    def __init__(self) -> None:
        self.head: LogHead | None = None
        self.floor_seq = 0
        self.broken: str = ""
        self._history: OrderedDict[int, str] = OrderedDict()
        self._components: OrderedDict[ComponentId, _Retired] = OrderedDict()
        self._subjects: OrderedDict[tuple[str, str], _Retired] = OrderedDict()
        self._revisions: OrderedDict[str, tuple[int, _Retired]] = OrderedDict()
        self._moved = asyncio.Event()

    @property
    def usable(self) -> bool:
        """A head was verified after start and nothing contradicted it since."""
        return self.head is not None and not self.broken

    def start(self, head: LogHead, floor_seq: int) -> None:
        """Stand at `head`; grants minted before `floor_seq` are dead."""
        self.head = head
        self.floor_seq = floor_seq
        self.broken = ""
        self._history.clear()
        self._remember(head)
        self._announce()

    def break_off(self, reason: str) -> None:
        """Serve nothing from now on. The first reason stays."""
        self.broken = self.broken or reason
        self._announce()

    def check_next(self, entry: LogEntry) -> bool:
        """True when `entry` is the next one, False when it is known already.

        Raises `LogBroken` for another epoch, a gap, or a hash that does not chain.
        """
        head = self._require()
        if entry.epoch != head.epoch:
            raise LogBroken("an entry of another epoch")
        if entry.seq <= head.seq:
            self.check_known(LogHead(entry.epoch, entry.seq, entry.hash()))
            return False
        if entry.seq != head.seq + 1:
            raise LogBroken(f"a gap: entry {entry.seq} after {head.seq}")
        if entry.prev != head.hash:
            raise LogBroken(f"a fork: entry {entry.seq} does not follow the one applied")
        return True

    def check_known(self, claimed: LogHead) -> None:
        """`claimed` must lie on the chain that was applied, as far as it is remembered."""
        head = self._require()
        if claimed.epoch != head.epoch:
            raise LogBroken("a head of another epoch")
        known = self._history.get(claimed.seq)
        if known is None:
            if self._history and claimed.seq < next(iter(self._history)):
                raise LogBroken(f"the log stepped back to {claimed.seq}")
            return
        if known != claimed.hash:
            raise LogBroken(f"a fork at {claimed.seq}")

    def apply(self, entry: LogEntry, now_ns: int) -> None:
        """Record an entry for which `check_next` was true."""
        retired = _Retired(entry.seq, now_ns)
        for component in entry.components:
            self._components[component] = retired
        if entry.kind is InvalidationKind.SUBJECT:
            self._subjects[entry.tenant, entry.subject] = retired
            self._subjects.move_to_end((entry.tenant, entry.subject))
        if entry.kind is InvalidationKind.TENANT_REVISION:
            known, _ = self._revisions.get(entry.tenant, (0, retired))
            self._revisions[entry.tenant] = (max(known, entry.min_revision), retired)
            self._revisions.move_to_end(entry.tenant)
        self.head = LogHead(entry.epoch, entry.seq, entry.hash())
        self._remember(self.head)
        self._forget(now_ns)
        self._announce()

    def dead(self, grant: GrantClaims) -> Dead | None:
        """Why `grant` may not be used, or None. The head must be known."""
        head = self._require()
        if grant.epoch != head.epoch:
            return Dead.EPOCH
        if grant.seq < self.floor_seq:
            return Dead.BEFORE_START
        if self.retired_components(grant_components(grant)):
            return Dead.COMPONENT
        subject = self._subjects.get((grant.tenant, grant.sub))
        if subject is not None and grant.seq < subject.seq:
            return Dead.SUBJECT
        revision = self._revisions.get(grant.tenant)
        if revision is not None and grant.revision < revision[0]:
            return Dead.REVISION
        return None

    def retired_components(self, components: frozenset[ComponentId]) -> bool:
        """Whether one of `components` was retired; ids are never used again."""
        return not components.isdisjoint(self._components)

    async def reach(self, epoch: str, seq: int, timeout_s: float) -> bool:
        """Wait until (epoch, seq) is applied; False at the deadline or when broken."""
        if self.is_behind(epoch, seq):
            try:
                async with asyncio.timeout(timeout_s):
                    while self.is_behind(epoch, seq):
                        await self._moved.wait()
            except TimeoutError:
                return False
        return self.usable

    def is_behind(self, epoch: str, seq: int) -> bool:
        """Whether (epoch, seq) may still come; not once the log is broken."""
        head = self.head
        return not self.broken and (head is None or head.epoch != epoch or head.seq < seq)

    def _require(self) -> LogHead:
        if self.head is None:
            raise LogBroken("no head was verified yet")
        return self.head

    def _remember(self, head: LogHead) -> None:
        self._history[head.seq] = head.hash
        while len(self._history) > HISTORY_MAX:
            self._history.popitem(last=False)

    def _forget(self, now_ns: int) -> None:
        oldest = now_ns - _REMEMBER_NS
        while self._subjects and next(iter(self._subjects.values())).at_ns < oldest:
            self._subjects.popitem(last=False)
        while self._revisions and next(iter(self._revisions.values()))[1].at_ns < oldest:
            self._revisions.popitem(last=False)
        while self._components and next(iter(self._components.values())).at_ns < oldest:
            self._components.popitem(last=False)

    def _announce(self) -> None:
        # A fresh event for whoever waits next: those waiting on the old one all wake up.
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def grant_components(grant: GrantClaims) -> frozenset[ComponentId]:
    """Every component that any namespace of `grant` depends on."""
    return frozenset(grant.base).union(*(span.adds for span in grant.spans))
