"""A process that is told what to do by JSON lines and answers each with one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self


class ProcessFailed(Exception):
    """The other process answered with an error, or died; the text holds the end of its log."""


class Talk:
    """Use as a context manager. The command gets a descriptor for its answers appended."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        read, write = os.pipe()
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, str(write)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=dict(env),
                text=True,
            )
        os.close(write)
        self._answers: IO[str] = os.fdopen(read, "r")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises `ProcessFailed`."""
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command; `answer` waits for what it says."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ProcessFailed(f"it is gone:\n{self._tail()}") from error

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises `ProcessFailed`."""
        line = self._answers.readline()
        if not line:
            raise ProcessFailed(f"it died:\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProcessFailed(f"{answer['error']}\n{self._tail()}")
        return answer

    def close(self) -> None:
        """End of input, then wait; a process that does not end is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]
