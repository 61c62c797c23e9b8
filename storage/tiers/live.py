"""What lives in a region, read from the region itself.

Memory holds nothing for a block but its row in the index, so which blocks a region holds is told
by its file. What the file does not tell any more is dropped; so is all of a region that cannot
be read: it would be chosen again with every write otherwise, for ever.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from storage.block import BlockAddress
from storage.lifecycle import Place
from storage.tiers.catalogue import Catalogue
from storage.tiers.devices import Devices
from storage.tiers.flow import Pace
from storage.tiers.regions import Region, RegionFiles
from storage.tiers.survey import Survey, survey
from strongroom.errors import Overloaded, Unavailable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Live:
    """A record that lives in the region that is being emptied."""

    address: BlockAddress
    place: Place
    offset: int
    priority: int | None


async def live_in(region: Region, catalogue: Catalogue, devices: Devices) -> list[Live]:
    """The records that live in a region, by their offset. Under the tier's writing lock."""
    made: list[Survey] = []
    job = partial(_survey_into, devices.files_of(region), region, made)
    try:
        await devices.run(region, job, always=True)
    except (Overloaded, Unavailable) as error:
        _log.warning("region %d is given up: %s", region.number, error.message)
        region.failures += 1
        await catalogue.forget_region(region, ())
        return []
    devices.errors += made[0].unreadable
    found = made[0].found
    live: list[Live] = []
    pace = Pace()
    for number in range(len(found)):
        address = BlockAddress.unpack(found.address(number))
        place = catalogue.place(region, found.offset(number), found.nbytes(number))
        if catalogue.is_at(address, place):
            live.append(Live(address, place, found.offset(number), found.priority(number)))
        await pace.keep()
    told = {one.address for one in live}
    if len(told) < region.live:
        await catalogue.forget_region(region, told)
    return live


def _survey_into(files: RegionFiles, region: Region, results: list[Survey]) -> None:
    results.append(survey(files, region, region.tail, region.generation))
