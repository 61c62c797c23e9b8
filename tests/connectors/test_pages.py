"""Page copies between tensors and staging, byte for byte."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strongroom.connectors.pages import HostPages, page_planes, pages_of, runs
from strongroom.errors import Misuse

COUNT = 16


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return tensor


def packed(seed: int) -> torch.Tensor:
    """vLLM's CPU layout: pages, heads, tokens, key and value."""
    return fill(torch.empty(COUNT, 3, 32, 8), seed)


def split(seed: int) -> torch.Tensor:
    """Keys and values apart."""
    return fill(torch.empty(2, COUNT, 32, 3, 4), seed)


def interleaved(seed: int) -> torch.Tensor:
    """Block-outermost: another layer's page lies between two of this one's."""
    return fill(torch.empty(COUNT, 2, 3, 32, 8), seed)[:, 1]


def permuted(seed: int) -> torch.Tensor:
    """Shown as pages, tokens, heads, stored as pages, heads, tokens."""
    return packed(seed).movedim(1, 2)


LAYOUTS = [packed, split, interleaved, permuted]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_in_other_places_and_nothing_else_changes(layout: object) -> None:
    assert callable(layout)
    source_tensors = [layout(1), layout(2)]
    target_tensors = [layout(3), layout(4)]
    before = [tensor.clone() for tensor in target_tensors]
    source, target = pages_of(source_tensors, COUNT), pages_of(target_tensors, COUNT)
    staging = mmap.mmap(-1, 1 << 20)
    source.adopt(staging)
    target.adopt(staging)
    taken, given_ = [3, 4, 5, 9], [12, 2, 3, 0]
    source.copy_out(4096, taken, source.mark())
    target.copy_in(4096, 4, 0, given_, target.mark())
    for ours, theirs, old in zip(target_tensors, source_tensors, before, strict=True):
        axis = 1 if layout is split else 0
        assert torch.equal(ours.index_select(axis, torch.tensor(given_)),
                           theirs.index_select(axis, torch.tensor(taken)))  # fmt: skip
        rest = torch.tensor([page for page in range(COUNT) if page not in given_])
        assert torch.equal(ours.index_select(axis, rest), old.index_select(axis, rest))
    source.adopt(None)
    target.adopt(None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(2, 2)])
def test_a_range_of_layers_is_copied_and_the_others_stay(layout: object, layers: range) -> None:
    assert callable(layout)
    source_tensors = [layout(seed) for seed in (1, 2, 3)]
    target_tensors = [layout(seed) for seed in (4, 5, 6)]
    before = [tensor.clone() for tensor in target_tensors]
    source, target = pages_of(source_tensors, COUNT), pages_of(target_tensors, COUNT)
    staging = mmap.mmap(-1, 1 << 20)
    source.adopt(staging)
    target.adopt(staging)
    source.copy_out(4096, [3, 4, 9], source.mark())
    target.copy_in(4096, 3, 1, [7, 2], target.mark(), layers)
    axis = 1 if layout is split else 0
    for number, (ours, theirs, old) in enumerate(
        zip(target_tensors, source_tensors, before, strict=True)
    ):
        if number in layers:
            assert torch.equal(ours.index_select(axis, torch.tensor([7, 2])),
                               theirs.index_select(axis, torch.tensor([4, 9])))  # fmt: skip
        else:
            assert torch.equal(ours, old)
    source.adopt(None)
    target.adopt(None)


def test_a_part_may_be_copied_from_its_middle() -> None:
    source_tensor, target_tensor = packed(1), packed(2)
    source, target = pages_of([source_tensor], COUNT), pages_of([target_tensor], COUNT)
    staging = mmap.mmap(-1, 1 << 20)
    source.adopt(staging)
    target.adopt(staging)
    source.copy_out(0, [1, 2, 3, 4], None)
    before = target_tensor.clone()
    target.copy_in(0, 4, 2, [8, 7], None)
    assert torch.equal(target_tensor[8], source_tensor[3])
    assert torch.equal(target_tensor[7], source_tensor[4])
    assert torch.equal(target_tensor[[0, 1, 2, 3]], before[[0, 1, 2, 3]])


def test_staging_holds_layer_after_layer_and_page_after_page() -> None:
    tensors = [torch.full((COUNT, 1, 32, 2), float(layer)) for layer in range(3)]
    pages = pages_of(tensors, COUNT)
    assert pages.page_bytes == (256, 256, 256)
    staging = mmap.mmap(-1, 4096)
    pages.adopt(staging)
    pages.copy_out(0, [5, 1], None)
    read = torch.tensor(memoryview(staging)[: 3 * 512].cast("f").tolist())
    assert read.tolist() == [0.0] * 128 + [1.0] * 128 + [2.0] * 128


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(7, 3, 32, 8), torch.empty(3, COUNT, 32), torch.empty(COUNT, 32, 8)[:, :, ::2]],
)
def test_a_layout_that_cannot_be_named_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Misuse):
        page_planes(tensor, COUNT)


def test_an_engine_without_kv_is_refused() -> None:
    with pytest.raises(Misuse):
        pages_of([], COUNT)


@given(st.lists(st.integers(0, 50), max_size=30, unique=True))
def test_runs_cover_every_page_once_and_in_order(pages: list[int]) -> None:
    rebuilt = [page + step for _, page, count in runs(pages) for step in range(count)]
    assert rebuilt == pages
    assert [index for index, _, _ in runs(pages)] == [
        index for index in range(len(pages)) if index == 0 or pages[index] != pages[index - 1] + 1
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_on_a_gpu_come_back_through_pinned_staging() -> None:
    source_tensor = packed(1).cuda()
    target_tensor = torch.zeros_like(source_tensor)
    source, target = pages_of([source_tensor], COUNT), pages_of([target_tensor], COUNT)
    assert not isinstance(source, HostPages)
    staging = mmap.mmap(-1, 1 << 20)
    source.adopt(staging)
    source.copy_out(0, [3, 4, 9], source.mark())
    source.adopt(None)
    target.adopt(staging)
    target.copy_in(0, 3, 0, [1, 0, 15], target.mark())
    target.adopt(None)
    assert torch.equal(target_tensor[[1, 0, 15]], source_tensor[[3, 4, 9]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_out_waits_for_the_engines_work_on_the_gpu() -> None:
    tensor = torch.zeros(COUNT, 3, 32, 8, device="cuda")
    pages = pages_of([tensor], COUNT)
    staging = mmap.mmap(-1, 1 << 20)
    pages.adopt(staging)
    cuda: Any = torch.cuda
    cuda._sleep(200_000_000)
    tensor.fill_(1.0)
    pages.copy_out(0, [0], pages.mark())
    assert memoryview(staging)[:4].cast("f")[0] == 1.0
    pages.adopt(None)
