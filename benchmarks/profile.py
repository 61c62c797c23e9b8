"""`python -m benchmarks.profile`: where the time of save, restore and lookup goes, by py-spy.

For each path one flame graph (`profile-PATH.svg`) and the folded stacks behind it
(`profile-PATH.txt`), and a table: the share of busy time inside AES-GCM, inside reads and writes,
and outside both, with the places where the rest is spent. `make profile` installs py-spy.

A sample counts where its innermost Python line is: inside AES-GCM when that line calls
`encrypt_into` or `decrypt_into`, inside I/O when it calls `preadv` or `pwritev` or syncs. A loop
that waits for events is not told from one that works by py-spy, so how much of a core the event
loop took is read from the kernel, and printed beside.
"""

from __future__ import annotations

import argparse
import linecache
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.lookup import Party, environment, sidecar
from benchmarks.profile_target import TARGETS
from benchmarks.suite import ROOT

CRYPTO: Final = ("encrypt_into", "decrypt_into")
IO: Final = ("preadv", "pwritev", "fdatasync", "fsync")
WAITING: Final = (
    "queue.get(", ".wait(", ".acquire(", "select.select(", "run_until_complete("
)  # fmt: skip
"""Calls of threads that wait for work: py-spy takes some of them for busy."""
RATE: Final = 250
LOOKUP: Final = "lookup"
PATHS: Final = (*TARGETS, LOOKUP)
RESIDENT: Final = 10_000
"""Small blocks that are resident while lookups are profiled."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the busy samples. `rest` names where what is neither AES-GCM nor I/O is spent."""

    samples: int
    crypto: float
    io: float
    rest: Sequence[tuple[str, float]]
    cores: tuple[float, float] = (0.0, 0.0)
    """Cores that the event loop's thread and all others took, by the kernel's account."""

    @property
    def outside(self) -> float:
        return 1.0 - self.crypto - self.io


def shares(folded: Iterable[str]) -> Shares:
    """Count folded stacks, one `frame;frame;... count` a line."""
    kinds: Counter[str] = Counter()
    rest: Counter[str] = Counter()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        kind = _kind(frames[-1])
        if kind == "waiting":
            continue
        kinds[kind] += int(count)
        if kind == "rest":
            rest[frames[-1]] += int(count)
    total = sum(kinds.values()) or 1
    return Shares(
        samples=sum(kinds.values()),
        crypto=kinds["crypto"] / total,
        io=kinds["io"] / total,
        rest=[(frame, count / total) for frame, count in rest.most_common(12)],
    )


def _kind(frame: str) -> str:
    """Of a frame `name (file:line)`."""
    place = frame.rpartition(" (")[2].rstrip(")")
    file, _, number = place.rpartition(":")
    if not number.isdigit():
        return "rest"
    text = linecache.getline(str(_found(file)), int(number))
    for kind, calls in (("crypto", CRYPTO), ("io", IO), ("waiting", WAITING)):
        if any(call in text for call in calls):
            return kind
    return "rest"


def _found(file: str) -> Path:
    """py-spy shortens a path to what `sys.path` does not say."""
    places = [Path(file), ROOT / file, *(Path(folder) / file for folder in sys.path)]
    return next((place for place in places if place.is_file()), Path(file))


def record(py_spy: Path, what: str, seconds: float, out: Path) -> Shares:
    """Profile one path, for the picture and for the stacks that are counted."""
    stacks = out / f"profile-{what}.txt"
    with (
        tempfile.TemporaryDirectory(prefix="profile-", dir=out) as name,
        (_looking_up if what == LOOKUP else _moving)(what, Path(name)) as pid,
    ):
        before, began = _cpu_s(pid), time.monotonic()
        for form, path in (("raw", stacks), ("flamegraph", out / f"profile-{what}.svg")):
            _attach(py_spy, pid, seconds, form, path)
        after, passed = _cpu_s(pid), time.monotonic() - began
    spent = ((after[0] - before[0]) / passed, (after[1] - before[1]) / passed)
    return replace(shares(stacks.read_text().splitlines()), cores=spent)


@contextmanager
def _moving(what: str, folder: Path) -> Iterator[int]:
    """A process that saves or restores while the context lasts; its id."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.profile_target", what, str(folder)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as target:
        assert target.stdin is not None
        assert target.stdout is not None
        try:
            if target.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{what} did not come up")
            yield target.pid
        finally:
            target.stdin.close()
            target.wait(60)


@contextmanager
def _looking_up(_: str, folder: Path) -> Iterator[int]:
    """A sidecar that is asked without pause while the context lasts; its id."""
    with sidecar(folder / "s", RESIDENT) as talk, ExitStack() as stack:
        party = Party.join(talk, stack)
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                party.sample(50)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield talk.pid
        finally:
            over.set()
            asking.join()


def _cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of a process's first thread, where the loop runs, and of its others."""
    spent = {
        task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    loop = spent.pop(str(pid))
    return loop, sum(spent.values())


def _attach(py_spy: Path, pid: int, seconds: float, form: str, path: Path) -> None:
    """Without stopping the process at each sample: that would be most of what is seen."""
    command = [
        str(py_spy), "record", "--pid", str(pid), "--duration", str(max(1, round(seconds))),
        "--rate", str(RATE), "--nonblocking", "--threads", "--format", form,
        "--output", str(path),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=seconds * 4 + 60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", help=f"which: {', '.join(PATHS)} (all)")
    parser.add_argument("--py-spy", type=Path, default=Path("build/tools/bin/py-spy"))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each path (8)")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(arguments)
    unknown = set(options.paths) - set(PATHS)
    if unknown:
        parser.error(f"no path {', '.join(sorted(unknown))}; there are: {', '.join(PATHS)}")
    console = Console()
    if not options.py_spy.exists():
        console.print(f"[bold red]{options.py_spy} is not there[/]: make profile installs it")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for what in options.paths or PATHS:
        with console.status(f"{what}: {2 * options.seconds:.0f} seconds ..."):
            found = record(options.py_spy, what, options.seconds, options.out.absolute())
        console.print(_table(what, found))
    console.print(f"flame graphs and stacks in {options.out}/profile-*")
    return 0


def _table(what: str, found: Shares) -> Table:
    table = Table("where", "share of busy time", title=f"{what} ({found.samples} samples)")
    table.add_row("AES-GCM", f"{found.crypto:.1%}")
    table.add_row("reads and writes", f"{found.io:.1%}")
    table.add_row("[bold]outside both", f"[bold]{found.outside:.1%}")
    table.add_row("event loop's thread", f"{found.cores[0]:.2f} cores")
    table.add_row("all other threads", f"{found.cores[1]:.2f} cores")
    for frame, share in found.rest:
        table.add_row(f"  {frame}", f"{share:.1%}")
    return table


if __name__ == "__main__":
    sys.exit(main())
