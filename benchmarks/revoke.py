"""Revocation: from the log entry to `fenced`, with many resident blocks against few.

Every block depends on the component that is retired, an engine has its keys leased and a request
open. Each sample is a sidecar of its own, since a component is retired once.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.lookup import SMALL_PAGE_BYTES, address_of, sidecar
from benchmarks.rows import Row, ratio
from benchmarks.suite import Bench, Suite
from benchmarks.wire import Prompt, Scheduler, Worker
from strongroom.blocks import pack_tokens

_TOKENS = 256
_MS = 1e3


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    scale = bench.scale
    pairs = [
        (
            _fenced_ms(bench, f"many-{number}", scale.revoked),
            _fenced_ms(bench, f"few-{number}", scale.revoked_few),
        )
        for number in bench.rounds("revoke")
    ]
    note = f"{scale.revoked} resident blocks of the retired component against {scale.revoked_few}"
    return [ratio("revoke_scaling", "ms", pairs, note=note)]


def _fenced_ms(bench: Bench, name: str, blocks: int) -> float:
    """Milliseconds from the entry in the log to the sidecar's acknowledgement."""
    with bench.folder("revoke") as folder, ExitStack() as stack:
        talk = stack.enter_context(sidecar(folder / name, blocks))
        address = address_of(talk, "engine-a", SMALL_PAGE_BYTES)
        stack.enter_context(Worker(address))
        scheduler = stack.enter_context(Scheduler(address))
        granted = talk.ask("grant", first=0, count=_TOKENS)
        prompt = Prompt(pack_tokens(range(_TOKENS)), granted["token"], granted["salt"])
        if not scheduler.open("r", prompt).allowed:
            raise AssertionError("the request was refused before anything was revoked")
        if talk.ask("resident")["blocks"] != blocks:
            raise AssertionError(f"not {blocks} blocks are resident")
        seconds = float(talk.ask("revoke")["seconds"])
        if scheduler.open("again", prompt).allowed:
            raise AssertionError("what was revoked is served")
        return seconds * _MS


SUITE = Suite(
    name="revoke",
    summary="from a log entry to `fenced`, with many resident blocks against few",
    rows=("revoke_scaling",),
    measure=measure,
)
