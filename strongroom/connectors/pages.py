"""Copies between the engine's pages and staging. Whole pages, byte for byte.

A layer's KV tensor is taken as one or two planes of rows, one row a page: the page's bytes in
the order in which they lie in memory. A page whose bytes do not lie together is refused, since
its order could not be named. In staging a block of n pages lies layer after layer, in a layer
plane after plane, in a plane page after page: the layout of a `Part`.

Copies run on the IO thread, never on the engine's, and are done when the call returns.
- On a CPU they are memory moves without a call into torch: each such call gives the
  interpreter's lock away, and an engine that is busy gives it back 5 ms later, once a layer.
- On a CUDA device they run on a stream of their own, after the event that `mark` recorded on
  the engine's stream, from and to pinned staging.
"""

from __future__ import annotations

import contextlib
import ctypes
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

    def adopt(self, staging: mmap.mmap | None) -> None:
        """Use this staging from now on; None gives the last one back."""

    def mark(self) -> object:
        """A point in the engine's work, on the engine's thread; copies wait for it."""

    def copy_in(
        self,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        after: object,
        layers: range | None = None,
    ) -> None:
        """Pages `first`.. of the block of `block_pages` pages at `offset`, into `pages`.

        `layers` are neighbours; None is all of them.
        """

    def copy_out(self, offset: int, pages: Sequence[int], after: object) -> None:
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


class HostPages:
    """Pages in the host's memory."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._keep = tuple(layers)  # the views below do not own the memory
        self._layers = tuple(tuple(_HostPlane(plane) for plane in layer) for layer in layers)
        self._staging: memoryview | None = None

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return _page_bytes(self._keep)

    def adopt(self, staging: mmap.mmap | None) -> None:
        self._staging = None if staging is None else memoryview(staging)

    def mark(self) -> object:
        return None

    def copy_in(
        self,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        after: object,
        layers: range | None = None,
    ) -> None:
        staging = self._mapped()
        for plane, start in self._walk(offset, block_pages, layers):
            for target, index, size in plane.pieces(pages):
                source = start + (first * plane.width) + index
                plane.memory[target : target + size] = staging[source : source + size]

    def copy_out(self, offset: int, pages: Sequence[int], after: object) -> None:
        staging = self._mapped()
        for plane, start in self._walk(offset, len(pages)):
            for source, index, size in plane.pieces(pages):
                target = start + index
                staging[target : target + size] = plane.memory[source : source + size]

    def _walk(
        self, offset: int, block_pages: int, layers: range | None = None
    ) -> Iterator[tuple[_HostPlane, int]]:
        for number, layer in enumerate(self._layers):
            for plane in layer:
                if layers is None or number in layers:
                    yield plane, offset
                offset += block_pages * plane.width

    def _mapped(self) -> memoryview:
        if self._staging is None:
            raise Unavailable("there is no staging")
        return self._staging


class _HostPlane:
    """One plane's memory; `pieces` cuts page ids into moves of contiguous bytes."""

    def __init__(self, plane: torch.Tensor) -> None:
        self.width = plane.shape[1]
        self._stride = plane.stride(0)
        size = (plane.shape[0] - 1) * self._stride + self.width
        array = (ctypes.c_uint8 * size).from_address(plane.data_ptr())
        self.memory = memoryview(array).cast("B")

    def pieces(self, pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(offset in the plane, offset among `pages` packed together, bytes)."""
        if self._stride == self.width:
            for index, page, count in runs(pages):
                yield page * self.width, index * self.width, count * self.width
        else:
            for index, page in enumerate(pages):
                yield page * self._stride, index * self.width, self.width


class CudaPages:
    """Pages on a CUDA device; staging is pinned, so that copies are DMA beside the engine."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._layers = tuple(layers)
        self._device = layers[0][0].device
        cuda: Any = torch.cuda  # its stubs are partly untyped
        self._stream = cuda.Stream(device=self._device)
        self._staging: torch.Tensor | None = None
        self._pinned = False

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return _page_bytes(self._layers)

    def adopt(self, staging: mmap.mmap | None) -> None:
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        if self._staging is not None and self._pinned:
            runtime.cudaHostUnregister(self._staging.data_ptr())
        self._staging, self._pinned = None, False
        if staging is None:
            return
        tensor = torch.frombuffer(staging, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            status = runtime.cudaHostRegister(
                tensor.data_ptr(), tensor.numel(), _CUDA_HOST_REGISTER_PORTABLE
            )
        self._staging, self._pinned = tensor, int(status) == 0
        if not self._pinned:
            # Copies work from pageable memory too, only slower and with one more pass.
            _log.warning("staging could not be pinned (CUDA error %s)", int(status))

    def mark(self) -> object:
        cuda: Any = torch.cuda
        event: object = cuda.Event()
        cuda.current_stream(self._device).record_event(event)
        return event

    def copy_in(
        self,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        after: object,
        layers: range | None = None,
    ) -> None:
        with self._ordered(after):
            for rows, staged in self._walk(offset, block_pages, first, pages, layers):
                rows.copy_(staged, non_blocking=True)

    def copy_out(self, offset: int, pages: Sequence[int], after: object) -> None:
        with self._ordered(after):
            for rows, staged in self._walk(offset, len(pages), 0, pages):
                staged.copy_(rows, non_blocking=True)

    def _walk(
        self,
        offset: int,
        block_pages: int,
        first: int,
        pages: Sequence[int],
        layers: range | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (rows of the engine, rows of staging) that correspond."""
        if self._staging is None:
            raise Unavailable("there is no staging")
        pieces = list(runs(pages))
        for number, layer in enumerate(self._layers):
            for plane in layer:
                width = plane.shape[1]
                at, offset = offset, offset + block_pages * width
                if layers is not None and number not in layers:
                    continue
                block = self._staging.narrow(0, at, block_pages * width).view(block_pages, width)
                for index, page, count in pieces:
                    yield plane.narrow(0, page, count), block.narrow(0, first + index, count)

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


def _page_bytes(layers: Sequence[tuple[torch.Tensor, ...]]) -> tuple[int, ...]:
    return tuple(sum(plane.shape[1] for plane in layer) for layer in layers)


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
