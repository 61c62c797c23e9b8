"""Formats and layouts: every field counts, and impossible ones are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from strongroom.errors import Misuse
from strongroom.kvformat import KVFormat, Layout
from strongroom.limits import SEGMENTS_MAX

FORMAT = KVFormat("bfloat16", "none", 30, 3, 64, "gqa", "default:100000")
LAYOUT = Layout("vllm-cpu-packed", "vec", 32, (4096,) * 30, 1, 0, 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"quantization": "fp8_e4m3"},
        {"layers": 31},
        {"kv_heads": 4},
        {"head_size": 128},
        {"attention": "mla"},
        {"rope": "yarn:4"},
    ],
    ids=str,
)
def test_every_field_of_a_format_is_in_its_digest(change: dict[str, Any]) -> None:
    assert dataclasses.replace(FORMAT, **change).digest() != FORMAT.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"order": "HND"},
        {"isa": "amx"},
        {"page_tokens": 64},
        {"page_bytes": (8192,) * 30},
        {"page_bytes": (4096,) * 31},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2},
        {"pp_size": 2, "pp_rank": 1},
    ],
    ids=str,
)
def test_every_field_of_a_layout_is_in_its_digest(change: dict[str, Any]) -> None:
    assert dataclasses.replace(LAYOUT, **change).digest() != LAYOUT.digest()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_bytes": ()}, "page_bytes"),
        ({"page_bytes": (1,) * (SEGMENTS_MAX + 1)}, "page_bytes"),
        ({"page_bytes": (0,)}, "page_bytes"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"order": ""}, "order"),
        ({"order": "x" * 129}, "order"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"pp_rank": -1}, "pp_rank"),
        ({"tp_size": 0}, "tp_size"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(Misuse) as caught:
        dataclasses.replace(LAYOUT, **change)
    assert caught.value.field == field


@pytest.mark.parametrize("change", [{"layers": 0}, {"layers": SEGMENTS_MAX + 1}, {"dtype": ""}])
def test_a_format_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        dataclasses.replace(FORMAT, **change)


def test_a_block_of_whole_pages_has_one_segment_a_layer() -> None:
    assert LAYOUT.segment_bytes(64) == (8192,) * 30
    assert LAYOUT.block_bytes(64) == 8192 * 30
    for tokens in (0, 1, 33, -32):
        with pytest.raises(Misuse):
            LAYOUT.segment_bytes(tokens)


def test_ranks_are_numbered_through_both_parallel_axes() -> None:
    ranks = {Layout("o", "i", 32, (1,), 2, tp, 3, pp).rank for tp in range(2) for pp in range(3)}
    assert ranks == set(range(6))
