"""An engine in a process of its own that takes slots, fills some of them, and waits to be killed.

Reads its orders as one JSON line; says `holding <slots>` once it has them and has filled `fill`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from strongroom.blocks import pack_tokens
from strongroom.wire.frames import Filled, Hello, Open, Save, Slots, Verdict
from tests.sidecar.harness import Engine, Wire


async def main(orders: dict[str, Any]) -> None:
    path, prompt = Path(orders["socket"]), orders["prompt"]
    scheduler, worker = [
        await Wire.connect(path, msgspec.convert(orders[role], Hello))
        for role in ("scheduler", "worker")
    ]
    scheduler.send(Open("r", orders["grant"], orders["salt"], pack_tokens(prompt), "none"))
    assert (await scheduler.expect(Verdict)).save
    worker.send(Save("r", 1, len(prompt)))
    slots = (await worker.expect(Slots)).slots
    for slot in slots:
        Engine.fill(worker, slot, prompt)
    for slot in slots[: orders["fill"]]:
        worker.send(Filled(1, slot.offset, True))
    await worker.writer.drain()
    sys.stdout.write(f"holding {len(slots)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))
