"""Rebuilding the index at start: every region is surveyed, several at once, then all are merged.

- Surveys run on the disk executor and leave columns. Merging walks them in the order of sealing:
  parents were sealed before their children, so that links them, and it is the best guess at
  recency. No list of all records is ever made.
- Of two records of one block the one that was sealed later counts, then the one written later.
- What is found is charged to its tenant before the tier is open: a cold quota table would let a
  tenant take everything, or evict everybody.
- A region that cannot be read is left out; it will be renewed before it is written again.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from storage.block import BlockAddress
from storage.header import PRIORITY_MAX, Fault
from storage.retention import Retention
from storage.tiers.catalogue import Catalogue
from storage.tiers.devices import Devices
from storage.tiers.flow import in_flight_at_most
from storage.tiers.regions import Region, RegionFiles
from storage.tiers.survey import Survey, survey
from strongroom.blocks import BlockId
from strongroom.errors import Overloaded, Unavailable
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)
_STEP = 256
"""Rows that go into the index before others may run: about a millisecond."""


@dataclass(frozen=True, slots=True)
class RecoveryProgress:
    """How far a start is: first regions are read, then blocks go into the index."""

    read_bytes: int = 0
    total_bytes: int = 0
    indexed_blocks: int = 0
    total_blocks: int = 0
    """Found so far; all of them once everything is read."""


Progress = Callable[[RecoveryProgress], None]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start has found."""

    blocks: int
    faults: Counter[Fault]
    last_sequence: int
    last_order: int
    last_region: Region | None
    """Written last and undamaged: the log may go on behind it."""

    @classmethod
    def nothing(cls) -> Recovered:
        """Before anything was looked at."""
        return cls(0, Counter(), 0, 0, None)


async def recover(
    devices: Devices, catalogue: Catalogue, depth: int, progress: Progress | None
) -> Recovered:
    """Fill an empty catalogue from the devices; returns what was found."""
    told = progress or (lambda _: None)
    surveys = await _survey_all(devices, depth, told)
    faults: Counter[Fault] = Counter()
    last_order = last_sequence = 0
    last: Region | None = None
    for region, result in surveys:
        region.generation = result.generation or region.generation
        region.tail = result.tail
        region.clean = result.is_clean
        faults += result.faults
        if len(result.found):
            region.filled = result.last_order
            last_sequence = max(last_sequence, result.last_sequence)
        if region.filled > last_order:
            last_order, last = region.filled, region
    stale = await _merge(surveys, catalogue, told)
    faults[Fault.STALE] += stale
    return Recovered(
        blocks=len(catalogue.index),
        faults=faults,
        last_sequence=last_sequence,
        last_order=last_order,
        last_region=last if last is not None and last.clean else None,
    )


async def _survey_all(devices: Devices, depth: int, told: Progress) -> list[tuple[Region, Survey]]:
    results: list[tuple[Region, Survey]] = []
    total = sum(devices.files_of(region).region_bytes for region in devices.regions)
    at = RecoveryProgress(total_bytes=total)

    async def one(region: Region) -> None:
        nonlocal at
        files = devices.files_of(region)
        made = [Survey()]
        try:
            await devices.run(region, partial(_survey_into, files, region, made), always=True)
        except (Unavailable, Overloaded) as error:
            _log.warning("region %d was not read: %s", region.number, error.message)
        devices.errors += made[-1].unreadable
        results.append((region, made[-1]))
        at = replace(
            at,
            read_bytes=at.read_bytes + files.region_bytes,
            total_blocks=at.total_blocks + len(made[-1].found),
        )
        told(at)

    await in_flight_at_most(depth, devices.regions, one)
    return results


async def _merge(surveys: list[tuple[Region, Survey]], catalogue: Catalogue, told: Progress) -> int:
    """Put all that was found into the catalogue; returns how many were stale."""
    total = sum(len(result.found) for _, result in surveys)
    at = RecoveryProgress(total_blocks=total)
    owners = [
        [(ComponentId(t.hex()), NamespaceId(n.hex())) for t, n in result.found.owners]
        for _, result in surveys
    ]
    kept = {None: Retention()} | {n: Retention(n) for n in range(PRIORITY_MAX + 1)}
    stale = done = 0
    for _, _, number, row in heapq.merge(
        *(_in_order(number, result) for number, (_, result) in enumerate(surveys))
    ):
        region, result = surveys[number]
        found = result.found
        address = BlockAddress.unpack(found.address(row))
        tenant, namespace = owners[number][found.owner(row)]
        nbytes = found.nbytes(row)
        stale += address in catalogue.index
        catalogue.shares.charge(tenant, nbytes)
        catalogue.add(
            address,
            BlockId(found.parent(row)),
            tenant,
            namespace,
            region,
            found.offset(row),
            nbytes,
            kept[found.priority(row)],
        )
        done += 1
        if done % _STEP == 0:
            told(replace(at, indexed_blocks=done))
            await asyncio.sleep(0)
    told(replace(at, indexed_blocks=done))
    return stale


def _in_order(number: int, result: Survey) -> Iterator[tuple[int, int, int, int]]:
    """Sequence, order, the survey's number and the row, rising."""
    found = result.found
    for row in found.by_sealing():
        yield found.sequences[row], found.orders[row], number, row
    found.forget()  # the index takes its place in memory, region by region


def _survey_into(files: RegionFiles, region: Region, results: list[Survey]) -> None:
    results.append(survey(files, region))
