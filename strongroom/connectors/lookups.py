"""The scheduler's side: one standing for each request, decided from memory alone.

Rules:
- A request is asked about once, when the engine first knows it. Until its verdict is in memory
  the answer is "ask again"; at its deadline, or at once when the session is gone, it is refused.
- A refused request (also: no grant, fenced, nothing to judge it by) must not read the engine's
  own prefix cache either: a local hit would bypass grant, fence and audit. The engine takes its
  local hit before it asks, so a refusal is answered "ask again" until `settle`, which runs
  outside the lookup, has told the engine to skip that cache (ENGINES.md, "vLLM on CPU").
- A verdict counts as long as the sidecar's lease runs, and a session without a lease allows
  nothing. Who finds the lease over waits for its renewal until the deadline and is refused then.
  This is judged whenever the engine is about to schedule a request that holds no pages: out of
  the queue, at every try while there is no room, and again after a preemption. A request that
  has its pages keeps them.
- An allowed request may use its local hits. External tokens are whole pages, start where the
  local hit ends and leave at least one token to compute.
- A load that failed is not tried again, and its request is refused from then on: a fence and a
  corrupt block look alike here.
- A verdict that comes after the deadline still allows saving: what the request computed alone,
  it computed for the namespaces of its own grant. While the lease is over no save is drawn up.

Methods run on the engine's scheduling thread; `opened`, `received` and `closed` on the IO
thread. The lock guards `_by_request`, the verdicts and the lease.
"""

from __future__ import annotations

import enum
import logging
import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from strongroom.clock import Clock, boot_ns
from strongroom.connectors.orders import LoadOrder, SaveOrder, StepOrders
from strongroom.errors import Missing
from strongroom.identity import NO_ADAPTER
from strongroom.limits import (
    ENGINE_SALT_CHARS_MAX,
    GRANT_BYTES_MAX,
    LOOKUP_DEADLINE_S_DEFAULT,
    PROMPT_TOKENS_MAX,
)
from strongroom.wire.frames import (
    Cancel,
    EngineFrame,
    Fenced,
    Finish,
    Lease,
    Open,
    SidecarFrame,
    Verdict,
    Welcome,
)

_log = logging.getLogger(__name__)
_NAME_CHARS: Final = 128
_NS: Final = 1_000_000_000


class Link(Protocol):
    """What is needed of the connection."""

    @property
    def generation(self) -> int: ...

    def send(self, frame: EngineFrame) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request brought. `tokens` are its prompt's packed ids."""

    grant: str
    salt: str
    tokens: bytes

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) // 4

    def within_limits(self) -> bool:
        """Whether the sidecar could accept this at all; a client may have written anything."""
        return (
            0 < len(self.grant) <= GRANT_BYTES_MAX
            and len(self.salt) <= ENGINE_SALT_CHARS_MAX
            and 0 < self.prompt_tokens <= PROMPT_TOKENS_MAX
        )


class Standing(enum.Enum):
    """What a request may do now."""

    WAITING = "waiting"
    ALLOWED = "allowed"
    REFUSED = "refused"
    LAPSED = "lapsed"
    """Allowed, but the lease is over and so is the time to wait for another."""


@dataclass(slots=True)
class _Known:
    """One request. `refused` is for ever; `skips` says that the engine was told."""

    key: str
    request: str
    prompt_tokens: int
    generation: int
    deadline_ns: int
    verdict: Verdict | None = None
    fenced: bool = False
    refused: bool = False
    skips: bool = False
    asks: bool = False
    """The engine was last told to ask again: the request waits, and holds no pages."""
    local_tokens: int = 0
    loading: tuple[int, ...] = ()
    load_failed: bool = False
    save_settled: bool = False
    save_ordered: bool = False


@dataclass(slots=True)
class _Drawn:
    """Orders drawn up since the last step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


class Lookups:
    """Every request that the engine knows, and the orders for its workers."""

    def __init__(
        self,
        link: Link | None,
        page_tokens: int,
        *,
        deadline_s: float = LOOKUP_DEADLINE_S_DEFAULT,
        clock: Clock = boot_ns,
    ) -> None:
        """`link` is set by `attach` when it needs this object first."""
        self._link = link
        self._page_tokens = page_tokens
        self._deadline_ns = int(deadline_s * _NS)
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._by_request: dict[str, _Known] = {}
        self._drawn = _Drawn()
        self._count = 0
        self._lease_ns = 0
        self._lapse_told = False
        self._beat: Callable[[int], int] | None = None

    def attach(self, link: Link) -> None:
        """Use `link` from now on."""
        self._link = link

    def beat(self, beat: Callable[[int], int]) -> None:
        """Call `beat` on the IO thread from now on, with the time; it says when it is due again."""
        self._beat = beat

    @property
    def loading(self) -> bool:
        """Whether some request waits for a load or for its verdict. For the scheduling thread."""
        return any(
            known.loading or (known.asks and not known.skips) for known in self._known.values()
        )

    # The engine's hooks, in the order of a request's life.

    def open(self, key: str, ask: Ask | None) -> Standing:
        """The engine knows a request. `ask` is None where it brought no grant or can't be cached.

        `REFUSED`: tell the engine at once to skip its prefix cache; it has not looked yet.
        """
        now = self._clock()
        self._count += 1
        # The key may hold what a client wrote; the name goes into records that people read.
        name = "".join(c if c.isascii() and c.isprintable() else "?" for c in key[:_NAME_CHARS])
        known = _Known(
            key=key,
            request=f"{self._count}-{name}",
            prompt_tokens=ask.prompt_tokens if ask else 0,
            generation=self._link.generation if self._link else 0,
            deadline_ns=now + self._deadline_ns,
        )
        self._known[key] = known
        if ask is not None and known.generation and ask.within_limits():
            with self._lock:
                self._by_request[known.request] = known
            frame = Open(known.request, ask.grant, ask.salt, ask.tokens, NO_ADAPTER)
            if self._send(frame):
                return Standing.WAITING
        known.refused = known.skips = True
        with self._lock:
            self._by_request.pop(known.request, None)
        return Standing.REFUSED

    def matched(self, key: str, local_tokens: int, total_tokens: int) -> int | None:
        """Tokens to load beyond `local_tokens`; None means "ask again". Changes no decision.

        Raises `Missing` for a request that was never opened: nobody may judge it by default.
        """
        known = self._known.get(key)
        if known is None:
            raise Missing("a request that was never looked up", field="request")
        if known.skips:
            return 0
        known.asks = self._standing(known) is not Standing.ALLOWED
        if known.asks or known.verdict is None:
            return None
        known.local_tokens = local_tokens
        if known.load_failed or local_tokens % self._page_tokens:
            return 0
        usable = min(known.verdict.tokens, known.prompt_tokens, total_tokens - 1)
        usable -= usable % self._page_tokens
        return max(usable - local_tokens, 0)

    def allocated(self, key: str, external_tokens: int, pages: Sequence[int]) -> None:
        """The engine gave `pages` to the request, `external_tokens` of them to be loaded.

        Called again with 0 after a load, which changes nothing.
        """
        if external_tokens <= 0:
            return
        known = self._known.get(key)
        start = known.local_tokens if known else 0
        end = start + external_tokens
        wanted = tuple(pages[start // self._page_tokens : end // self._page_tokens])
        whole = len(wanted) * self._page_tokens == external_tokens
        if known is None or not whole or start % self._page_tokens:
            # The engine now waits for a load that cannot be described: it must hear of it.
            self.lost(key)
            return
        known.loading = wanted
        self._drawn.loads.append(LoadOrder(key, known.request, start, end, wanted))

    def lost(self, key: str) -> None:
        """The engine waits for a load of `key` that cannot be drawn up."""
        _log.error("a load could not be drawn up; the request is recomputed")
        known = self._known.get(key)
        if known is not None:
            known.load_failed = known.refused = True
        self._drawn.loads.append(LoadOrder(key, "", 0, 0, (), lost=True))

    def scheduled(self, key: str, computed_tokens: int, pages: Callable[[], Sequence[int]]) -> None:
        """After this step `computed_tokens` of the request are final; `pages` are its pages."""
        known = self._known.get(key)
        if known is None or known.save_settled or computed_tokens < known.prompt_tokens:
            return
        with self._lock:
            verdict = known.verdict
            stale = known.fenced or verdict is None or not (verdict.allowed and verdict.save)
            stale = stale or self._clock() >= self._lease_ns
        if stale or verdict is None or known.generation != self._generation():
            return
        end = known.prompt_tokens - known.prompt_tokens % self._page_tokens
        if end <= (0 if known.load_failed else verdict.tokens):
            known.save_settled = True  # nothing to add
            return
        source = tuple(pages()[: end // self._page_tokens])
        known.save_settled = True
        if len(source) * self._page_tokens == end:
            known.save_ordered = True
            self._drawn.saves.append(SaveOrder(key, known.request, end, source))

    def settle(self, preempted: Iterable[str] = ()) -> list[str]:
        """Once a step: keys that must skip the engine's own prefix cache from now on."""
        for key in preempted:
            known = self._known.get(key)
            if known is not None:
                known.save_settled = known.save_ordered = False  # recomputed, and saved anew
                self._drawn.preempted.append(key)
        refused = []
        for known in self._known.values():
            standing = Standing.REFUSED if known.skips else self._standing(known)
            lapsed = standing is Standing.LAPSED and known.asks
            if not known.skips and (lapsed or standing is Standing.REFUSED):
                known.refused = known.skips = True
                refused.append(known.key)
                if lapsed:
                    self._tell_lapse()
        return refused

    def take_orders(self) -> StepOrders:
        """The orders for this step; they are handed out once."""
        drawn, self._drawn = self._drawn, _Drawn()
        return StepOrders(
            tuple(drawn.loads), tuple(drawn.saves), tuple(drawn.preempted), tuple(drawn.held)
        )

    def loaded(
        self, keys: Iterable[str], failed_pages: Collection[int], failed: Collection[str]
    ) -> None:
        """Workers ended the loads of `keys`; pages and keys that failed are named.

        With several ranks failed pages may be named in an earlier step than their key.
        """
        bad = frozenset(failed_pages)
        for known in self._known.values() if bad else ():
            if not bad.isdisjoint(known.loading):
                known.load_failed = known.refused = True
        for key in keys:
            ended = self._known.get(key)
            if ended is not None:
                ended.loading = ()
                if key in failed:
                    ended.load_failed = ended.refused = True

    def finished(self, key: str, *, aborted: bool) -> bool:
        """The request ended. True: its pages must be held until a worker reports them.

        While a load is in flight the engine itself holds them until that is reported, and a
        second report would name pages that are free already: then this is False.
        """
        known = self._known.pop(key, None)
        if known is None:
            return False
        with self._lock:
            had = self._by_request.pop(known.request, None) is not None
        if had and known.generation == self._generation():
            self._send(Cancel(known.request) if aborted else Finish(known.request))
        hold = known.save_ordered and not known.loading
        if hold:
            self._drawn.held.append(key)
        return hold

    def forget(self) -> None:
        """The engine reset its caches: no verdict given before counts any more."""
        for known in self._known.values():
            known.refused = True

    # The IO thread.

    def opened(self, welcome: Welcome, staging: mmap.mmap | None) -> None:
        """No lease yet. Requests of earlier sessions carry their generation."""
        with self._lock:
            self._lease_ns = 0

    def received(self, frame: SidecarFrame) -> None:
        """Take a verdict, a lease or a fence into memory; other frames are a worker's."""
        match frame:
            case Verdict():
                with self._lock:
                    known = self._by_request.get(frame.request)
                    if known is not None and known.verdict is None:
                        known.verdict = frame
            case Lease():
                with self._lock:
                    self._lease_ns = frame.deadline_ns
                    self._lapse_told = False
            case Fenced():
                with self._lock:
                    known = self._by_request.get(frame.request)
                    if known is not None:
                        known.fenced = True
            case _:
                return

    def closed(self) -> None:
        """The lease ends with its session."""
        with self._lock:
            self._lease_ns = 0

    def due(self, now_ns: int) -> int | None:
        """Only the beat's: for what it waits for the engine asks again on its own."""
        return None if self._beat is None else self._beat(now_ns)

    def _standing(self, known: _Known) -> Standing:
        if known.refused or known.generation != self._generation():
            return Standing.REFUSED
        now = self._clock()
        with self._lock:
            verdict, fenced, leased = known.verdict, known.fenced, now < self._lease_ns
        if fenced or (verdict is not None and not verdict.allowed):
            return Standing.REFUSED
        if verdict is not None and leased:
            return Standing.ALLOWED
        if now < known.deadline_ns:
            return Standing.WAITING
        return Standing.LAPSED if verdict is not None else Standing.REFUSED

    def _tell_lapse(self) -> None:
        """Log once for each lease that it is over."""
        if not self._lapse_told:
            self._lapse_told = True
            _log.warning("the sidecar has no lease: requests go without any cache")

    def _generation(self) -> int:
        return self._link.generation if self._link else 0

    def _send(self, frame: EngineFrame) -> bool:
        return self._link is not None and self._link.send(frame)
