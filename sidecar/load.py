"""One load: open the stored prefix into staging, block after block, and release each part.

Rules:
- Lease, key and fence are checked right before a part is released, with no `await` between
  check and release; the part carries the deadline of the lease under which it was released.
- `LoadDone` is sent once every part was copied, so that it never speaks of bytes that were
  zeroed meanwhile. A fenced load fails from its start: none of its parts may be used.
- One of `LoadDone` and `LoadFailed` is sent, once, whatever happens.
- A slot returns to the free room when the engine has said `Copied`, or a grace after its
  part's deadline, when the engine refuses those bytes anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sidecar.audit import Kind
from sidecar.clocks import NS
from sidecar.patience import Patience
from sidecar.reasons import Reason
from sidecar.request import ChainedBlock, Judged, Request
from sidecar.slots import Slots
from sidecar.transfer import Depot, Shard
from storage.block import BlockAddress, BlockContext
from storage.fence import Fenced
from storage.staging import StagingSlot
from storage.tiers.protocol import TierName
from strongroom.derivation import NamespaceKeys
from strongroom.errors import (
    Corrupt,
    LeaseExpired,
    Missing,
    Overloaded,
    QuotaExceeded,
    Refused,
    StrongroomError,
    Unavailable,
)
from strongroom.wire.frames import Load, LoadDone, LoadFailed, Part, SidecarFrame

Send = Callable[[SidecarFrame], None]


def block_context(judged: Judged, block: ChainedBlock, shard: Shard) -> BlockContext:
    """What the block's record must say to be this rank's part of this prompt."""
    return BlockContext(
        tenant=judged.grant.tenant,
        namespace=block.namespace,
        block=block.block,
        parent=block.parent,
        position=block.extent.start,
        tokens=block.extent.tokens,
        format_digest=shard.format_digest,
        layout_digest=shard.layout_digest,
        rank=shard.layout.rank,
        segment_bytes=shard.layout.segment_bytes(block.extent.tokens),
    )


def namespace_keys(depot: Depot, block: ChainedBlock, shard: Shard) -> NamespaceKeys:
    """The block's keys, if they are leased at this instant; `LeaseExpired` otherwise."""
    keys = depot.ring.keys(block.namespace, shard.format_digest)
    if keys is None:
        raise LeaseExpired("the namespace's key lease has run out")
    return keys


@dataclass(slots=True)
class _Out:
    """A released part that was not copied yet."""

    slot: StagingSlot
    start: int
    deadline_ns: int


class LoadTransfer:
    """Runs as one task of its connection; `stop` and `copied` are called beside it."""

    kind = "load"

    def __init__(
        self,
        frame: Load,
        request: Request,
        judged: Judged,
        shard: Shard,
        slots: Slots,
        depot: Depot,
        send: Send,
    ) -> None:
        self.ended = asyncio.Event()
        self._frame = frame
        self._request = request
        self._judged = judged
        self._shard = shard
        self._slots = slots
        self._depot = depot
        self._send = send
        self._out: dict[int, _Out] = {}
        self._busy: StagingSlot | None = None
        self._news = asyncio.Event()
        self._stopped = False
        self._patience: Patience | None = None
        self._bytes = 0
        self._tier = ""

    async def run(self) -> None:
        """To its one final frame."""
        began_ns = self._depot.clocks.boot()
        self._request.transfers.add(self)
        try:
            failed_at, reason = await self._release_all()
            uncopied = await self._all_copied()
            if uncopied is not None:
                failed_at, reason = uncopied, Reason.EXPIRED
        finally:
            self.ended.set()
            self._request.transfers.discard(self)
        if self._stopped:
            failed_at, reason = self._frame.start, self._why_stopped()
        for out in self._out.values():
            self._slots.blank(out.slot)
        self._depot.watch.load_ended(
            self._shard.engine,
            self._request.name,
            self._judged.grant.tenant,
            reason,
            tier=self._tier,
            tokens=max(0, failed_at - self._frame.start),
            nbytes=self._bytes,
            seconds=(self._depot.clocks.boot() - began_ns) / NS,
        )
        if reason is Reason.NONE:
            self._send(LoadDone(self._frame.load, self._depot.gate.deadline_ns))
        else:
            self._send(LoadFailed(self._frame.load, max(failed_at, self._frame.start)))
            await self._note_failure(failed_at, reason)
        await self._hold_the_rest()

    def copied(self, offset: int) -> None:
        """The engine has the part at `offset`."""
        out = self._out.pop(offset, None)
        if out is not None:
            self._slots.give_back(out.slot)
            self._news.set()

    def stop(self) -> None:
        """Zero what is released and end. The slot being opened is wiped when that returns."""
        self._stopped = True
        if self._patience is not None:
            self._patience.give_up()
        for out in self._out.values():
            self._slots.blank(out.slot)
        if self._busy is not None:
            self._slots.blank(self._busy)
        self._news.set()

    async def _release_all(self) -> tuple[int, Reason]:
        """Release part after part; where and why it ended early."""
        until_ns = self._depot.clocks.boot() + self._depot.times.load_deadline_ns
        blocks = [
            block
            for block in self._judged.hit
            if block.extent.end > self._frame.start and block.extent.start < self._frame.end
        ]
        try:
            await self._depot.leases.ensure(self._judged.prompt.grant, self._judged.grant)
        except StrongroomError as error:
            return self._frame.start, reason_of(error)
        try:
            await self._record(blocks)
        except Unavailable:
            return self._frame.start, Reason.AUDIT
        self._patience = self._depot.prefetcher.load_begins(
            self._judged.grant.jti, sum(block.extent.tokens for block in blocks), until_ns
        )
        for block in blocks:
            await self._patience.until_here(self._address(block))
            if self._stopped:
                break
            try:
                await self._release(block, until_ns)
            except StrongroomError as error:
                return block.extent.start, reason_of(error)
        return self._frame.end, Reason.NONE

    async def _release(self, block: ChainedBlock, until_ns: int) -> None:
        context = block_context(self._judged, block, self._shard)
        slot = await self._room(context.plaintext_bytes, until_ns)
        self._busy = slot
        try:
            self._depot.gate.require()
            keys = namespace_keys(self._depot, block, self._shard)
            with self._slots.bytes_of(slot) as staging:
                loaded = await self._depot.store.load(context, keys, staging, self._request.fence)
            self._depot.prefetcher.was_read(context.address, loaded.tier)
            # From here to the frame nothing waits: what was invalidated before is seen here.
            self._request.fence.check()
            deadline_ns = self._depot.gate.require()
            # And once more from other sources, which never finds anything unless these fail.
            self._depot.watch.sentry.look(self._judged.grant, loaded.tenant, loaded.namespace)
        except BaseException:
            self._slots.give_back(slot)
            raise
        finally:
            self._busy = None
        self._bytes += loaded.bytes
        if self._tier != TierName.NVME:
            self._tier = loaded.tier.value
        self._out[slot.offset] = _Out(slot, block.extent.start, deadline_ns)
        self._send(
            Part(
                load=self._frame.load,
                start=block.extent.start,
                end=block.extent.end,
                offset=slot.offset,
                deadline_ns=deadline_ns,
            )
        )

    async def _room(self, nbytes: int, until_ns: int) -> StagingSlot:
        """A slot, waiting for `Copied` where needed; late parts give theirs back."""
        while True:
            self._request.fence.check()
            slot = self._slots.take(nbytes)
            if slot is not None:
                return slot
            now = self._depot.clocks.boot()
            if now >= until_ns:
                raise Overloaded("no staging in time")
            self._reap(now)
            wait_ns = min(until_ns, self._next_due()) - now
            try:
                async with asyncio.timeout(max(wait_ns, 0) / NS + 0.001):
                    taken = await self._slots.wait_take(nbytes)
            except TimeoutError:
                continue
            return taken

    async def _all_copied(self) -> int | None:
        """Wait until the engine has every part; else the start of the first that it has not."""
        while self._out and not self._stopped:
            now = self._depot.clocks.boot()
            first = min(self._out.values(), key=lambda out: out.deadline_ns)
            if first.deadline_ns <= now:
                return min(out.start for out in self._out.values())
            self._news.clear()
            try:
                async with asyncio.timeout((first.deadline_ns - now) / NS + 0.001):
                    await self._news.wait()
            except TimeoutError:
                continue
        return None

    async def _hold_the_rest(self) -> None:
        """After the final frame: slots that the engine may still be reading, blank by now."""
        while self._out:
            now = self._depot.clocks.boot()
            self._reap(now)
            if not self._out:
                return
            self._news.clear()
            try:
                async with asyncio.timeout((self._next_due() - now) / NS + 0.001):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _address(self, block: ChainedBlock) -> BlockAddress:
        return BlockAddress(block.block, self._shard.layout.rank)

    def _next_due(self) -> int:
        grace_ns = self._depot.times.grace_ns
        never = self._depot.clocks.boot() + self._depot.times.load_deadline_ns
        return min((out.deadline_ns + grace_ns for out in self._out.values()), default=never)

    def _reap(self, now_ns: int) -> None:
        """Take back what nobody may use any more."""
        for offset, out in tuple(self._out.items()):
            if out.deadline_ns + self._depot.times.grace_ns <= now_ns:
                del self._out[offset]
                self._slots.give_back(out.slot)

    def _why_stopped(self) -> Reason:
        return Reason.REVOKED if self._request.is_fenced_off else Reason.CANCELLED

    async def _record(self, blocks: list[ChainedBlock]) -> None:
        """The access is on record before its first byte is released."""
        tier = self._depot.store.slowest_tier(self._address(block) for block in blocks)
        await self._depot.audit.record(
            "load",
            "hit",
            Reason.NONE,
            engine=self._shard.engine,
            request=self._request.name,
            grant=self._judged.grant,
            namespaces=[block.namespace for block in blocks],
            tokens=sum(block.extent.tokens for block in blocks),
            tier="" if tier is None else tier.value,
            nbytes=sum(self._shard.layout.block_bytes(block.extent.tokens) for block in blocks),
        )

    async def _note_failure(self, failed_at: int, reason: Reason) -> None:
        kinds: dict[Reason, Kind] = {Reason.INTEGRITY: "corrupt", Reason.REVOKED: "fenced"}
        await self._depot.audit.note(
            kinds.get(reason, "load"),
            "failed",
            reason,
            engine=self._shard.engine,
            request=self._request.name,
            grant=self._judged.grant,
            namespaces=[block.namespace for block in self._judged.hit],
            tokens=max(0, failed_at - self._frame.start),
            tier=self._tier,
            nbytes=self._bytes,
        )


def reason_of(error: StrongroomError) -> Reason:
    match error:
        case Fenced() | Refused():
            return Reason.REVOKED
        case Corrupt():
            return Reason.INTEGRITY
        case Missing():
            return Reason.ABSENT
        case QuotaExceeded():
            return Reason.QUOTA
        case Overloaded():
            return Reason.BACKPRESSURE
        case LeaseExpired() | Unavailable():
            return Reason.LEASE
        case _:
            return Reason.PROTOCOL
