"""The stages of one block's way from host memory to NVMe, as types, and the handle on it.

    Queued ─policy, precondition─▶ Gathered ─batch─▶ Batched ─upgrade─▶ Committed ─execute─▶ end
       └───────────────┴───── cancel: free ─────┴──────────┘

- Every stage but `Committed` holds a weak reference alone: the block may vanish meanwhile.
- The precondition, that the engine's forward pass is done and its bytes are sealed, is met by
  type: only a `Resident` can be weakened into the reference that a `Queued` needs. What is
  looked at again after the policy is whether that writing is still there.
- A handle ends once, as `Completed`, `Cancelled` or `Failed`; whoever waits is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from storage.block import BlockAddress
from storage.ending import Cancelled, Outcome
from storage.lifecycle import WeakReference
from storage.retention import Retention
from strongroom.identity import ComponentId, NamespaceId


@dataclass(frozen=True, slots=True)
class Candidate:
    """What an admission policy may know of a block that could be written."""

    address: BlockAddress
    tenant: ComponentId
    nbytes: int
    retention: Retention
    uses: int
    """How often it was wanted so far, its own saving included."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The policy's yes."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The policy's no, and why."""

    reason: str


class Policy(Protocol):
    """Is this block worth a write?"""

    async def judge(self, candidate: Candidate, /) -> Wanted | Unwanted:
        """Must answer in the time that the settings give; later means no."""
        ...

    def written(self, address: BlockAddress, nbytes: int, /) -> None:
        """A block that it wanted has been written."""
        ...


class WriteAll:
    """The policy of a store that was given none."""

    async def judge(self, _: Candidate, /) -> Wanted | Unwanted:
        return Wanted()

    def written(self, _: BlockAddress, __: int, /) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Offered; the policy has not answered yet."""

    reference: WeakReference
    namespace: NamespaceId
    candidate: Candidate
    since_ns: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """Wanted and still there; waits for its batch to fill."""

    queued: Queued


@dataclass(frozen=True, slots=True)
class Batched:
    """Its batch is closed and waits for a transfer slot."""

    queued: Queued
    batch: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Pinned; from here on it completes or fails."""

    queued: Queued
    batch: int


Stage = Queued | Gathered | Batched | Committed


class Offload:
    """One block under way. Used on the event loop's thread."""

    __slots__ = ("_on_end", "_outcome", "_told", "queued", "stage")

    def __init__(self, queued: Queued, on_end: Callable[[Offload, Outcome], None]) -> None:
        self.queued = queued
        self.stage: Stage = queued
        self._on_end = on_end
        self._outcome: Outcome | None = None
        self._told = asyncio.Event()

    @property
    def address(self) -> BlockAddress:
        return self.queued.reference.address

    @property
    def nbytes(self) -> int:
        return self.queued.candidate.nbytes

    @property
    def outcome(self) -> Outcome | None:
        """None while it is under way."""
        return self._outcome

    def cancel(self) -> bool:
        """Give it up, at no cost; false when it was committed or had ended."""
        match self.stage:
            case Queued() | Gathered() | Batched():
                return self.end(Cancelled())
            case Committed():
                return False

    def end(self, outcome: Outcome) -> bool:
        """The pipeline's own verb. False, with nothing changed, when it had ended."""
        if self._outcome is not None:
            return False
        self._outcome = outcome
        self._on_end(self, outcome)
        self._told.set()
        return True

    async def wait(self) -> Outcome:
        """Return once it has ended."""
        await self._told.wait()
        assert self._outcome is not None
        return self._outcome
