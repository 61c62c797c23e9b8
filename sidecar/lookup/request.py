"""A request's life, and the index of those that are alive.

    Opened ─judge─▶ Judged ─finish─▶ Finished      (saves may still arrive for a while)
       └─ refuse ─▶ Denied
    any of them ─ invalidate ─▶ Fenced,  ─ cancel ─▶ Cancelled

A state is frozen and carries only what it knows: a load needs a `Judged`, a save a `Judged` or
a `Finished` one, and nothing else type-checks. A grant opens a request; the request then lives
until it ends or is invalidated, whatever becomes of the grant.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sidecar.cost.appraisal import Weighed
from sidecar.record.reasons import Reason
from storage.fence import Fence
from storage.tiers.protocol import TierName
from strongroom.blocks import ROOT_PARENT, BlockId, Extent
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId, NamespaceId


@dataclass(frozen=True, slots=True)
class ChainedBlock:
    """One block of a prompt: where it lies, its id and its parent's, and whose room it is in."""

    extent: Extent
    block: BlockId
    parent: BlockId
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class Hit:
    """The stored prefix of a prompt in columns, block after block.

    `ChainedBlock`s are made as one iterates: a verdict needs none of them, and what is kept of a
    request is a handful of objects for the collector of garbage however long its prompt is.
    """

    ids: tuple[BlockId, ...] = ()
    ends: tuple[int, ...] = ()
    """Where each block ends in the prompt."""
    spans: tuple[int, ...] = ()
    tiers: tuple[TierName, ...] = ()
    namespaces: tuple[NamespaceId, ...] = ()
    """Of each span, not of each block."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[ChainedBlock]:
        parent, start = ROOT_PARENT, 0
        for block, end, span in zip(self.ids, self.ends, self.spans, strict=True):
            yield ChainedBlock(Extent(start, end, span), block, parent, self.namespaces[span])
            parent, start = block, end

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def tier(self) -> TierName | None:
        """The slowest tier that it will be read from."""
        if not self.tiers:
            return None
        return TierName.NVME if TierName.NVME in self.tiers else TierName.HOST

    def front(self, tokens: int) -> Hit:
        """Its blocks that end at token `tokens` or before."""
        if tokens >= self.tokens:
            return self
        count = bisect_right(self.ends, tokens)
        return Hit(
            self.ids[:count],
            self.ends[:count],
            self.spans[:count],
            self.tiers[:count],
            self.namespaces,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Prompt:
    """What a judged request keeps of its `Open`. Token ids are plaintext: never shown."""

    tokens: bytes
    extras: bytes
    grant: str
    """The grant as it was presented: with it a key lease that runs out is renewed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The engine knows it; no verdict yet."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict was positive: `hit` is the stored prefix, block after block."""

    grant: GrantClaims
    prompt: Prompt
    hit: Hit
    may_save: bool
    missed: Reason = Reason.NONE
    """Why the hit is no longer, where that is no end of the prompt."""

    @property
    def hit_tokens(self) -> int:
        return self.hit.tokens


@dataclass(frozen=True, slots=True)
class Denied:
    """The verdict was negative; nothing is loaded or saved."""

    reason: Reason = Reason.NONE


@dataclass(frozen=True, slots=True)
class Finished:
    """It ended in good order."""

    judged: Judged


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The engine aborted it, or went away."""


@dataclass(frozen=True, slots=True)
class FencedOff:
    """Something that it depends on was invalidated."""


RequestState = Opened | Judged | Denied | Finished | Cancelled | FencedOff


class Transfer(Protocol):
    """A load or save in flight."""

    kind: str
    ended: asyncio.Event
    """Set when nothing of it runs any more: no thread works on its staging."""

    def stop(self) -> None:
        """Zero its staging now and end as soon as what runs has returned. Repeatable."""


class Stoppable(Protocol):
    """Something that is done for a request ahead of its loads."""

    def stop(self) -> None:
        """The request reads nothing any more. Repeatable; waits for nothing."""


@dataclass(slots=True)
class Held:
    """Memory that the prompts of judged requests take, as running totals."""

    prompt_bytes: int = 0
    """Of those that are open."""
    finished_bytes: int = 0
    """Of those that have finished, and are kept for a save that may follow."""
    open_count: int = 0


class Request:
    """One request of one engine: its state, its fence and its transfers."""

    def __init__(
        self, name: str, held: Held | None = None, ended: Callable[[Request], None] | None = None
    ) -> None:
        """`ended` is called once, when the engine says that it is over."""
        self._held = held or Held()
        self._tell_ended = ended
        self.name = name
        self.state: RequestState = Opened()
        self.fence = Fence()
        self.judged = asyncio.Event()
        self.transfers: set[Transfer] = set()
        self.grant: GrantClaims | None = None
        self.prefetch: Stoppable | None = None
        self.weighed: Weighed | None = None
        """What was decided about bringing its hit, until that is counted."""
        self.ended_ns = 0
        self._is_over = False
        self._held.open_count += 1

    @property
    def tenant(self) -> ComponentId | None:
        return None if self.grant is None else self.grant.tenant

    @property
    def prompt(self) -> Prompt | None:
        match self.state:
            case Judged(prompt=prompt) | Finished(Judged(prompt=prompt)):
                return prompt
            case _:
                return None

    @property
    def is_open(self) -> bool:
        """Whether the engine may still act on it."""
        return isinstance(self.state, Opened | Judged)

    @property
    def is_fenced_off(self) -> bool:
        return isinstance(self.state, FencedOff)

    def settle(self, state: Judged | Denied) -> None:
        """The verdict; does nothing to a request that ended meanwhile."""
        if isinstance(self.state, Opened):
            self.state = state
            self._held.prompt_bytes += self._prompt_bytes
        self.judged.set()

    def deny(self, now_ns: int) -> None:
        """The verdict was negative: nothing follows."""
        self._over(now_ns)

    def finish(self, now_ns: int) -> None:
        """In good order: loads are over, saves go on."""
        if isinstance(self.state, Judged):
            self._uncount()
            self.state = Finished(self.state)
            self._held.finished_bytes += self._prompt_bytes
        elif isinstance(self.state, Opened):
            self._end(Cancelled())
        self._stop_prefetch()
        self._over(now_ns)
        self.judged.set()

    def cancel(self, now_ns: int) -> None:
        """Stop what can still stop."""
        self._end(Cancelled())
        self._over(now_ns)

    def forget(self) -> None:
        """It is forgotten, and its prompt with it."""
        self._uncount()
        self._held = Held()

    def fence_off(self) -> tuple[Transfer, ...]:
        """Cut the fence, zero staging, stop transfers; returns those that were in flight."""
        stopped = tuple(self.transfers)
        self._end(FencedOff())
        return stopped

    def readable(self) -> Judged | None:
        """The verdict under which one may load now."""
        return self.state if isinstance(self.state, Judged) else None

    def writable(self) -> Judged | None:
        """The verdict under which one may save now."""
        match self.state:
            case Judged() as judged if judged.may_save:
                return judged
            case Finished(judged) if judged.may_save:
                return judged
            case Opened() | Judged() | Denied() | Finished() | Cancelled() | FencedOff():
                return None

    def _end(self, state: Cancelled | FencedOff) -> None:
        self._uncount()
        if not isinstance(self.state, FencedOff):
            self.state = state
        self.fence.cut()
        self.judged.set()
        self._stop_prefetch()
        for transfer in tuple(self.transfers):
            transfer.stop()

    @property
    def finished_bytes(self) -> int:
        """What its prompt takes after it has finished."""
        return self._prompt_bytes if isinstance(self.state, Finished) else 0

    def _uncount(self) -> None:
        if isinstance(self.state, Finished):
            self._held.finished_bytes -= self._prompt_bytes
        else:
            self._held.prompt_bytes -= self._prompt_bytes

    @property
    def _prompt_bytes(self) -> int:
        return 0 if self.prompt is None else len(self.prompt.tokens)

    def _over(self, now_ns: int) -> None:
        if self._is_over:
            return  # an engine may say so as often as it likes
        self._is_over = True
        self.ended_ns = now_ns
        self._held.open_count -= 1
        if self._tell_ended is not None:
            self._tell_ended(self)

    def _stop_prefetch(self) -> None:
        if self.prefetch is not None:
            self.prefetch.stop()


def _tell_nobody(_: Request) -> None:
    """Nobody counts them."""


class Requests:
    """The requests of one engine, by name. Bounded by the caller.

    Iterating yields also those that have no name any more and whose transfers have not ended:
    an invalidation waits for them as for all others.
    """

    def __init__(self, over: Callable[[Request], None] = _tell_nobody) -> None:
        """`over` hears once of each that the engine said is over, or was denied."""
        self._tell_over = over
        self._by_name: dict[str, Request] = {}
        self._leaving: list[Request] = []
        self._held = Held()
        self._lingering: deque[Request] = deque()
        """Finished, in the order in which they did."""
        self._over: list[Request] = []
        """What need not be kept for saves, and goes when its transfers have ended."""

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Request]:
        self._leaving = [request for request in self._leaving if request.transfers]
        return iter((*self._by_name.values(), *self._leaving))

    @property
    def busy(self) -> bool:
        """Whether a transfer of any of them is in flight."""
        return any(request.transfers for request in self)

    def get(self, name: str) -> Request | None:
        return self._by_name.get(name)

    @property
    def prompt_bytes(self) -> int:
        """Memory that the prompts of open requests take."""
        return self._held.prompt_bytes

    @property
    def finished_bytes(self) -> int:
        """Memory that the prompts of finished requests take."""
        return self._held.finished_bytes

    @property
    def open_count(self) -> int:
        """How many have not ended."""
        return self._held.open_count

    def open(self, name: str, now_ns: int) -> Request:
        """A new request; one of the same name is cancelled, for a name is used once at a time."""
        earlier = self._by_name.pop(name, None)
        if earlier is not None:
            self._part_from(earlier, now_ns)
        request = Request(name, self._held, self._has_ended)
        self._by_name[name] = request
        return request

    def sweep(self, before_ns: int, *, number_max: int, bytes_max: int) -> None:
        """Forget what ended and has no transfer in flight. A save may follow `Finish`, so what
        finished in good order is kept until it ended before `before_ns`; of these the oldest go
        sooner where they are more than `number_max`, or their prompts more than `bytes_max`.
        """
        lingering = self._lingering
        excess = self.finished_bytes - bytes_max
        while lingering and (
            lingering[0].ended_ns <= before_ns or len(lingering) > number_max or excess > 0
        ):
            oldest = lingering.popleft()
            excess -= oldest.finished_bytes
            self._over.append(oldest)
        over, self._over = self._over, []
        for request in over:
            if request.transfers:
                self._over.append(request)
            elif self._by_name.get(request.name) is request:
                del self._by_name[request.name]
                request.forget()

    def cancel_all(self, now_ns: int) -> None:
        """The engine's scheduler is gone."""
        for request in tuple(self._by_name.values()):
            self._part_from(request, now_ns)
        self._by_name.clear()

    def _part_from(self, request: Request, now_ns: int) -> None:
        request.cancel(now_ns)
        if request.transfers:
            self._leaving.append(request)

    def _has_ended(self, request: Request) -> None:
        self._tell_over(request)
        if request.writable() is not None:
            self._lingering.append(request)
        else:
            self._over.append(request)
