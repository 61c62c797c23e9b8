"""The grid's invariants, and block ids that nobody without the key can compute or compare."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.blocks import (
    ROOT_PARENT,
    BlockId,
    Grid,
    block_id,
    pack_tokens,
    prompt_digest,
    run_of,
)
from strongroom.errors import Misuse
from strongroom.limits import EXTRAS_BYTES_MAX, PROMPT_TOKENS_MAX, TOKEN_ID_MAX

PAGE = 4
grids = st.integers(1, 6).map(lambda pages: Grid(pages * PAGE, PAGE))
span_ends = st.lists(st.integers(1, 120), max_size=6, unique=True).map(sorted)


@given(grids, span_ends, st.integers(0, 140))
def test_extents_tile_whole_pages_and_never_cross_a_cut(
    grid: Grid, ends: list[int], tokens: int
) -> None:
    extents = grid.plan(ends, tokens)
    covered = grid.whole_pages(min(tokens, ends[-1] if ends else 0))
    at = 0
    for extent in extents:
        assert extent.start == at
        assert extent.tokens % PAGE == 0
        assert 0 < extent.tokens <= grid.tokens_per_block
        # A block's last token decides its labels: the whole block lies before its span's end,
        # and ends after the last whole page of the span before.
        assert extent.end <= ends[extent.span]
        if extent.span:
            assert extent.start >= grid.whole_pages(ends[extent.span - 1])
        at = extent.end
    assert at == covered


@given(grids, span_ends, st.integers(0, 140))
def test_only_the_last_block_of_a_region_is_short(grid: Grid, ends: list[int], tokens: int) -> None:
    extents = grid.plan(ends, tokens)
    for extent, following in itertools.pairwise(extents):
        if extent.span == following.span:
            assert extent.tokens == grid.tokens_per_block
        else:
            assert extent.end == grid.whole_pages(min(ends[following.span - 1], tokens))


@given(grids, span_ends, st.integers(0, 140), st.integers(0, 140))
def test_a_longer_prompt_keeps_every_block_but_the_last(
    grid: Grid, ends: list[int], tokens: int, more: int
) -> None:
    short = grid.plan(ends, tokens)
    longer = grid.plan(ends, tokens + more)
    assert short[:-1] == longer[: max(0, len(short) - 1)]


@given(grids, st.integers(1, 6))
def test_shorter_blocks_are_tried_longest_first_by_whole_pages(grid: Grid, pages: int) -> None:
    extents = grid.plan([pages * PAGE], pages * PAGE)
    tried = list(grid.shorter(extents[-1]))
    lengths = [extent.tokens for extent in tried]
    assert lengths == sorted(lengths, reverse=True)
    assert all(length % PAGE == 0 and 0 < length < extents[-1].tokens for length in lengths)


@pytest.mark.parametrize("tokens", [0, 1, 31])
def test_a_prompt_shorter_than_a_page_has_no_block(tokens: int) -> None:
    assert Grid(256, 32).plan([40], tokens) == ()


def test_several_spans_inside_one_page_give_it_to_the_last_of_them() -> None:
    extents = Grid(256, 32).plan([5, 11, 20, 70], 70)
    assert [(extent.start, extent.end, extent.span) for extent in extents] == [(0, 64, 3)]


def test_a_page_that_straddles_a_spans_end_belongs_to_the_next_span() -> None:
    extents = Grid(256, 32).plan([100, 400], 400)
    assert [(e.start, e.end, e.span) for e in extents] == [(0, 96, 0), (96, 352, 1), (352, 384, 1)]


@pytest.mark.parametrize(("block", "page"), [(0, 32), (256, 0), (100, 32), (-32, 32), (256, -1)])
def test_a_block_that_is_no_whole_number_of_pages_is_refused(block: int, page: int) -> None:
    with pytest.raises(Misuse):
        Grid(block, page)


KEY = b"k" * 32
PACKED = pack_tokens(range(64))


def test_the_same_tokens_in_the_same_place_have_the_same_id() -> None:
    assert block_id(KEY, ROOT_PARENT, 0, PACKED) == block_id(KEY, ROOT_PARENT, 0, PACKED)


@pytest.mark.parametrize(
    "other",
    [
        block_id(b"l" * 32, ROOT_PARENT, 0, PACKED),
        block_id(KEY, BlockId(b"\1" * 32), 0, PACKED),
        block_id(KEY, ROOT_PARENT, 64, PACKED),
        block_id(KEY, ROOT_PARENT, 0, PACKED[:-4]),
        block_id(KEY, ROOT_PARENT, 0, PACKED[:-4] + b"\0\0\0\0"),
        block_id(KEY, ROOT_PARENT, 0, PACKED, b"image"),
    ],
    ids=["key", "parent", "position", "length", "token", "extras"],
)
def test_any_other_key_parent_position_token_or_extra_is_another_block(other: BlockId) -> None:
    assert other != block_id(KEY, ROOT_PARENT, 0, PACKED)


@given(
    st.lists(st.integers(0, TOKEN_ID_MAX), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(0, 5),
    st.binary(max_size=40),
)
def test_blocks_in_a_row_have_the_ids_that_they_have_one_by_one(
    tokens: list[int], size: int, skipped: int, extras: bytes
) -> None:
    """Whole blocks are hashed in another way than single ones, and must be the same blocks."""
    first = min(skipped, len(tokens) - 1)
    starts = range(first, len(tokens), size)
    packed, parent = pack_tokens(tokens), BlockId(b"p" * 32)
    expected: list[BlockId] = []
    for start in starts:
        expected.append(
            block_id(KEY, expected[-1] if expected else parent, start,
                     packed[4 * start : 4 * min(start + size, len(tokens))], extras)
        )  # fmt: skip
    assert run_of(KEY, packed, extras, size)(parent, starts, len(tokens)) == expected
    other = run_of(bytes(32), packed, extras, size)(parent, starts, len(tokens))
    assert not set(other) & set(expected)


def test_extras_never_pass_for_tokens() -> None:
    moved = block_id(KEY, ROOT_PARENT, 0, PACKED[:-4], PACKED[-4:])
    assert moved != block_id(KEY, ROOT_PARENT, 0, PACKED)


def test_extras_that_are_too_long_and_short_keys_are_refused() -> None:
    with pytest.raises(Misuse) as caught:
        block_id(KEY, ROOT_PARENT, 0, PACKED, bytes(EXTRAS_BYTES_MAX + 1))
    assert caught.value.limit == EXTRAS_BYTES_MAX
    with pytest.raises(Misuse):
        block_id(b"short", ROOT_PARENT, 0, PACKED)


@given(st.lists(st.integers(0, TOKEN_ID_MAX), max_size=40))
def test_packed_tokens_are_four_bytes_each_little_endian(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    unpacked = [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
    assert unpacked == tokens


@pytest.mark.parametrize("bad", [[-1], [TOKEN_ID_MAX + 1], [1.5], ["a"]])
def test_what_is_no_token_id_is_refused(bad: list[int]) -> None:
    with pytest.raises(Misuse) as caught:
        pack_tokens(bad)
    assert caught.value.field == "tokens"
    assert caught.value.limit == TOKEN_ID_MAX


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(0, 5), max_size=6))
def test_prompts_share_a_digest_only_when_they_are_equal(one: list[int], other: list[int]) -> None:
    digests = [prompt_digest(pack_tokens(each)) for each in (one, other)]
    assert (digests[0] == digests[1]) == (one == other)


@pytest.mark.parametrize("tail", [b"\0", b"\0\0", b"\0\0\0"])
def test_packed_tokens_of_another_width_are_refused(tail: bytes) -> None:
    # Else the tail of the tokens could pass for the length of the extras, and two blocks be one.
    with pytest.raises(Misuse) as caught:
        prompt_digest(PACKED + tail)
    assert caught.value.field == "tokens"
    with pytest.raises(Misuse) as caught:
        block_id(KEY, ROOT_PARENT, 0, PACKED + tail)
    assert caught.value.field == "tokens"


@pytest.mark.parametrize("raw", [b"", b"abcd", bytearray(8), memoryview(bytes(4))])
def test_bytes_are_not_taken_for_token_ids(raw: bytes) -> None:
    with pytest.raises(Misuse):
        pack_tokens(raw)


@pytest.mark.parametrize("position", [-1, PROMPT_TOKENS_MAX + 1, 2**64])
def test_a_position_outside_any_prompt_is_refused(position: int) -> None:
    with pytest.raises(Misuse) as caught:
        block_id(KEY, ROOT_PARENT, position, PACKED)
    assert caught.value.field == "position"


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_parent_that_is_no_block_id_is_refused(length: int) -> None:
    with pytest.raises(Misuse) as caught:
        block_id(KEY, BlockId(bytes(length)), 0, PACKED)
    assert caught.value.field == "parent"


def test_a_prompt_of_no_tokens_has_a_digest_and_no_block() -> None:
    assert len(prompt_digest(pack_tokens([]))) == 32
    assert Grid(256, 32).plan([], 0) == ()


def test_a_span_that_ends_inside_one_page_makes_no_block_of_its_own() -> None:
    extents = Grid(256, 32).plan([33, 50, 96], 96)
    assert [(each.start, each.end, each.span) for each in extents] == [(0, 32, 0), (32, 96, 2)]
