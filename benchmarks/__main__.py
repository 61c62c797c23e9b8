"""`python -m benchmarks`: run every benchmark and write `storage.json`.

A row has `name`, `value` (the ratio), `unit`, `ours` and `reference` (GB/s or microseconds,
medians), and the spread of the ratio over the rounds. Absolute figures move with the machine;
quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import blocks, lookup


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `low` and `high`: the smallest and largest ratio of the rounds."""

    name: str
    value: float
    unit: str
    ours: float
    reference: float
    low: float
    high: float


def row(name: str, unit: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Fold rounds of (ours, reference), taken in turn, into one row."""
    ratios = sorted(ours / reference for ours, reference in pairs)
    return Row(
        name=name,
        value=round(statistics.median(ratios), 3),
        unit=unit,
        ours=round(statistics.median(ours for ours, _ in pairs), 3),
        reference=round(statistics.median(reference for _, reference in pairs), 3),
        low=round(ratios[0], 3),
        high=round(ratios[-1], 3),
    )


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    console = Console()
    measured: dict[str, tuple[str, list[tuple[float, float]]]] = {}
    with console.status("host and NVMe tiers against bare AES-256-GCM ..."):
        measured |= asyncio.run(blocks.measure(options.rounds))
    with console.status("hashing and matching a chain ..."):
        measured |= lookup.measure(options.rounds)
    rows = [row(name, unit, pairs) for name, (unit, pairs) in measured.items()]
    table = Table("name", "ratio", "spread", "ours", "reference", "unit")
    for each in rows:
        table.add_row(
            each.name,
            f"{each.value:.2f}",
            f"{each.low:.2f} to {each.high:.2f}",
            f"{each.ours:.2f}",
            f"{each.reference:.2f}",
            each.unit,
        )
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "storage.json"
    path.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
