"""Acknowledgements in batches: one that breaks something keeps no later one from being taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.sidecars.ack_batches import AckBatches
from service.sidecars.store import Enrolled
from strongroom.control import AckRequest
from strongroom.errors import StrongroomError, Unavailable

BROKEN, GOOD = 1, 2


def ack(seq: int) -> Any:
    return AckRequest(epoch="e" * 32, seq=seq, state="in_force")


def caller() -> Any:
    class Caller:
        id = "s"
        signing_key = b"k"

    return Caller()


async def test_what_fails_for_no_known_reason_is_refused_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[None] = []

    async def transaction(_: AckBatches, batch: list[Any]) -> list[StrongroomError | None]:
        await asyncio.sleep(0)
        if any(each.ack.seq == BROKEN for each in batch):
            raise ArithmeticError("a defect of ours")
        return [None] * len(batch)

    monkeypatch.setattr(AckBatches, "_transaction", transaction)
    monkeypatch.setattr("service.sidecars.ack_batches.check", lambda _: None)
    batches = AckBatches(None, None, lambda: told.append(None))  # type: ignore[arg-type]  # not reached
    one: Enrolled = caller()
    async with asyncio.timeout(5):
        with pytest.raises((ArithmeticError, Unavailable)):
            await batches.take(one, ack(BROKEN))
        assert not told
        await batches.take(one, ack(GOOD))
    assert len(told) == 1
