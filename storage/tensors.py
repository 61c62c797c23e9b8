"""Staging as torch tensors, and copies between staging and a device.

The only file of this package that imports torch; nothing else here needs it. Tensors are views
of staging's bytes (`torch.frombuffer`): nothing is unpickled and nothing is copied on the way.

On a CUDA device staging is page-locked in place with `cudaHostRegister` and copies run on a
stream of their own, ordered by events: `before` is an event of the caller's stream that a copy
waits for, `wait` makes the host wait for every copy so far. On the CPU the same calls copy at
once, and waiting is free.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from strongroom.errors import Misuse, Unavailable


def tensor_of(
    staging: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """The bytes of `staging` from `offset` on as a tensor that shares them.

    Raises `Misuse` when the tensor would go beyond staging or begin off its element size. The
    tensor keeps the mapping alive: drop it before staging is closed.
    """
    count = 1
    for size in shape:
        count *= size
    nbytes = count * dtype.itemsize
    if count <= 0 or offset < 0 or offset + nbytes > len(staging):
        raise Misuse("the tensor goes beyond staging", field="shape", limit=len(staging))
    if offset % dtype.itemsize:
        raise Misuse("the offset splits an element", field="offset", limit=dtype.itemsize)
    return torch.frombuffer(staging, dtype=dtype, count=count, offset=offset).view(shape)


class DeviceCopies:
    """Copies between one staging mapping and one device. Use as a context manager.

    Raises `Unavailable` when the device is not there or staging cannot be page-locked.
    """

    def __init__(self, staging: memoryview, device: torch.device) -> None:
        self._bytes = torch.frombuffer(staging, dtype=torch.uint8)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._registered = False

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            if not torch.cuda.is_available():
                raise Unavailable("there is no CUDA device here", field="device")
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._register()
        elif self._device.type != "cpu":
            raise Misuse("copies go to cpu or cuda", field="device")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()
        if self._registered:
            _check(_cudart().cudaHostUnregister(self._bytes.data_ptr()))
            self._registered = False

    def to_device(
        self, offset: int, target: torch.Tensor, before: torch.cuda.Event | None = None
    ) -> None:
        """Copy staging's bytes from `offset` on into `target` (contiguous, on the device)."""
        self._copy(target, self._view(offset, target), before)

    def from_device(
        self, source: torch.Tensor, offset: int, before: torch.cuda.Event | None = None
    ) -> None:
        """Copy `source` (contiguous, on the device) into staging at `offset`."""
        self._copy(self._view(offset, source), source, before)

    def wait(self) -> None:
        """Return when every copy so far is done, and staging may be released."""
        if self._stream is not None:
            self._stream.synchronize()

    def _view(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        if not like.is_contiguous():
            raise Misuse("copies are of contiguous tensors", field="tensor")
        nbytes = like.numel() * like.element_size()
        if offset < 0 or offset + nbytes > self._bytes.numel():
            raise Misuse(
                "the tensor goes beyond staging", field="offset", limit=self._bytes.numel()
            )
        return self._bytes[offset : offset + nbytes]

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, before: torch.cuda.Event | None
    ) -> None:
        to = target.reshape(-1).view(torch.uint8)
        of = source.reshape(-1).view(torch.uint8)
        if self._stream is None:
            to.copy_(of)
            return
        if before is not None:
            self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
        # The allocator may not hand the device memory to another stream meanwhile.
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def _register(self) -> None:
        with torch.cuda.device(self._device):
            _check(_cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        self._registered = True


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: object) -> None:
    """cudart returns a `cudaError`; zero is success."""
    if int(getattr(result, "value", result)) != 0:  # type: ignore[call-overload]
        raise Unavailable(f"staging cannot be page-locked for the device: {result}")
