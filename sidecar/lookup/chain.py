"""Walking a prompt's chain of keyed ids, in memory only.

Ids are keyed with the lookup key of the span's namespace (docs/format.md section 4). A walk
ends at the first block that one of the ranks lacks; there the shorter blocks that a shorter
prompt may have left are tried, longest first. Nothing beyond the granted spans is looked at.

A lookup walks before its verdict, so it makes columns of ids, ends and tiers only:
no object a block, for which the collector of garbage would have to look after each verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sidecar.lookup.request import ChainedBlock, Hit, Prompt
from storage.tiers.protocol import TierName
from strongroom.blocks import (
    ROOT_PARENT,
    TOKEN_BYTES,
    BlockId,
    Extent,
    Grid,
    IdOf,
    RunOf,
    ids_of,
    run_of,
)
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Missing
from strongroom.grant import GrantedSpan
from strongroom.identity import NamespaceId

KeySource = Callable[[NamespaceId], NamespaceKeys | None]
Locate = Callable[[Sequence[BlockId]], Sequence[TierName]]
"""The slowest tier in which the ranks have a block, of those blocks in front that all have."""
_FIRST_BATCH: Final = 8
_LONGER: Final = 4
_NOTHING: Final = Hit()


@dataclass(slots=True)
class _Found:
    """Columns of a hit that grows."""

    ids: list[BlockId] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    tiers: list[TierName] = field(default_factory=list)

    @property
    def last(self) -> BlockId:
        return self.ids[-1] if self.ids else ROOT_PARENT

    def add(
        self, ids: Sequence[BlockId], ends: Sequence[int], span: int, tiers: Sequence[TierName]
    ) -> None:
        self.ids += ids
        self.ends += ends
        self.spans += [span] * len(ids)
        self.tiers += tiers


class Chain:
    """One granted prompt on one grid."""

    def __init__(
        self, grid: Grid, spans: Sequence[GrantedSpan], prompt: Prompt, keys: KeySource
    ) -> None:
        self._grid = grid
        self._spans = spans
        self._ends = [span.end for span in spans]
        self._prompt = prompt
        self._source = keys
        self._ids: dict[NamespaceId, IdOf] = {}
        self._runs: dict[NamespaceId, RunOf] = {}

    def plan(self, tokens: int, known: Hit = _NOTHING) -> tuple[ChainedBlock, ...]:
        """Every block of the first `tokens` tokens. Raises `Missing` when a key is not here.

        `known` is what a lookup of the same prompt has found: its ids are not hashed again.
        """
        blocks: list[ChainedBlock] = []
        parent = ROOT_PARENT
        again = len(known)
        for number, extent in enumerate(self._grid.plan(self._ends, tokens)):
            id_of = self._of_span(extent.span)  # also for a known id: its key must be here
            if number < again and known.ends[number] == extent.end:
                block = known.ids[number]
            else:
                again = 0
                block = id_of(parent, extent.start, extent.end)
            blocks.append(ChainedBlock(extent, block, parent, self._spans[extent.span].namespace))
            parent = block
        return tuple(blocks)

    def longest(self, locate: Locate) -> Hit:
        """The stored prefix. Raises `Missing` when a key is not here."""
        found = _Found()
        self._walk(locate, found)
        return Hit(
            tuple(found.ids),
            tuple(found.ends),
            tuple(found.spans),
            tuple(found.tiers),
            tuple(span.namespace for span in self._spans),
        )

    def _walk(self, locate: Locate, found: _Found) -> None:
        """Batch by batch, each longer than all before: what a miss leaves that was hashed in vain
        is in proportion to what was found.
        """
        size = self._grid.tokens_per_block
        batch = _FIRST_BATCH
        parent = ROOT_PARENT
        for span, first, stop in self._grid.regions(
            self._ends, len(self._prompt.tokens) // TOKEN_BYTES
        ):
            run = self._run_of_span(span)
            begun = first
            while begun < stop:
                end = min(begun + batch * size, stop)
                starts = range(begun, end, size)
                ids = run(parent, starts, end)
                tiers = locate(ids)
                here = len(tiers)
                if here < len(ids):
                    found.add(ids[:here], starts[1 : here + 1], span, tiers)
                    missed = Extent(starts[here], min(starts[here] + size, end), span)
                    self._shorter(missed, found.last, locate, found)
                    return
                found.add(ids, (*starts[1:], end), span, tiers)
                parent = ids[-1]
                begun = end
                batch *= _LONGER

    def _shorter(self, missed: Extent, parent: BlockId, locate: Locate, found: _Found) -> None:
        """The longest shorter block that stands where this one missed, if there is any."""
        id_of = self._of_span(missed.span)
        for extent in self._grid.shorter(missed):
            ids = [id_of(parent, extent.start, extent.end)]
            tiers = locate(ids)
            if tiers:
                found.add(ids, [extent.end], extent.span, tiers)
                return

    def _of_span(self, span: int) -> IdOf:
        namespace = self._spans[span].namespace
        known = self._ids.get(namespace)
        if known is None:
            known = ids_of(self._lookup_key(namespace), self._prompt.tokens, self._prompt.extras)
            self._ids[namespace] = known
        return known

    def _run_of_span(self, span: int) -> RunOf:
        namespace = self._spans[span].namespace
        known = self._runs.get(namespace)
        if known is None:
            known = run_of(
                self._lookup_key(namespace),
                self._prompt.tokens,
                self._prompt.extras,
                self._grid.tokens_per_block,
            )
            self._runs[namespace] = known
        return known

    def _lookup_key(self, namespace: NamespaceId) -> bytes:
        keys = self._source(namespace)
        if keys is None:
            raise Missing("the namespace's keys are not here")
        return keys.lookup
