"""What a suite of rows is, and what it is handed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.scale import Scale

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Bench:
    """One run: how much, where scratch files go, and how to say what is going on."""

    scale: Scale
    scratch: Path
    """On the file system that is to be measured."""
    say: Callable[[str], None] = lambda _: None

    def rounds(self, what: str) -> Iterator[int]:
        """The numbers of the rounds, each said as it begins."""
        for number in range(self.scale.rounds):
            self.say(f"{what}: round {number + 1} of {self.scale.rounds}")
            yield number

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """A scratch folder that is gone afterwards."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Suite:
    """Rows that are measured together, and the group of suites whose file they are written to."""

    name: str
    summary: str
    rows: tuple[str, ...]
    measure: Callable[[Bench], list[Row]]
    lacks: Callable[[], str] = lambda: ""
    """What is not installed and how to install it; empty when nothing is missing."""
    group: str = "storage"

    @property
    def file(self) -> str:
        """The name of the file that holds its rows, beside those of its group."""
        return f"{self.group}.json"
