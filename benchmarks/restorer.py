"""An engine that restores without pause: the load under which others look up.

    python -m benchmarks.restorer CONFIG ANSWERS

It saves one long prompt of large blocks, says so, and then loads it over and over until it is
told to pause. It answers for each part as soon as it has it, like an engine whose copy is free.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from benchmarks.wire import Address, Prompt, Scheduler, Worker
from strongroom.blocks import pack_tokens


def main() -> None:
    """Answer `go` once the first load is done, `pause` with what was restored since."""
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
        number = 0
        running, parts, since = False, 0, time.perf_counter()
        while True:
            if not running or select.select([sys.stdin], [], [], 0)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                seconds = time.perf_counter() - since
                answers.write(
                    json.dumps({"bytes": parts * len(content), "seconds": seconds}) + "\n"
                )
                running = json.loads(line)["do"] == "go"
                parts, since = 0, time.perf_counter()
                continue
            number += 1
            parts += worker.load("load", number, count)


if __name__ == "__main__":
    main()
