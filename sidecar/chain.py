"""Walking a prompt's chain of keyed ids, in memory only.

Ids are keyed with the lookup key of the span's namespace (docs/format.md section 4). A walk
ends at the first block that one of the ranks lacks; there the shorter blocks that a shorter
prompt may have left are tried, longest first. Nothing beyond the granted spans is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidecar.request import ChainedBlock, Prompt
from strongroom.blocks import ROOT_PARENT, BlockId, Extent, Grid, block_id
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Missing
from strongroom.grant import GrantedSpan
from strongroom.identity import NamespaceId

KeySource = Callable[[NamespaceId], NamespaceKeys | None]
Resident = Callable[[BlockId], bool]
TOKEN_BYTES = 4


class Chain:
    """One granted prompt on one grid."""

    def __init__(
        self, grid: Grid, spans: Sequence[GrantedSpan], prompt: Prompt, keys: KeySource
    ) -> None:
        self._grid = grid
        self._spans = spans
        self._prompt = prompt
        self._source = keys
        self._keys: dict[NamespaceId, NamespaceKeys] = {}

    def plan(self, tokens: int) -> tuple[ChainedBlock, ...]:
        """Every block of the first `tokens` tokens. Raises `Missing` when a key is not here."""
        blocks: list[ChainedBlock] = []
        parent = ROOT_PARENT
        for extent in self._extents(tokens):
            block = self._chained(extent, parent)
            blocks.append(block)
            parent = block.block
        return tuple(blocks)

    def longest(self, resident: Resident) -> tuple[ChainedBlock, ...]:
        """The stored prefix. Raises `Missing` when a key is not here."""
        blocks: list[ChainedBlock] = []
        parent = ROOT_PARENT
        for extent in self._extents(len(self._prompt.tokens) // TOKEN_BYTES):
            block = self._chained(extent, parent)
            if not resident(block.block):
                blocks.extend(self._shorter(extent, parent, resident))
                break
            blocks.append(block)
            parent = block.block
        return tuple(blocks)

    def _extents(self, tokens: int) -> tuple[Extent, ...]:
        return self._grid.plan([span.end for span in self._spans], tokens)

    def _shorter(
        self, missed: Extent, parent: BlockId, resident: Resident
    ) -> tuple[ChainedBlock, ...]:
        for extent in self._grid.shorter(missed):
            block = self._chained(extent, parent)
            if resident(block.block):
                return (block,)
        return ()

    def _chained(self, extent: Extent, parent: BlockId) -> ChainedBlock:
        namespace = self._spans[extent.span].namespace
        keys = self._keys.get(namespace) or self._source(namespace)
        if keys is None:
            raise Missing("the namespace's keys are not here")
        self._keys[namespace] = keys
        packed = self._prompt.tokens[extent.start * TOKEN_BYTES : extent.end * TOKEN_BYTES]
        block = block_id(keys.lookup, parent, extent.start, packed, self._prompt.extras)
        return ChainedBlock(extent, block, parent, namespace)
