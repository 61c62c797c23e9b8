"""The demo's processes: started with their logs in a folder, waited for, stopped in order.

A process that ends early, or does not get ready in time, is a `DemoFailure` that shows the
last lines of its log.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

READY_S = 240.0
STOP_S = 30.0
_POLL_S = 0.1


class DemoFailure(Exception):
    """A step did not do what it promises; the message says which and what was seen."""


@dataclass(frozen=True, slots=True)
class Process:
    """One running process and the file that holds what it prints."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self, ready: Callable[[], bool], within_s: float = READY_S) -> None:
        """Wait until `ready()` holds; `DemoFailure` if the process ends or time runs out."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self.popen.poll() is not None:
                raise DemoFailure(f"{self.name} ended with {self.popen.returncode}:\n{self.tail()}")
            if ready():
                return
            time.sleep(_POLL_S)
        raise DemoFailure(f"{self.name} was not ready within {within_s:.0f} s:\n{self.tail()}")

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop in order, then by force; returns when the whole process group is gone."""
        if self.popen.poll() is None:
            self.popen.send_signal(with_signal)
            try:
                self.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # An engine has children of its own: the group goes with its leader.
            _kill_group(self.popen.pid)


def _kill_group(pid: int) -> None:
    import os  # noqa: PLC0415 - the one system call here that subprocess does not offer

    os.killpg(pid, signal.SIGKILL)


class Processes:
    """Starts processes by name; everything still running is stopped on leaving."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, Process] = {}
        self.ids: dict[str, int] = {}
        """Name to the process id of its latest start."""
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Process:
        """Start `command` in a group of its own; its output is appended to `<name>.log`."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as sink:
            popen = subprocess.Popen(  # noqa: S603 - the demo's own commands
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        process = Process(name, popen, log)
        self._running[name] = process
        self.ids[name] = popen.pid
        return process

    def stop(self, name: str) -> None:
        """Stop the process of that name, if it runs."""
        process = self._running.pop(name, None)
        if process is not None:
            process.stop()


@contextlib.contextmanager
def processes(logs: Path) -> Iterator[Processes]:
    """A set of processes that ends with the block, latest started first."""
    running = Processes(logs)
    try:
        yield running
    finally:
        for name in reversed(list(running._running)):
            running.stop(name)
