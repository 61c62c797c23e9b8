"""fio on a file of its own: what the disk gives at a block size and depth, O_DIRECT.

It runs twice, with one thread that keeps `depth` requests in flight (libaio) and with `depth`
threads of one request (psync): which is faster depends on the device, and the faster one counts.

Where fio is not installed, threads of ours read and write the same way (`preadv`, `pwritev`, one
request a thread), and `how` says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from storage.memory import aligned


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of fio over the whole file."""

    gbytes_per_s: float


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file of whole blocks. Reads are cold: O_DIRECT passes the page cache."""

    path: Path
    nbytes: int
    block_bytes: int

    @property
    def how(self) -> str:
        return "fio" if shutil.which("fio") else "a plain O_DIRECT loop (fio is not installed)"

    def read(self, depth: int) -> Measured:
        """Read it once, front to back, with `depth` requests in flight."""
        return self._run("read", depth)

    def write(self, depth: int) -> Measured:
        """Write it once into newly allocated space."""
        return self._run("write", depth)

    def _run(self, what: str, depth: int) -> Measured:
        if not shutil.which("fio"):
            self._renew(what)
            return Measured(self._by_hand(what, depth))
        share = self.nbytes // depth // self.block_bytes * self.block_bytes
        in_one = ["--ioengine=libaio", f"--iodepth={depth}", f"--size={self.nbytes}"]
        in_many = [
            "--ioengine=psync", "--thread", f"--numjobs={depth}", f"--offset_increment={share}",
            f"--size={share}", "--group_reporting",
        ]  # fmt: skip
        return max(
            (self._fio(what, engine) for engine in ([in_one, in_many] if share else [in_one])),
            key=lambda measured: measured.gbytes_per_s,
        )

    def _fio(self, what: str, engine: list[str]) -> Measured:
        self._renew(what)
        command = [
            "fio", "--name=bench", f"--filename={self.path}", f"--rw={what}", "--direct=1",
            f"--bs={self.block_bytes}", "--output-format=json", "--fallocate=none", *engine,
        ]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        job = json.loads(output[output.index("{") :])["jobs"][0][what]
        return Measured(job["io_bytes"] / max(job["runtime"], 1) / 1e6)

    def _renew(self, what: str) -> None:
        """What is written goes into space that was just allocated, as a region's is."""
        if what == "write":
            self.path.unlink(missing_ok=True)
            with self.path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)

    def _by_hand(self, what: str, depth: int) -> float:
        descriptor = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        buffers = [aligned(self.block_bytes) for _ in range(depth)]

        def work(part: int) -> None:
            for at in range(part * self.block_bytes, self.nbytes, depth * self.block_bytes):
                if what == "read":
                    os.preadv(descriptor, [buffers[part]], at)
                else:
                    os.pwritev(descriptor, [buffers[part]], at)

        try:
            with ThreadPoolExecutor(depth) as pool:
                started = time.perf_counter()
                list(pool.map(work, range(depth)))
                return self.nbytes / (time.perf_counter() - started) / 1e9
        finally:
            os.close(descriptor)


@contextmanager
def laid_out(folder: Path, nbytes: int, block_bytes: int) -> Iterator[DiskFile]:
    """A written file of at least `nbytes`, removed afterwards."""
    whole = -(-nbytes // block_bytes) * block_bytes
    file = DiskFile(folder / "fio.bin", whole, block_bytes)
    try:
        file.write(depth=4)
        yield file
    finally:
        with suppress(FileNotFoundError):
            file.path.unlink()
