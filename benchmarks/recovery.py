"""Recovery: a store opened on one million small records, in seconds and in bytes a block.

The set is made once and stays for the rounds; what an opening adds to the folder (a checkpoint)
is removed before the next one, so that each round rebuilds the index from record headers. With a
smaller scale, seconds are stated as if for a million.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import fio
from benchmarks.lookup import environment
from benchmarks.rows import Row, absolute
from benchmarks.small_records import Made, make
from benchmarks.suite import ROOT, Bench, Suite
from strongroom.identity import ComponentId, NamespaceId

MILLION = 1_000_000
ROUNDS_MAX = 3


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    scale = bench.scale
    seconds: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []
    objects = 0.0
    key_bytes = _key_bytes(min(scale.records, 200_000))
    with bench.folder("recovery") as folder:
        made = make(
            folder / "records",
            scale.records,
            ComponentId("1" * 32),
            NamespaceId("2" * 64),
            lambda done: bench.say(f"recovery: {done} of {scale.records} records made"),
        )
        kept = {path.name for path in made.folder.iterdir()}
        per_million = MILLION / scale.records
        read_s = _read_pages_s(folder, made) * per_million
        for _ in zip(range(ROUNDS_MAX), bench.rounds("recovery"), strict=False):
            for path in made.folder.iterdir():
                if path.name not in kept | {"lock"}:
                    path.unlink()
            found = _open(made)
            if found["blocks"] != scale.records:
                raise AssertionError(f"{found['blocks']} of {scale.records} records recovered")
            seconds.append((found["seconds"] * per_million, read_s))
            memory.append((found["memory_bytes"] / scale.records, key_bytes))
            objects = found["objects"] / scale.records
    return [
        absolute(
            "recovery_1m_s",
            "s",
            seconds,
            note=f"{scale.records} records of 8 KiB; reference: their bytes read once, O_DIRECT",
        ),
        absolute(
            "recovery_1m_block_bytes",
            "B",
            memory,
            note=f"{objects:.3f} objects a block for the garbage collector; reference: a dict of "
            "36-byte ids",
        ),
    ]


def _open(made: Made) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.recovery_process",
        str(made.folder), str(made.nvme_bytes),
    ]  # fmt: skip
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env=environment(), cwd=ROOT, text=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _read_pages_s(folder: Path, made: Made) -> float:
    """Seconds to read as many bytes as the records have, in large blocks, four in flight."""
    sample = min(made.nbytes, 512 * 1024 * 1024)
    with fio.laid_out(folder, sample, 1024 * 1024) as file:
        return made.nbytes / 1e9 / file.read(4).gbytes_per_s


def _key_bytes(count: int) -> float:
    """Bytes an entry of a plain dict from 36-byte ids to numbers."""
    entries = {number.to_bytes(36, "big"): number for number in range(count)}
    key, value = next(iter(entries.items()))
    return sys.getsizeof(entries) / count + sys.getsizeof(key) + sys.getsizeof(value)


SUITE = Suite(
    name="recovery",
    summary="the index rebuilt from a million record headers",
    rows=("recovery_1m_s", "recovery_1m_block_bytes"),
    measure=measure,
)
