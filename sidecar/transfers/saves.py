"""The saves of a sidecar: one block's handle, who has claimed which block, and how they ended.

    Handed ─Filled─▶ Copied ─in chain order─▶ Sealing ─publish─▶ Stored | Present
       └──────────────────┴───── give up ─────────┴────────────▶ Dropped(reason)

- `Copied` is the precondition: the forward pass is done, and the engine's pages are free again.
- A block may be given up until its seal is published: in the first two stages at once, while it
  is being sealed by a word that is looked at right before the publishing.
- It ends once, with its reason, and whoever waits is told. Of a chain, what comes after a
  dropped block is dropped too: it could never match.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.lookup.request import ChainedBlock
from sidecar.record.reasons import Reason
from storage.block import BlockAddress, BlockContext
from storage.fair import Fair, Weight, equal_weights
from storage.staging import StagingSlot


@dataclass(frozen=True, slots=True)
class Handed:
    """The engine was asked to fill the slot."""

    slot: StagingSlot


@dataclass(frozen=True, slots=True)
class Copied:
    """The engine has copied its pages into the slot."""

    slot: StagingSlot


@dataclass(frozen=True, slots=True)
class Sealing:
    """Threads may be reading the slot."""

    slot: StagingSlot


@dataclass(frozen=True, slots=True)
class Stored:
    """It became resident."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Present:
    """It had become resident meanwhile, or somebody else was sealing it."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """It was not stored."""

    reason: Reason


SaveStage = Handed | Copied | Sealing
SaveEnd = Stored | Present | Dropped


class BlockSave:
    """One block of one save. Used on the event loop's thread."""

    __slots__ = ("_ended", "_saves", "block", "context", "end", "given_up", "place", "stage")

    def __init__(
        self,
        block: ChainedBlock,
        context: BlockContext,
        slot: StagingSlot,
        saves: SavesInFlight,
        place: int,
    ) -> None:
        self.block = block
        self.place = place
        """Among the blocks of its save, from 0; parents come first."""
        self.context = context
        self.stage: SaveStage = Handed(slot)
        self.end: SaveEnd | None = None
        """None while it is under way."""
        self.given_up: Reason | None = None
        """While it is being sealed: why it must not be published."""
        self._saves = saves
        self._ended = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether it is not stored, or will not be."""
        return self.given_up is not None or isinstance(self.end, Dropped)

    def give_up(self, reason: Reason) -> None:
        """Do not store it; nothing happens when it has ended."""
        match self.stage:
            case Handed() | Copied():
                self.finish(Dropped(reason))
            case Sealing():
                self.given_up = self.given_up or reason

    def finish(self, end: SaveEnd) -> None:
        """Its one end; a later one changes nothing."""
        if self.end is None:
            self.end = end
            self._saves.ended(self, end)
            self._ended.set()

    async def wait(self) -> SaveEnd:
        """Return once it has ended."""
        await self._ended.wait()
        assert self.end is not None
        return self.end


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """Blocks since start, and gauges now."""

    stored: int
    stored_bytes: int
    present: int
    dropped: Mapping[Reason, int]
    claimed: int
    """Blocks that some engine was asked for and that have not ended."""
    sealing: int


class SavesInFlight:
    """Blocks that some connection holds a slot for: nobody else is asked to fill them.

    `seals_max` blocks are sealed at once, of all connections together, by turns that are fair by
    tenant: enough that no crypto thread is idle while the next is published, few enough that
    sealed blocks do not fill the host tier while they wait for their parents. Blocks of one
    tenant come in their order, so that a block never waits for a parent that waits behind it.
    """

    def __init__(self, seals_max: int = 4, weight: Weight = equal_weights) -> None:
        # Bounded by the staging that all who wait hold.
        self.seals = Fair("seals", seals_max, waiting_max=sys.maxsize, weight=weight)
        self._claims: dict[BlockAddress, BlockSave] = {}
        self._stored = 0
        self._stored_bytes = 0
        self._present = 0
        self._dropped: Counter[Reason] = Counter()

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._claims

    def __len__(self) -> int:
        return len(self._claims)

    def claim(
        self, block: ChainedBlock, context: BlockContext, slot: StagingSlot, place: int
    ) -> BlockSave:
        """Ask for a block that nobody else has been asked for; the `place`th of its save."""
        save = BlockSave(block, context, slot, self, place)
        self._claims[context.address] = save
        return save

    def ended(self, save: BlockSave, end: SaveEnd) -> None:
        """The block's own verb."""
        del self._claims[save.context.address]
        match end:
            case Stored(nbytes):
                self._stored += 1
                self._stored_bytes += nbytes
            case Present():
                self._present += 1
            case Dropped(reason):
                self._dropped[reason] += 1

    def statistics(self) -> SaveStatistics:
        """A frozen snapshot."""
        return SaveStatistics(
            stored=self._stored,
            stored_bytes=self._stored_bytes,
            present=self._present,
            dropped=dict(self._dropped),
            claimed=len(self._claims),
            sealing=sum(isinstance(save.stage, Sealing) for save in self._claims.values()),
        )
