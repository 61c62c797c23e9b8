"""Drives LMCache's storage layers, told what to do by JSON lines on standard input.

Run by the peer's own interpreter (`make peers`). One answer line a command, on the descriptor
given as the first argument; what the peer prints itself goes to standard output and error.

The two layers: LocalCPU, plaintext in host memory, where a get is followed by one copy out into
memory of the set's length; and `fs_native` with AES-256-GCM, a file a block.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
)
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import create_serde_processor
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

GIB = 1024**3
SUBMIT = 8
"""Blocks a submit of the disk layer, like one prefix."""


class HostLayer:
    """LMCache LocalCPU."""

    def __init__(self, size: int, count: int) -> None:
        gib = max(1.0, 1.5 * size * count / GIB)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=True,
            max_local_cpu_size=gib,
            lmcache_instance_id="bench",
        )
        metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(32, 2, 256, 8, 128),
        )
        self._size = size
        self._count = count
        self._cpu = LocalCPUBackend(
            config,
            metadata=metadata,
            dst_device="cpu",
            memory_allocator=MixedMemoryAllocator(int(gib * GIB)),
        )
        self._source = noise(size * count)
        self._target = torch.zeros(size * count, dtype=torch.uint8)

    def put(self) -> dict[str, Any]:
        began = time.perf_counter()
        for number, source in enumerate(chunks(self._source, self._size)):
            shape = torch.Size([2, 1, self._size // 1024, 512])
            held = self._cpu.allocate(shape, torch.uint8, MemoryFormat.KV_2LTD)
            if held is None:
                raise MemoryError("LMCache has no room")
            held.tensor.view(-1).copy_(source)
            self._cpu.submit_put_task(self._key(number), held)
            held.ref_count_down()
        return {"seconds": time.perf_counter() - began}

    def get(self, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self._target.zero_()
        began = time.perf_counter()
        for number, target in enumerate(chunks(self._target, self._size)):
            held = self._cpu.get_blocking(self._key(number))
            target.copy_(held.tensor.view(-1))
            held.ref_count_down()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "verified": torch.equal(self._target, self._source)}

    @staticmethod
    def _key(number: int) -> Any:
        return CacheEngineKey("m", 1, 0, number + 1, torch.uint8)


class DiskLayer:
    """LMCache `fs_native` under its AES-256-GCM wrapper."""

    def __init__(self, size: int, count: int, folder: str, workers: int) -> None:
        self._folder = Path(folder)
        blocks = self._folder / "blocks"
        blocks.mkdir(parents=True)
        key = self._folder / "master.key"
        key.write_bytes(os.urandom(32))
        serde = {
            "type": "aesgcm",
            "master_key_path": str(key),
            "aes_bits": 256,
            "max_workers": workers,
        }
        spec = {
            "type": "fs_native",
            "base_path": str(blocks),
            "num_workers": workers,
            "serde": serde,
        }
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
        adapter = parsed.adapters[0]
        memory = L1MemoryManagerConfig(
            size_in_bytes=int(max(GIB, 3 * size * count)), use_lazy=False, shm_name=""
        )
        self._l1 = L1Manager(L1ManagerConfig(memory_config=memory, eviction=EvictionConfig("noop")))
        self._adapter = SerdeL2AdapterWrapper(
            inner=create_l2_adapter(adapter, self._l1.get_l1_memory_desc()),
            serde=create_serde_processor(adapter.serde_config),
            l1_manager=self._l1,
        )
        self._size = size
        self._count = count
        self._layout = MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
        self._source = noise(size * count)
        self._target = torch.zeros(size * count, dtype=torch.uint8)

    def store(self) -> dict[str, Any]:
        parts = chunks(self._source, self._size)
        began = time.perf_counter()
        for numbers in self._submits():
            with self._reserved(numbers) as (keys, held):
                for number, place in zip(numbers, held, strict=True):
                    place.tensor.view(-1).copy_(parts[number])
                task = self._adapter.submit_store_task(keys, held)
                done: dict[Any, Any] = {}
                while task not in done:
                    if not wait_eventfd(self._adapter.get_store_event_fd(), 120):
                        raise TimeoutError("LMCache did not store")
                    done.update(self._adapter.pop_completed_store_tasks())
                if not done[task].is_successful():
                    raise OSError(str(done[task]))
        return {"seconds": time.perf_counter() - began}

    def load(self, *, cold: bool) -> dict[str, Any]:
        # With more, the copying threads take the cores from its decrypting ones: it is slower.
        torch.set_num_threads(1)
        dropped = self.forget() if cold else False
        targets = chunks(self._target, self._size)
        self._target.zero_()
        began = time.perf_counter()
        for numbers in self._submits():
            with self._reserved(numbers) as (keys, held):
                task = self._adapter.submit_load_task(keys, held)
                found = None
                while found is None:
                    if not wait_eventfd(self._adapter.get_load_event_fd(), 120):
                        raise TimeoutError("LMCache did not load")
                    found = self._adapter.query_load_result(task)
                if found.popcount() != len(keys):
                    raise LookupError("LMCache missed what it had stored")
                for number, place in zip(numbers, held, strict=True):
                    targets[number].copy_(place.tensor.view(-1))
        seconds = time.perf_counter() - began
        verified = torch.equal(self._target, self._source)
        return {"seconds": seconds, "verified": verified, "dropped": dropped}

    def forget(self) -> bool:
        """Sync, and drop the blocks' pages from the page cache; whether all of it was dropped."""
        os.sync()
        for path in self._folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        except OSError:
            return False
        return True

    def _submits(self) -> Iterator[range]:
        for first in range(0, self._count, SUBMIT):
            yield range(first, min(first + SUBMIT, self._count))

    def _reserved(self, numbers: range) -> _Reserved:
        return _Reserved(self._l1, self._layout, numbers)


class _Reserved:
    """Room in the peer's host memory while its disk layer reads or writes it."""

    def __init__(self, l1: Any, layout: Any, numbers: range) -> None:
        self._l1 = l1
        self._layout = layout
        self._keys = [
            ObjectKey(
                chunk_hash=number.to_bytes(16, "big"),
                model_name="m",
                kv_rank=0,
                cache_salt="tenant-a",
            )
            for number in numbers
        ]

    def __enter__(self) -> tuple[list[Any], list[Any]]:
        got = self._l1.reserve_write(self._keys, [True] * len(self._keys), self._layout, "bench")
        return self._keys, [got[key][1] for key in self._keys]

    def __exit__(self, *_: object) -> None:
        self._l1.finish_write(self._keys, tag="bench")
        self._l1.delete(self._keys, force=True)


def chunks(whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Views of `size` bytes each."""
    return [whole[at : at + size] for at in range(0, len(whole), size)]


def noise(nbytes: int) -> torch.Tensor:
    """Bytes that nobody can compress, the same every time."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def main() -> None:
    """Answer commands until standard input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    layers: dict[str, Any] = {}

    def host(size: int, count: int) -> dict[str, Any]:
        layers["host"] = HostLayer(size, count)
        return dict(layers["host"].put())

    def disk(size: int, count: int, folder: str, workers: int) -> dict[str, Any]:
        layers["disk"] = DiskLayer(size, count, folder, workers)
        return dict(layers["disk"].store())

    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "host": host,
        "host_get": lambda threads: dict(layers["host"].get(threads)),
        "disk": disk,
        "disk_load": lambda cold: dict(layers["disk"].load(cold=cold)),
    }
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = commands[command.pop("do")](**command)
        except Exception as error:  # noqa: BLE001 - told to the other side, which decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # LMCache's own threads outlive main


if __name__ == "__main__":
    main()
