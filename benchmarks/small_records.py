"""A region directory full of small records, written fast by the production header code.

The records are whole and valid but for their ciphertext, which is zeros: recovery reads headers
and tails, and an index entry is an index entry. They form chains of 128 blocks.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.block import BlockContext
from storage.header import (
    HEADER_BYTES,
    Header,
    Placement,
    record_bytes,
    write_frame,
    write_placement,
)
from storage.memory import aligned
from storage.tiers.manifest import open_manifest
from storage.tiers.regions import REGION_HEADER_BYTES, RegionFiles
from strongroom.blocks import ROOT_PARENT, BlockId
from strongroom.identity import ComponentId, NamespaceId

SEGMENT_BYTES: Final = (2048,)
RECORD_BYTES: Final = record_bytes(SEGMENT_BYTES)
REGION_BYTES: Final = 64 * 1024 * 1024
RECORDS_A_REGION: Final = (REGION_BYTES - REGION_HEADER_BYTES) // RECORD_BYTES
_BATCH: Final = 256
_CHAIN: Final = 128


@dataclass(frozen=True, slots=True)
class Made:
    """What lies in a folder."""

    folder: Path
    records: int

    @property
    def nvme_bytes(self) -> int:
        """The tier's size that opens every region file."""
        return regions_for(self.records) * REGION_BYTES

    @property
    def nbytes(self) -> int:
        return self.records * RECORD_BYTES


def regions_for(records: int) -> int:
    """Region files for so many records, with two blank ones."""
    return -(-records // RECORDS_A_REGION) + 2


def make(
    folder: Path,
    records: int,
    tenant: ComponentId,
    namespace: NamespaceId,
    progress: Callable[[int], None] = lambda _: None,
) -> Made:
    """Write `records` records of one namespace into a fresh region directory."""
    folder.mkdir(mode=0o700, parents=True)
    manifest = asyncio.run(open_manifest(folder, REGION_BYTES))
    files = RegionFiles(folder, manifest.store, REGION_BYTES, regions_for(records))
    try:
        done = 0
        for region in files.regions:
            if done >= records:
                break
            files.renew(region)
            wanted = min(RECORDS_A_REGION, records - done)
            for first in range(0, wanted, _BATCH):
                count = min(_BATCH, wanted - first)
                batch = aligned(count * RECORD_BYTES)
                at = REGION_HEADER_BYTES + first * RECORD_BYTES
                for index in range(count):
                    number = done + first + index + 1
                    record = batch[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
                    write_frame(record, _header(number, tenant, namespace))
                    write_placement(
                        record[:HEADER_BYTES],
                        Placement(
                            manifest.store,
                            region.number,
                            region.generation,
                            at + index * RECORD_BYTES,
                            number,
                        ),
                    )
                files.write(region, at, [batch])
            done += wanted
            progress(done)
        for region in files.regions:
            os.fdatasync(region.fd)
    finally:
        files.close()
    return Made(folder, records)


def _header(number: int, tenant: ComponentId, namespace: NamespaceId) -> Header:
    first = (number - 1) % _CHAIN == 0
    context = BlockContext(
        tenant=tenant,
        namespace=namespace,
        block=_block(number),
        parent=ROOT_PARENT if first else _block(number - 1),
        position=(number - 1) % _CHAIN * 256,
        tokens=256,
        format_digest=bytes(32),
        layout_digest=bytes(32),
        rank=0,
        segment_bytes=SEGMENT_BYTES,
    )
    return Header(context, salt=bytes(16), commitment=bytes(32), sequence=number)


def _block(number: int) -> BlockId:
    return BlockId(struct.pack(">Q", number * 0x9E3779B97F4A7C15 % 2**64) + bytes(24))
