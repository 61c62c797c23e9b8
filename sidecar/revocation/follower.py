"""Following the invalidation log: stream and pages, verified, applied in order, acknowledged.

Rules:
- Every entry is a JWS of a pinned key, whose payload is the canonical JSON of one `LogEntry`.
  An entry that does not verify is not an entry: the connection is dropped, nothing is applied.
- Stream and pages feed one sequence under one lock. The stream makes news faster; what counts
  is that the log is applied up to the head that a serving lease names.
- The first head is the one of a verified serving lease. What was applied in an earlier life is
  the ground to stand on: the log must continue from there. A gap, a step back or a fork breaks
  the state for the rest of this process's life.
- A new epoch, told by a signed serving lease, means: start afresh. Keys, requests and staging
  are dropped, grants from before are dead, and stored namespaces are asked about. So does a page
  that says that this sidecar is too far behind, and then it stands at the lease's signed head:
  whoever makes the page up has it forget, and never serve more.
- `fenced` is acknowledged when it is true: after every transfer that was stopped has ended. It
  waits for nothing else: `reclaimed` follows from a task of its own. Each kind keeps its order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from sidecar.clocks import Clocks
from sidecar.control.client import ControlClient, ServingLease
from sidecar.control.logstate import LogBroken, LogState
from sidecar.revocation.invalidation import Effect, Invalidation
from sidecar.state import StateDirectory
from strongroom.control import AckRequest, Typ
from strongroom.errors import Corrupt, Refused, StrongroomError, Unavailable
from strongroom.log import LogEntry, LogHead

_log = logging.getLogger(__name__)

_ACKS_MAX: Final = 256
_QUIET_S: Final = 10.0
_RETRY_FIRST_S: Final = 0.05
_RETRY_LAST_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Owed:
    """An acknowledgement to be made: up to `head`, which did this."""

    head: LogHead
    effect: Effect


_Acknowledge = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class FollowerCounts:
    """What the follower saw."""

    entries: int = 0
    streams: int = 0
    refused: int = 0
    loads_fenced: int = 0
    saves_fenced: int = 0
    namespaces_dropped: int = 0
    bytes_reclaimed: int = 0
    acknowledged_fenced: int = 0
    acknowledged_reclaimed: int = 0
    retired_at_start: int = 0
    afresh: int = 0


@dataclass(slots=True)
class Follower:
    """One log, followed. `run_stream`, `run_fenced` and `run_reclaimed` are its tasks."""

    client: ControlClient
    log: LogState
    invalidation: Invalidation
    state: StateDirectory
    clocks: Clocks
    heartbeat_timeout_s: float
    heard: Callable[[LogEntry], None] | None = None
    """Told of every verified entry, before it is applied."""
    counts: FollowerCounts = field(default_factory=FollowerCounts)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _started: asyncio.Event = field(default_factory=asyncio.Event)
    _owed: asyncio.Queue[_Owed] = field(default_factory=lambda: asyncio.Queue(_ACKS_MAX))
    _reclaimable: LogHead | None = None
    """Fenced up to here, and not reclaimed yet."""
    _fenced_more: asyncio.Event = field(default_factory=asyncio.Event)

    async def confirm(self, lease: ServingLease) -> None:
        """Stand at least where `lease` says, or raise: `LogBroken`, `Refused`, `Unavailable`."""
        claims = lease.claims
        claimed = LogHead(claims.epoch, claims.seq, claims.hash)
        async with self._lock:
            self._refuse_if_broken()
            try:
                if self.log.head is None:
                    self._begin(claimed)
                elif self.log.head.epoch != claimed.epoch:
                    self._begin_afresh(claimed, "a new epoch")
                await self._pull(claimed)
                self.log.check_known(claimed)
            except LogBroken as error:
                self._break(error)
                raise
        self._started.set()

    async def run_stream(self) -> None:
        """Take entries as they are pushed, until cancelled. Loss of the stream loses nothing:
        the next serving lease pulls what it would have brought.
        """
        pause_s = _RETRY_FIRST_S
        await self._started.wait()
        while not self.log.broken:
            head = self.log.head
            if head is None:  # pragma: no cover - started means that there is one
                return
            try:
                self.counts.streams += 1
                stream = self.client.stream(head.epoch, head.seq, self.heartbeat_timeout_s)
                # Closed here, and not whenever it is collected: it holds a connection.
                async with aclosing(stream) as pushed:
                    async for jws in pushed:
                        await self.take(jws)
                        pause_s = _RETRY_FIRST_S
            except LogBroken as error:
                _log.warning("the log broke: %s", error.message)
                return
            except StrongroomError as error:
                self.counts.refused += isinstance(error, Refused)
                _log.info("the invalidation stream ended: %s", error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_LAST_S)

    async def take(self, jws: str) -> None:
        """Apply one pushed entry."""
        entry = self._verified(jws)
        async with self._lock:
            self._refuse_if_broken()
            head = self.log.head
            if head is not None and entry.epoch != head.epoch:
                # A new epoch counts when a serving lease tells it, not before.
                raise Unavailable("the stream is of another epoch")
            try:
                self._apply(entry)
            except LogBroken as error:
                self._break(error)
                raise
            self._persist()

    async def run_fenced(self) -> None:
        """Acknowledge `fenced` in order, until cancelled; a service that is away is asked again."""
        while True:
            owed = [await self._owed.get()]
            while not self._owed.empty():
                owed.append(self._owed.get_nowait())
            for item in owed:
                if item.effect.requests or item.effect.namespaces or item is owed[-1]:
                    await self._until_acknowledged(partial(self._fenced, item))
            self._reclaimable = owed[-1].head
            self._fenced_more.set()

    async def run_reclaimed(self) -> None:
        """Free what was fenced and acknowledge it, until cancelled. Takes as long as it takes:
        what is fenced meanwhile is reclaimed in the next round.
        """
        while True:
            await self._fenced_more.wait()
            self._fenced_more.clear()
            head, self._reclaimable = self._reclaimable, None
            if head is not None:
                await self._until_acknowledged(partial(self._reclaimed, head))

    # The first head

    def _begin(self, claimed: LogHead) -> None:
        position = self.state.position()
        if position is not None and position.epoch == claimed.epoch:
            # `claimed` must then lie at or beyond it: `LogState.check_known` sees a step back.
            self.log.start(position, floor_seq=claimed.seq)
        else:
            self.log.start(claimed, floor_seq=claimed.seq)
        self._owe(claimed, Effect())

    def _begin_afresh(self, claimed: LogHead, why: str) -> None:
        _log.warning("%s: starting afresh", why)
        self.counts.afresh += 1
        effect = self.invalidation.fence_everything()
        self.log.start(claimed, floor_seq=claimed.seq)
        self._persist()
        self._owe(claimed, effect)

    # Entries

    async def _pull(self, claimed: LogHead) -> None:
        """Apply pages until the log stands at `claimed` or beyond."""
        while (head := self.log.head) is not None and head.seq < claimed.seq:
            page = await self.client.log_page(head.epoch, head.seq)
            if page.restart and page.epoch == head.epoch:
                self._begin_afresh(claimed, "too far behind the log")
                return
            if page.restart or page.epoch != head.epoch:
                raise Unavailable("the epoch ended while its log was read")
            for jws in page.entries:
                self._apply(self._verified(jws))
            if self.log.head == head:
                raise LogBroken(f"a gap: the log has no entry after {head.seq}")
        self._persist()

    def _verified(self, jws: str) -> LogEntry:
        payload = self.client.verifier.verify(Typ.LOG, jws)
        try:
            entry = msgspec.json.decode(payload, type=LogEntry)
        except msgspec.DecodeError as error:
            raise Refused("a log entry cannot be understood") from error
        if entry.payload() != payload:
            raise Refused("a log entry is not in canonical form")
        return entry

    def _apply(self, entry: LogEntry) -> None:
        """Record and enforce; no `await` in here, so nothing is served in between."""
        if not self.log.check_next(entry):
            return
        if self.heard is not None:
            self.heard(entry)
        self.log.apply(entry, self.clocks.boot())
        effect = self.invalidation.fence(entry)
        self.counts.entries += 1
        self.counts.loads_fenced += effect.loads
        self.counts.saves_fenced += effect.saves
        self.counts.namespaces_dropped += len(effect.namespaces)
        self._owe(LogHead(entry.epoch, entry.seq, entry.hash()), effect)

    def _refuse_if_broken(self) -> None:
        if self.log.broken:
            raise LogBroken(self.log.broken)

    def _break(self, error: LogBroken) -> None:
        self.log.break_off(error.message)
        self.invalidation.fence_everything()

    def _persist(self) -> None:
        if self.log.head is None or self.log.broken:
            return
        try:
            self.state.write_position(self.log.head)
        except OSError as error:
            # The position only makes the next start's check stricter.
            _log.warning("the log position cannot be written: %s", error.strerror)

    # Acknowledgements

    def _owe(self, head: LogHead, effect: Effect) -> None:
        try:
            self._owed.put_nowait(_Owed(head, effect))
        except asyncio.QueueFull:
            # The newest acknowledgement covers all before it; the oldest gives way.
            oldest = self._owed.get_nowait()
            merged = Effect(
                oldest.effect.stopped + effect.stopped,
                oldest.effect.namespaces | effect.namespaces,
                oldest.effect.requests + effect.requests,
            )
            self._owed.put_nowait(_Owed(head, merged))

    async def _until_acknowledged(self, act: _Acknowledge) -> None:
        pause_s = _RETRY_FIRST_S
        while True:
            try:
                await act()
            except (Refused, Corrupt) as error:
                _log.warning("an acknowledgement was refused: %s", error.message)
                return
            except StrongroomError as error:
                _log.info("an acknowledgement waits: %s", error.message)
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_LAST_S)

    async def _fenced(self, item: _Owed) -> None:
        await item.effect.quiet(_QUIET_S)
        await self.invalidation.staging_wiped(_QUIET_S)
        await self.client.acknowledge(
            AckRequest(
                epoch=item.head.epoch,
                seq=item.head.seq,
                state="fenced",
                loads_fenced=item.effect.loads,
                saves_fenced=item.effect.saves,
                namespaces_dropped=len(item.effect.namespaces),
            )
        )
        self.counts.acknowledged_fenced = item.head.seq

    async def _reclaimed(self, head: LogHead) -> None:
        # Namespaces found on NVMe, whose components no lease has told: the service knows them.
        self.counts.retired_at_start += await self.invalidation.ask_liveness(
            self.client, unknown_only=True
        )
        reclaimed = await self.invalidation.reclaim()
        self.counts.bytes_reclaimed += reclaimed.bytes
        await self.client.acknowledge(
            AckRequest(
                epoch=head.epoch,
                seq=head.seq,
                state="reclaimed",
                bytes_reclaimed=reclaimed.bytes,
            )
        )
        self.counts.acknowledged_reclaimed = head.seq
