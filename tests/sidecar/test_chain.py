"""The walk of a lookup: what it finds is what one block after the other would find."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.lookup.chain import Chain
from sidecar.lookup.judge import PIECES, SINGLE_PIECES, pieces
from sidecar.lookup.request import ChainedBlock, Hit, Prompt
from storage.tiers.protocol import TierName
from strongroom.blocks import ROOT_PARENT, BlockId, Grid, block_id, pack_tokens
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Missing
from strongroom.grant import GrantedSpan
from strongroom.identity import NamespaceId

PAGE, BLOCK = 4, 16
GRID = Grid(BLOCK, PAGE)
NAMES = tuple(NamespaceId(character * 64) for character in "abc")
KEYS = {name: NamespaceKeys(bytes([number]) * 32, bytes(32)) for number, name in enumerate(NAMES)}


def prompt(tokens: int) -> Prompt:
    return Prompt(pack_tokens(range(tokens)), b"extras", "grant")


def chain(tokens: int, ends: Sequence[int], keys: dict[NamespaceId, NamespaceKeys] = KEYS) -> Chain:
    spans = [GrantedSpan(end, NAMES[index], ()) for index, end in enumerate(ends)]
    return Chain(GRID, spans, prompt(tokens), keys.get)


class Store:
    """Some ids, each in a tier; counts how many it was asked for."""

    def __init__(self, tiers: dict[BlockId, TierName]) -> None:
        self.tiers = tiers
        self.asked = 0

    def locate(self, blocks: Sequence[BlockId]) -> list[TierName]:
        self.asked += len(blocks)
        found = []
        for block in blocks:
            if block not in self.tiers:
                break
            found.append(self.tiers[block])
        return found


def one_after_the_other(
    tokens: int, ends: Sequence[int], stored: dict[BlockId, TierName]
) -> list[ChainedBlock]:
    """The definition: block by block, and at the first miss the longest shorter one."""
    found: list[ChainedBlock] = []
    parent = ROOT_PARENT
    content = prompt(tokens)
    for extent in GRID.plan(ends, tokens):
        for candidate in (extent, *GRID.shorter(extent)):
            packed = content.tokens[candidate.start * 4 : candidate.end * 4]
            name = NAMES[candidate.span]
            lookup = KEYS[name].lookup
            block = block_id(lookup, parent, candidate.start, packed, content.extras)
            if block in stored:
                found.append(ChainedBlock(candidate, block, parent, name))
                break
        if not found or found[-1].extent != extent:
            break
        parent = found[-1].block
    return found


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[int]]:
    tokens = draw(st.integers(1, 700))
    ends = draw(st.sets(st.integers(1, tokens), min_size=1, max_size=3))
    return tokens, sorted(ends)


@given(prompts(), st.data())
def test_a_walk_finds_what_one_block_after_the_other_finds(
    what: tuple[int, list[int]], data: st.DataObject
) -> None:
    tokens, ends = what
    whole = chain(tokens, ends).plan(tokens)
    count = data.draw(st.integers(0, len(whole)))
    stored = {block.block: data.draw(st.sampled_from(TierName)) for block in whole[:count]}
    stored |= {
        block.block: TierName.NVME
        for block in whole[count + 1 :]
        if data.draw(st.booleans())  # beyond a gap: never found
    }
    if count < len(whole) and data.draw(st.booleans()):
        for extent in GRID.shorter(whole[count].extent):
            short = chain(tokens, ends).plan(extent.end)[-1]
            stored[short.block] = TierName.HOST
            break
    hit = chain(tokens, ends).longest(Store(stored).locate)
    expected = one_after_the_other(tokens, ends, stored)
    assert list(hit) == expected
    assert hit.tiers == tuple(stored[block.block] for block in expected)
    assert hit.tokens == (expected[-1].extent.end if expected else 0)
    for limit in range(0, tokens + PAGE, PAGE):
        front = [block for block in expected if block.extent.end <= limit]
        assert list(hit.front(limit)) == front


@given(prompts(), st.data())
def test_a_plan_is_the_same_with_what_a_lookup_has_found(
    what: tuple[int, list[int]], data: st.DataObject
) -> None:
    tokens, ends = what
    whole = chain(tokens, ends).plan(tokens)
    count = data.draw(st.integers(0, len(whole)))
    stored = {block.block: TierName.HOST for block in whole[:count]}
    if count < len(whole):
        for extent in GRID.shorter(whole[count].extent):
            stored[chain(tokens, ends).plan(extent.end)[-1].block] = TierName.HOST
    hit = chain(tokens, ends).longest(Store(stored).locate)
    for end in {tokens, data.draw(st.integers(0, tokens))}:
        assert chain(tokens, ends).plan(end, hit) == chain(tokens, ends).plan(end)
    if count:
        with pytest.raises(Missing):
            chain(tokens, ends, {}).plan(tokens, hit)


def test_a_miss_in_front_hashes_little_of_a_long_prompt() -> None:
    store = Store({})
    assert not chain(16_000, [16_000]).longest(store.locate)
    assert store.asked <= 8 + BLOCK // PAGE


def test_a_key_that_is_not_here_is_missing_only_where_it_is_needed() -> None:
    ours = {NAMES[0]: KEYS[NAMES[0]]}
    ends = [BLOCK, 2 * BLOCK]
    stored = Store({chain(BLOCK, [BLOCK]).plan(BLOCK)[0].block: TierName.HOST})
    with pytest.raises(Missing):
        chain(2 * BLOCK, ends, ours).longest(stored.locate)
    assert chain(2 * BLOCK, ends, ours).longest(Store({}).locate).tokens == 0


@given(st.lists(st.sampled_from(TierName), max_size=200))
def test_pieces_cover_the_hit_in_order_and_lie_in_one_tier_each(tiers: list[TierName]) -> None:
    ends = tuple(BLOCK * number for number in range(1, len(tiers) + 1))
    ids = tuple(BlockId(bytes(32)) for _ in tiers)
    cut = list(pieces(Hit(ids, ends, (0,) * len(tiers), tuple(tiers), NAMES)))
    assert [end for end, _ in cut] == sorted({end for end, _ in cut})
    assert (cut[-1][0] if cut else 0) == (ends[-1] if ends else 0)
    start = 0
    for end, tier in cut:
        assert set(tiers[start // BLOCK : end // BLOCK]) == {tier}
        start = end
    changes = sum(before is not after for before, after in pairwise(tiers))
    assert len(cut) <= PIECES + SINGLE_PIECES + changes
    assert [end for end, _ in cut[:SINGLE_PIECES]] == list(ends[:SINGLE_PIECES])
