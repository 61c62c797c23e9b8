"""SIGKILL at random points: whatever was under way, a start finds whole records alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random  # noqa: TID251 - a seeded choice of moments, no secret

import pytest

from storage.envelope import Opener
from storage.header import read_header
from storage.memory import aligned
from strongroom.errors import Corrupt
from tests.storage.nvme_support import check_balance, check_empties
from tests.storage.nvme_writer_process import REGION_BYTES, REGIONS
from tests.storage.support import KEYS, OTHER_KEYS, context, plaintext
from tests.storage.test_recovery import RECORD, opened, put

KILLS = 12


def killed_after(folder: Path, first: int, lines: int) -> list[int]:
    """Run a writer, kill it once it has said so many lines; what it said it had stored."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.nvme_writer_process", str(folder), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None
    stored: list[int] = []
    try:
        assert writer.stdout.readline() == "open\n"
        stored += [int(writer.stdout.readline().split()[1]) for _ in range(lines)]
    finally:
        writer.kill()  # SIGKILL: nothing in it has a chance to tidy up
        writer.stdout.close()
        writer.wait()
    return stored


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_each_kill_what_is_found_opens_and_no_room_is_lost(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    first = 0
    found_any = 0
    for _ in range(KILLS // 2):
        stored = killed_after(tmp_path, first, random.randrange(1, 120))
        async with opened(tmp_path, regions=REGIONS, region=REGION_BYTES) as tier:
            check_balance(tier)
            statistics = tier.statistics()
            assert statistics.used_bytes <= (REGIONS * REGION_BYTES) - 4096 * REGIONS
            assert statistics.corrupt == statistics.foreign == statistics.future == 0
            rows = list(tier._index.rows())
            found = [int.from_bytes(row.resident.address.block, "big") for row in rows]
            # The first of each batch was dropped again; the writer may have gone on since.
            assert max(found) >= stored[-1] - 1, "what was stored just before the kill is there"
            first = max(found) + 100
            found_any += len(found)
            for number in found:
                wanted = context(number, room=number)
                async with tier.hold(wanted.address) as record:
                    opener = Opener.begin(read_header(record), wanted, KEYS.data)
                    out = aligned(wanted.plaintext_bytes)[: wanted.plaintext_bytes]
                    opener.segments(range(len(wanted.segment_bytes)), record, out)
                    assert out == plaintext(wanted)
                    with pytest.raises(Corrupt):
                        Opener.begin(read_header(record), wanted, OTHER_KEYS.data)
    assert found_any > 50
    async with opened(tmp_path, regions=REGIONS, region=REGION_BYTES) as tier:
        check_empties(tier)
        for number in range(60):
            await put(tier, context(10_000 + number, room=number), sequence=10**6 + number)
        check_balance(tier)
        assert tier.statistics().used_bytes >= 20 * RECORD
