"""Saving and restoring blocks, against a bare loop of `encrypt_into` / `decrypt_into`.

The set is larger than the caches. Both sides use the same segments and the same buffers'
sizes; the bare side is one thread, so a ratio above 1 says that several threads were used.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from storage.block import BlockContext
from storage.compose import MIB, StoreSettings, open_store
from storage.fence import Fence
from strongroom.blocks import BlockId
from strongroom.derivation import namespace_keys
from strongroom.identity import ComponentId, NamespaceId

SEGMENT_BYTES = 384 * 1024
SEGMENTS = 30
BLOCKS = 24
_TAG_BYTES = 16

Pairs = list[tuple[float, float]]


def _context(number: int) -> BlockContext:
    return BlockContext(
        tenant=ComponentId("1" * 32),
        namespace=NamespaceId("2" * 64),
        block=BlockId(number.to_bytes(32, "big")),
        parent=BlockId(max(0, number - 1).to_bytes(32, "big")),
        position=(number - 1) * 256,
        tokens=256,
        format_digest=bytes(32),
        layout_digest=bytes(32),
        rank=0,
        segment_bytes=(SEGMENT_BYTES,) * SEGMENTS,
    )


def _bare(plain: memoryview, sealed: memoryview) -> tuple[float, float]:
    """GB/s of bare encryption and decryption of one block's segments, over the whole set."""
    cipher = AESGCM(secrets.token_bytes(32))
    block = SEGMENT_BYTES * SEGMENTS
    started = time.perf_counter()
    for number in range(BLOCKS):
        for index in range(SEGMENTS):
            at = number * block + index * SEGMENT_BYTES
            to = (number * SEGMENTS + index) * (SEGMENT_BYTES + _TAG_BYTES)
            cipher.encrypt_into(
                (number * SEGMENTS + index).to_bytes(12, "big"),
                plain[at : at + SEGMENT_BYTES],
                b"",
                sealed[to : to + SEGMENT_BYTES + _TAG_BYTES],
            )
    encrypted = time.perf_counter()
    for number in range(BLOCKS):
        for index in range(SEGMENTS):
            at = number * block + index * SEGMENT_BYTES
            to = (number * SEGMENTS + index) * (SEGMENT_BYTES + _TAG_BYTES)
            cipher.decrypt_into(
                (number * SEGMENTS + index).to_bytes(12, "big"),
                sealed[to : to + SEGMENT_BYTES + _TAG_BYTES],
                b"",
                plain[at : at + SEGMENT_BYTES],
            )
    decrypted = time.perf_counter()
    total = BLOCKS * block / 1e9
    return total / (encrypted - started), total / (decrypted - encrypted)


async def measure(rounds: int) -> dict[str, tuple[str, Pairs]]:
    """Rounds of ours and bare, in turn."""
    block = SEGMENT_BYTES * SEGMENTS
    plain = memoryview(bytearray(secrets.token_bytes(block) * BLOCKS))
    sealed = memoryview(bytearray(BLOCKS * SEGMENTS * (SEGMENT_BYTES + _TAG_BYTES)))
    saves: Pairs = []
    loads: Pairs = []
    disk: Pairs = []
    keys = namespace_keys(secrets.token_bytes(32), bytes(32))
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="strongroom-bench-", dir=Path.cwd() / "build"))
        settings = StoreSettings(
            host_bytes=2 * BLOCKS * (block + MIB),
            nvme_path=folder / "nvme",
            nvme_bytes=1024 * MIB,
            region_bytes=128 * MIB,
        )
        total = BLOCKS * block / 1e9
        async with open_store(settings) as store:
            started = time.perf_counter()
            for number in range(BLOCKS):
                part = plain[number * block : (number + 1) * block]
                await store.save(_context(number + 1), keys, part, Fence())
            saved = total / (time.perf_counter() - started)
            await store.flush()
            started = time.perf_counter()
            for number in range(BLOCKS):
                part = plain[number * block : (number + 1) * block]
                await store.load(_context(number + 1), keys, part, Fence())
            loaded = total / (time.perf_counter() - started)
        async with open_store(settings) as store:
            started = time.perf_counter()
            for number in range(BLOCKS):
                part = plain[number * block : (number + 1) * block]
                await store.load(_context(number + 1), keys, part, Fence())
            restored = total / (time.perf_counter() - started)
        shutil.rmtree(folder)
        encrypts, decrypts = _bare(plain, sealed)
        saves.append((saved, encrypts))
        loads.append((loaded, decrypts))
        disk.append((restored, decrypts))
    return {
        "host_save_vs_gcm": ("GB/s", saves),
        "host_restore_vs_gcm": ("GB/s", loads),
        "nvme_restore_vs_gcm": ("GB/s", disk),
    }
