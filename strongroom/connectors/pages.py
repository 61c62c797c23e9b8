"""Copies between the engine's pages and staging. Whole pages, byte for byte.

A layer's KV tensor is taken as one or two planes of rows, one row a page: the page's bytes in
the order in which they lie in memory. A page whose bytes do not lie together is refused, since
its order could not be named. In staging a block of n pages lies layer after layer, in a layer
plane after plane, in a plane page after page: the layout of a `Part`.

On a CPU a copy is done when the call returns. On a CUDA device it runs on a stream of its own,
after the event that `mark` recorded on the engine's stream, and the call returns when it is done:
it runs on the IO thread, never on the engine's.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from strongroom.errors import Misuse, Unavailable

_log = logging.getLogger(__name__)
_CUDA_HOST_REGISTER_PORTABLE: Final = 1


class Pages(Protocol):
    """The engine's pages of every layer, in layer order."""

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page, for each layer."""

    def adopt(self, staging: mmap.mmap | None) -> torch.Tensor | None:
        """Staging as bytes, prepared for copies; None gives the last one back."""

    def mark(self) -> object:
        """A point in the engine's work, on the engine's thread; copies wait for it."""

    def copy_in(
        self,
        staging: torch.Tensor,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        after: object,
    ) -> None:
        """Pages `first`.. of the block of `block_pages` pages at `offset`, into `pages`."""

    def copy_out(
        self, staging: torch.Tensor, offset: int, pages: Sequence[int], after: object
    ) -> None:
        """`pages`, as one block, to `offset`."""


def page_planes(tensor: torch.Tensor, page_count: int) -> tuple[torch.Tensor, ...]:
    """View a layer's KV tensor as planes of shape `[page_count, bytes]`, without a copy.

    Raises `Misuse` where no dimension, or not the first or second, counts pages, or where the
    bytes of one page do not lie together.
    """
    if tensor.dim() >= 2 and tensor.shape[0] == page_count:
        return (_rows(tensor),)
    if tensor.dim() >= 3 and tensor.shape[0] == 2 and tensor.shape[1] == page_count:
        return (_rows(tensor[0]), _rows(tensor[1]))
    raise Misuse(
        f"a KV tensor of shape {tuple(tensor.shape)} does not show {page_count} pages",
        field="kv_caches",
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    inner = sorted(
        (
            (stride, size)
            for stride, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
            if size > 1
        )
    )
    count = 1
    for stride, size in inner:
        if stride != count:
            raise Misuse("the bytes of a page do not lie together", field="kv_caches")
        count *= size
    if tensor.stride(0) < count:
        raise Misuse("pages overlap", field="kv_caches")
    dense = torch.as_strided(
        tensor, (tensor.shape[0], count), (tensor.stride(0), 1), tensor.storage_offset()
    )
    return dense.view(torch.uint8)


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut page ids into runs of neighbours: (index of the first, its page id, count)."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield start, pages[start], index - start
            start = index


class _Planes:
    """The planes of every layer, and the walk over them that both kinds of copy share."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._layers = tuple(layers)
        self.page_bytes = tuple(sum(plane.shape[1] for plane in layer) for layer in layers)

    def walk(
        self, staging: torch.Tensor, offset: int, block_pages: int, first: int, pages: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (rows of the engine, rows of staging) that correspond."""
        pieces = list(runs(pages))
        for layer in self._layers:
            for plane in layer:
                width = plane.shape[1]
                block = staging.narrow(0, offset, block_pages * width).view(block_pages, width)
                for index, page, count in pieces:
                    yield (
                        plane.narrow(0, page, count),
                        block.narrow(0, first + index, count),
                    )
                offset += block_pages * width


class HostPages:
    """Pages in the host's memory."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._planes = _Planes(layers)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return self._planes.page_bytes

    def adopt(self, staging: mmap.mmap | None) -> torch.Tensor | None:
        return None if staging is None else torch.frombuffer(staging, dtype=torch.uint8)

    def mark(self) -> object:
        return None

    def copy_in(
        self,
        staging: torch.Tensor,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        after: object,
    ) -> None:
        for target, source in self._planes.walk(staging, offset, block_pages, first, pages):
            target.copy_(source)

    def copy_out(
        self, staging: torch.Tensor, offset: int, pages: Sequence[int], after: object
    ) -> None:
        for source, target in self._planes.walk(staging, offset, len(pages), 0, pages):
            target.copy_(source)


class CudaPages:
    """Pages on a CUDA device; staging is pinned, so that copies are DMA beside the engine."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._planes = _Planes(layers)
        self._device = layers[0][0].device
        cuda: Any = torch.cuda  # its stubs are partly untyped
        self._stream = cuda.Stream(device=self._device)
        self._pinned: torch.Tensor | None = None

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return self._planes.page_bytes

    def adopt(self, staging: mmap.mmap | None) -> torch.Tensor | None:
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        if self._pinned is not None:
            runtime.cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        if staging is None:
            return None
        tensor = torch.frombuffer(staging, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            status = runtime.cudaHostRegister(
                tensor.data_ptr(), tensor.numel(), _CUDA_HOST_REGISTER_PORTABLE
            )
        if int(status) != 0:
            # Copies work from pageable memory too, only slower and with one more pass.
            _log.warning("staging could not be pinned (CUDA error %s)", int(status))
        else:
            self._pinned = tensor
        return tensor

    def mark(self) -> object:
        cuda: Any = torch.cuda
        event: object = cuda.Event()
        cuda.current_stream(self._device).record_event(event)
        return event

    def copy_in(
        self,
        staging: torch.Tensor,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        after: object,
    ) -> None:
        pairs = self._planes.walk(staging, offset, block_pages, first, pages)
        with self._ordered(after):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def copy_out(
        self, staging: torch.Tensor, offset: int, pages: Sequence[int], after: object
    ) -> None:
        pairs = self._planes.walk(staging, offset, len(pages), 0, pages)
        with self._ordered(after):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def _ordered(self, after: object) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            try:
                yield
            finally:
                # Also after an error: nothing may still be writing when pages are reported.
                self._stream.synchronize()


def pages_of(tensors: Sequence[torch.Tensor], page_count: int) -> Pages:
    """The copier for these KV tensors, one a layer; raises `Misuse` for a layout it can't copy."""
    if not tensors:
        raise Misuse("the engine has no KV tensors", field="kv_caches")
    kinds = {tensor.device.type for tensor in tensors}
    layers = [page_planes(tensor, page_count) for tensor in tensors]
    makers: dict[str, Callable[[Sequence[tuple[torch.Tensor, ...]]], Pages]] = {
        "cpu": HostPages,
        "cuda": CudaPages,
    }
    if len(kinds) != 1 or (kind := kinds.pop()) not in makers:
        raise Unavailable("KV tensors must all lie on the CPU or on one CUDA device")
    return makers[kind](layers)
