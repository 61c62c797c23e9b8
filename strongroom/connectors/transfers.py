"""A worker's side: loads into the engine's pages and saves out of them, on the IO thread.

Rules:
- Every load order is reported once: as soon as it has ended, whether it was done, failed, late,
  aborted or lost with its session. Pages that were not filled, and all after them, are named.
- Only the IO thread copies, and only it ends a load; so no copy is under way in a page that was
  reported. If that thread has died nothing copies any more, and the engine's thread reports.
- A part is used only before its deadline, looked at before the copy and again after it. What a
  session had not finished when it ended is not used: a fence may have been missed.
- Where layers are announced before their part, they are copied while the sidecar still opens the
  others. Their pages count as filled with the part alone; a load that fails names them as failed.
- A save reads pages that the engine may want back. `_copying` is held during each copy out, and
  whoever is about to overwrite pages takes it to cancel the save first. A request that has ended
  is held until its copies are done or `save_deadline_s` is over, never longer.

Lock order: `_copying` before `_lock`. `_lock` guards all the tables.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from strongroom.clock import Clock, boot_ns
from strongroom.connectors.orders import LoadOrder, SaveOrder
from strongroom.errors import Misuse, ProtocolViolation
from strongroom.kvformat import Layout
from strongroom.limits import LOAD_DEADLINE_S_DEFAULT
from strongroom.wire.frames import (
    Copied,
    EngineFrame,
    Fenced,
    Filled,
    Layers,
    Load,
    LoadDone,
    LoadFailed,
    Part,
    Save,
    SaveDone,
    SidecarFrame,
    Slot,
    Slots,
    Welcome,
)

if TYPE_CHECKING:
    from strongroom.connectors.pages import Pages

_log = logging.getLogger(__name__)
_NS: Final = 1_000_000_000
LAYERS_BLOCK_BYTES_MIN: Final = 4 * 1024 * 1024
"""Of smaller blocks the sidecar is done before the first layers would be copied."""


class Link(Protocol):
    """What is needed of the connection."""

    @property
    def generation(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def send(self, frame: EngineFrame) -> bool: ...

    def wake(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Report:
    """What the engine is told in one step; everything in it is told once."""

    sent: frozenset[str] = frozenset()
    """Keys whose held pages are free now."""
    received: frozenset[str] = frozenset()
    """Keys whose load has ended, well or not."""
    failed_pages: frozenset[int] = frozenset()
    failed: frozenset[str] = frozenset()
    """Keys, also in `received`, whose load failed without naming pages."""


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts since the start."""

    loads: int = 0
    loads_failed: int = 0
    parts_late: int = 0
    pages_in: int = 0
    saves: int = 0
    pages_out: int = 0
    saves_cancelled: int = 0
    layers_early: int = 0
    """Layers of blocks that were copied before their block was whole."""


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    after: object
    deadline_ns: int
    copied: set[int] = field(default_factory=set)
    """Indices into `order.pages`."""
    bad_from: int = 0
    """Nothing at or after this index is good."""
    cancelled: bool = False

    def failed_pages(self) -> tuple[int, ...]:
        good = 0
        while good < self.bad_from and good in self.copied:
            good += 1
        return self.order.pages[good:]


@dataclass(slots=True)
class _Save:
    order: SaveOrder
    after: object
    deadline_ns: int
    number: int
    reading: bool = True
    """Pages may still be read; false: done with them, or cancelled."""
    covered: int = 0
    """Where the last slots ended; 0 when there were none."""


@dataclass(slots=True)
class _Counts:
    loads: int = 0
    loads_failed: int = 0
    parts_late: int = 0
    pages_in: int = 0
    saves: int = 0
    pages_out: int = 0
    saves_cancelled: int = 0
    layers_early: int = 0


class Transfers:
    """The loads and saves of one rank."""

    def __init__(
        self,
        pages: Pages,
        layout: Layout,
        *,
        load_deadline_s: float = LOAD_DEADLINE_S_DEFAULT,
        save_deadline_s: float = 2.0,
        layers: bool | None = None,
        clock: Clock = boot_ns,
    ) -> None:
        """`layers`: ask for blocks layer by layer; None: where a block is large enough."""
        if pages.page_bytes != layout.page_bytes:
            raise Misuse("the KV tensors are not of the layout that was declared", field="layout")
        self._pages = pages
        self._layout = layout
        self._load_deadline_ns = int(load_deadline_s * _NS)
        self._save_deadline_ns = int(save_deadline_s * _NS)
        self._clock = clock
        self._link: Link | None = None
        self._copying = threading.Lock()
        self._lock = threading.Lock()
        self._layers = layers
        self._ask_layers = bool(layers)
        self._early: dict[tuple[int, int], int] = {}
        """Layers copied of parts that have not come yet, by load and offset; the IO thread's."""
        self._room = 0
        self._numbers = 0
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._held: set[str] = set()
        self._received: set[str] = set()
        self._failed_pages: set[int] = set()
        self._failed: set[str] = set()
        self._counts = _Counts()

    def attach(self, link: Link) -> None:
        """Use `link` from now on."""
        self._link = link

    def statistics(self) -> TransferStatistics:
        """A snapshot of the counts."""
        with self._lock:
            counts = self._counts
            return TransferStatistics(
                counts.loads, counts.loads_failed, counts.parts_late, counts.pages_in,
                counts.saves, counts.pages_out, counts.saves_cancelled, counts.layers_early,
            )  # fmt: skip

    # The engine's thread.

    def start_loads(self, orders: Sequence[LoadOrder]) -> None:
        """Ask for each load; one that can't be asked for is a failed one. Never raises."""
        if not orders:
            return
        deadline = self._clock() + self._load_deadline_ns
        asked: list[tuple[int, _Load]] = []
        with self._lock:
            for order in orders:
                self._counts.loads += 1
                tokens = len(order.pages) * self._layout.page_tokens
                if order.lost or tokens != order.end - order.start:
                    self._counts.loads_failed += 1
                    self._received.add(order.key)
                    self._failed.add(order.key)
                    continue
                self._numbers += 1
                load = _Load(order, None, deadline, bad_from=len(order.pages))
                self._loads[self._numbers] = load
                asked.append((self._numbers, load))
        for number, load in asked:
            try:
                load.after = self._pages.mark()
                order = load.order
                sent = self._send(
                    Load(order.request, number, order.start, order.end, self._ask_layers)
                )
            except Exception:  # noqa: BLE001 - see below
                # An unreported load would park its request for ever.
                _log.exception("a load could not be started")
                sent = False
            if not sent:
                with self._lock:
                    self._finish(number, load, good=False)
        self._wake()

    def start_saves(self, orders: Sequence[SaveOrder]) -> None:
        """Offer the pages of each order, which hold their final bytes after `mark`."""
        if not orders:
            return
        after = self._pages.mark()
        deadline = self._clock() + self._save_deadline_ns
        for order in orders:
            with self._lock:
                self._numbers += 1
                save = _Save(order, after, deadline, self._numbers)
                self._saves[save.number] = save
            if not self._send(Save(order.request, save.number, order.end)):
                with self._lock:
                    self._saves.pop(save.number, None)
        self._wake()

    def cancel_saves(self, keys: Collection[str]) -> None:
        """The pages of `keys` are about to be overwritten: when this returns nobody reads them."""
        if not keys:
            return
        with self._lock:
            if not any(save.reading and save.order.key in keys for save in self._saves.values()):
                return
        with self._copying, self._lock:
            for save in self._saves.values():
                if save.order.key in keys and save.reading:
                    save.reading = False
                    self._counts.saves_cancelled += 1

    def take_report(self, ended: Collection[str], held: Iterable[str]) -> Report:
        """What has ended. `ended` are requests that the engine has finished with since the last
        call, `held` those whose pages it keeps until they are reported as sent.
        """
        orphaned = self._link is None or not self._link.alive
        with self._lock:
            self._held.update(held)
            for number, load in list(self._loads.items()):
                if load.order.key in ended:
                    load.cancelled = True
                if orphaned:
                    self._finish(number, load, good=False)
            reading = {save.order.key for save in self._saves.values() if save.reading}
            if orphaned:
                self._saves.clear()
                reading = set()
            sent = frozenset(self._held - reading)
            self._held -= sent
            report = Report(
                sent, frozenset(self._received), frozenset(self._failed_pages),
                frozenset(self._failed),
            )  # fmt: skip
            self._received.clear()
            self._failed_pages.clear()
            self._failed.clear()
            cancelled = any(load.cancelled for load in self._loads.values())
        if cancelled:
            self._wake()
        return report

    # The IO thread.

    def opened(self, welcome: Welcome, staging: mmap.mmap | None) -> None:
        """Take the session's staging."""
        if staging is None:
            raise ProtocolViolation("a worker needs staging", field="staging_bytes")
        self._pages.adopt(staging)
        self._room = len(staging)
        if self._layers is None:
            block_bytes = self._layout.block_bytes(welcome.tokens_per_block)
            self._ask_layers = block_bytes >= LAYERS_BLOCK_BYTES_MIN

    def closed(self) -> None:
        """Fail what the session left unfinished."""
        with self._copying, self._lock:
            for number, load in list(self._loads.items()):
                self._finish(number, load, good=False)
            self._saves.clear()
        self._early.clear()
        self._room = 0
        self._pages.adopt(None)

    def received(self, frame: SidecarFrame) -> None:
        """Serve one frame; a part or slot outside of staging ends the session."""
        match frame:
            case Part():
                self._part(frame)
            case Layers():
                self._layers_opened(frame)
            case LoadDone():
                self._load_done(frame)
            case LoadFailed():
                self._load_failed(frame)
            case Slots():
                self._slots(frame)
            case SaveDone():
                self._save_done(frame)
            case Fenced():
                self._fence(frame.request)
            case _:
                return

    def due(self, now_ns: int) -> int | None:
        """Fail loads and drop saves that are over their deadline or cancelled."""
        next_ns: int | None = None
        with self._copying, self._lock:
            for number, load in list(self._loads.items()):
                if load.cancelled or now_ns >= load.deadline_ns:
                    self._finish(number, load, good=False)
                elif next_ns is None or load.deadline_ns < next_ns:
                    next_ns = load.deadline_ns
            for save in list(self._saves.values()):
                if now_ns >= save.deadline_ns:
                    if save.reading:
                        save.reading = False
                        self._counts.saves_cancelled += 1
                elif next_ns is None or save.deadline_ns < next_ns:
                    next_ns = save.deadline_ns
        return next_ns

    def _part(self, part: Part) -> None:
        pages = self._check(part.start, part.end, part.offset)
        with self._lock:
            load = self._loads.get(part.load)
        # An unknown load has ended here already; its staging must be given back all the same.
        early = self._early.pop((part.load, part.offset), 0)
        if load is not None and not load.cancelled:
            left = range(early, len(self._layout.page_bytes))
            first, count = self._copy_layers(part, load, pages, left)
            with self._lock:
                if part.load in self._loads:
                    self._counts.pages_in += count
                    load.copied.update(range(first, first + count))
        self._send(Copied(part.load, part.offset))

    def _layers_opened(self, frame: Layers) -> None:
        """Copy what was opened since the last word of this block."""
        pages = self._check(frame.start, frame.end, frame.offset)
        if not 0 < frame.layers <= len(self._layout.page_bytes):
            raise ProtocolViolation(
                "so many layers are not in a block", field="layers",
                limit=len(self._layout.page_bytes),
            )  # fmt: skip
        with self._lock:
            load = self._loads.get(frame.load)
        if load is None or load.cancelled:
            return  # its part, or its failure, gives the staging back
        key = (frame.load, frame.offset)
        left = range(self._early.get(key, 0), frame.layers)
        self._early[key] = max(left.stop, left.start)
        self._copy_layers(frame, load, pages, left)
        with self._lock:
            self._counts.layers_early += len(left)

    def _copy_layers(
        self, part: Part | Layers, load: _Load, block_pages: int, layers: range
    ) -> tuple[int, int]:
        """Copy these layers into the pages that were asked for; a late one ends the load.

        Returns the first page's index in the order, and how many are good as far as these
        layers go.
        """
        page_tokens = self._layout.page_tokens
        order = load.order
        low, high = max(part.start, order.start), min(part.end, order.end)
        if low >= high:
            return 0, 0
        first = (low - order.start) // page_tokens
        wanted = order.pages[first : (high - order.start) // page_tokens]
        late = self._clock() >= part.deadline_ns
        if not late:
            skipped = (low - part.start) // page_tokens
            self._pages.copy_in(part.offset, block_pages, skipped, wanted, load.after, layers)
            late = self._clock() >= part.deadline_ns
        if not late:
            return first, len(wanted)
        with self._lock:
            self._counts.parts_late += 1
            load.bad_from = min(load.bad_from, first)
            self._finish(part.load, load, good=True)
        return first, 0

    def _load_done(self, frame: LoadDone) -> None:
        with self._lock:
            load = self._loads.get(frame.load)
            if load is not None:
                self._finish(frame.load, load, good=self._clock() < frame.deadline_ns)

    def _load_failed(self, frame: LoadFailed) -> None:
        for number, offset in [key for key in self._early if key[0] == frame.load]:
            del self._early[number, offset]
            self._send(Copied(number, offset))  # nothing is copied from there any more
        with self._lock:
            load = self._loads.get(frame.load)
            if load is None:
                return
            bad = (frame.start - load.order.start) // self._layout.page_tokens
            load.bad_from = max(0, min(load.bad_from, bad))
            self._finish(frame.load, load, good=True)

    def _finish(self, number: int, load: _Load, *, good: bool) -> None:
        """End a load; `good` false: none of its pages count. The lock is held."""
        if self._loads.pop(number, None) is None:
            return
        failed = load.failed_pages() if good and not load.cancelled else load.order.pages
        if failed:
            self._counts.loads_failed += 1
        self._failed_pages.update(failed)
        self._received.add(load.order.key)

    def _slots(self, frame: Slots) -> None:
        with self._lock:
            save = self._saves.get(frame.save)
        for slot in frame.slots:
            filled = save is not None and self._fill(save, slot)
            self._send(Filled(frame.save, slot.offset, filled))
        with self._lock:
            if save is None:
                return
            save.covered = max((slot.end for slot in frame.slots), default=0)
            if save.covered in {0, save.order.end} or not save.reading:
                save.reading = False
            if not frame.slots:
                self._saves.pop(frame.save, None)

    def _fill(self, save: _Save, slot: Slot) -> bool:
        self._check(slot.start, slot.end, slot.offset)
        page_tokens = self._layout.page_tokens
        if slot.end > save.order.end:
            raise ProtocolViolation("a slot beyond what was offered", field="slots")
        source = save.order.pages[slot.start // page_tokens : slot.end // page_tokens]
        with self._copying:
            with self._lock:
                reading = save.reading and self._clock() < save.deadline_ns
            if not reading:
                return False
            self._pages.copy_out(slot.offset, source, save.after)
        with self._lock:
            self._counts.pages_out += len(source)
        return True

    def _save_done(self, frame: SaveDone) -> None:
        """Ask again for what found no room in staging, as long as the pages are there."""
        with self._lock:
            save = self._saves.pop(frame.save, None)
            if save is None:
                return
            self._counts.saves += 1
            if not save.reading or frame.stored == 0 or self._clock() >= save.deadline_ns:
                return
            self._numbers += 1
            again = _Save(save.order, save.after, save.deadline_ns, self._numbers)
            self._saves[again.number] = again
        if not self._send(Save(again.order.request, again.number, again.order.end)):
            with self._lock:
                self._saves.pop(again.number, None)

    def _fence(self, request: str) -> None:
        with self._copying, self._lock:
            for number, load in list(self._loads.items()):
                if load.order.request == request:
                    self._finish(number, load, good=False)
            for save in self._saves.values():
                if save.order.request == request:
                    save.reading = False

    def _check(self, start: int, end: int, offset: int) -> int:
        """The pages of a block in staging; `ProtocolViolation` unless it lies inside of it."""
        page_tokens = self._layout.page_tokens
        if not 0 <= start < end or start % page_tokens or end % page_tokens:
            raise ProtocolViolation("not whole pages", field="start", limit=page_tokens)
        if offset < 0 or offset + self._layout.block_bytes(end - start) > self._room:
            raise ProtocolViolation("outside of staging", field="offset", limit=self._room)
        return (end - start) // page_tokens

    def _send(self, frame: EngineFrame) -> bool:
        return self._link is not None and self._link.send(frame)

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake()
