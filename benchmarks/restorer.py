"""An engine that restores without pause: the load under which others look up.

    python -m benchmarks.restorer CONFIG ANSWERS

It saves one long prompt of large blocks, says so, and then loads it over and over, as many times
at once as it is told, until it is told to pause. It answers for each part as soon as it has it,
like an engine whose copy is free. With several loads at once the next one waits at the sidecar
when one ends, so that no core waits for this process.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.wire import Address, Prompt, Scheduler, Worker
from strongroom.blocks import pack_tokens
from strongroom.wire.frames import Copied, Load, LoadDone, LoadFailed, Part


@dataclass(slots=True)
class Loads:
    """Loads of one prompt, `at_once` of them under way."""

    worker: Worker
    tokens: int
    at_once: int = 0
    parts: int = 0
    ended: int = 0
    _under_way: int = 0
    _number: int = 0

    def go_on(self) -> None:
        """Begin what is not under way yet, and return when one has ended."""
        while self._under_way < self.at_once:
            self._number += 1
            self._under_way += 1
            self.worker.send(Load("load", self._number, 0, self.tokens))
        self._one()

    def drain(self) -> None:
        """Let what is under way end."""
        while self._under_way:
            self._one()

    def _one(self) -> None:
        while True:
            match self.worker.receive():
                case Part(load=number, offset=offset):
                    self.parts += 1
                    self.worker.send(Copied(number, offset))
                case LoadDone():
                    self.ended += 1
                    self._under_way -= 1
                    return
                case LoadFailed(start=start):
                    raise ConnectionError(f"a load failed at token {start}")
                case _:
                    pass


def main() -> None:
    """Answer `go` and `pause` with what was restored since, `alone` with so many loads' rate."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    address = Address(**config["address"])
    first, count = config["prompt"]
    prompt = Prompt(pack_tokens(range(first, first + count)), config["grant"], config["salt"])
    content = os.urandom(config["block_bytes"])
    with (
        os.fdopen(int(sys.argv[2]), "w", buffering=1) as answers,
        Worker(address) as worker,
        Scheduler(address) as scheduler,
    ):
        scheduler.look_up("save", prompt)
        worker.save("save", count, content)
        verdict = scheduler.open("load", prompt)
        if verdict.tokens != count:
            raise RuntimeError(f"a hit of {verdict.tokens} tokens, not {count}")
        loads, since = Loads(worker, count), time.perf_counter()
        while True:
            if loads.at_once and not select.select([sys.stdin], [], [], 0)[0]:
                loads.go_on()
                continue
            line = sys.stdin.readline()
            if not line:
                return
            loads.drain()
            told = json.loads(line)
            if told["do"] == "alone":
                loads, since = Loads(worker, count, told["at_once"]), time.perf_counter()
                while loads.ended < told["loads"]:
                    loads.go_on()
                loads.drain()
            seconds = time.perf_counter() - since
            answers.write(
                json.dumps({"bytes": loads.parts * len(content), "seconds": seconds}) + "\n"
            )
            at_once = told["at_once"] if told["do"] == "go" else 0
            loads, since = Loads(worker, count, at_once), time.perf_counter()


if __name__ == "__main__":
    main()
