"""Staging as tensors, and copies to and from a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    # torch warns at import that it does without NumPy, which nothing here needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from storage.staging import Staging
from storage.tensors import DeviceCopies, tensor_of
from strongroom.errors import Misuse

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging(64 * 1024)
    yield made
    made.close()


def test_a_tensor_shares_stagings_bytes(staging: Staging) -> None:
    tensor = tensor_of(staging.view, 4096, torch.float32, (4, 8))
    tensor.fill_(1.0)
    assert bytes(staging.view[4096:4100]) == b"\0\0\x80\x3f"
    assert bytes(staging.view[4096 + 128 : 4096 + 132]) == bytes(4)


@pytest.mark.parametrize(
    ("offset", "shape"), [(-4, (4,)), (65536, (1,)), (65532, (2,)), (2, (4,)), (0, (0,))]
)
def test_a_tensor_beyond_staging_or_off_its_elements_is_refused(
    staging: Staging, offset: int, shape: tuple[int, ...]
) -> None:
    with pytest.raises(Misuse):
        tensor_of(staging.view, offset, torch.float32, shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_bytes_go_to_the_device_and_back_unchanged(
    staging: Staging, device: str, dtype: torch.dtype
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    noise = bytes(range(256)) * 4
    staging.view[:1024] = noise
    where = torch.device(device)
    pages = torch.zeros(1024 // dtype.itemsize, dtype=dtype, device=where)
    before = None
    if device == "cuda":
        before = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        before.record()
    with DeviceCopies(staging.view, where) as copies:
        copies.to_device(0, pages, before)
        copies.wait()
        copies.from_device(pages, 8192)
        copies.wait()
        assert bytes(staging.view[8192 : 8192 + 1024]) == noise
        with pytest.raises(Misuse):
            copies.to_device(65536 - 512, pages)
        with pytest.raises(Misuse):
            copies.from_device(pages.view(2, -1).t(), 0)
    del copies


def test_another_kind_of_device_is_refused(staging: Staging) -> None:
    with pytest.raises(Misuse), DeviceCopies(staging.view, torch.device("meta")):
        pass
