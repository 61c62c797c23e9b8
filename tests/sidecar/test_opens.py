"""One tenant floods an engine's scheduler connection with `Open`s; another's are not behind them.

Counted in turns of the loop and in verdicts, not in time.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from random import Random  # noqa: TID251 - seeded, no secret
from typing import Any

import pytest

from sidecar.engines.opens import Names, Opens, Steps
from sidecar.lookup.judge import Judge
from sidecar.lookup.request import Request
from sidecar.record.audit import NOTES_MAX
from sidecar.record.spool import Spool
from strongroom.blocks import pack_tokens
from strongroom.control import SpoolEvent
from strongroom.errors import Unavailable
from strongroom.identity import ComponentId
from strongroom.wire.frames import Cancel, Finish, Open, Verdict
from tests.sidecar.control_plane import Granted
from tests.sidecar.harness import Engine, harness

PROMPT = list(range(1000, 1300))
A, B, C = (ComponentId(name * 32) for name in "abc")
FLOOD = 40


def sent(engine: Engine, name: str, granted: Granted) -> None:
    frame = Open(name, granted.token, granted.salt, pack_tokens(granted.prompt), "none")
    engine.scheduler.send(frame)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "one queue for all"])
async def test_an_open_beside_a_flood_of_them_waits_for_turns_and_not_for_the_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fair: bool
) -> None:
    if not fair:
        monkeypatch.setattr(Names, "tenant", lambda _, grant: None)
    async with harness(tmp_path) as world:
        engine = await world.engine()
        quiet = world.control.grant(world.control.tenant(), PROMPT)
        flood = world.control.grant(world.tenant, PROMPT)
        for name, granted in (("warm-f", flood), ("warm-q", quiet)):
            assert (await engine.open(name, granted)).allowed
        begun: list[str] = []
        turn, turns = 0, list[int]()
        begin = Judge.begin

        def tick() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(tick)

        def judged(self: Judge, request: Request, *rest: Any, **more: Any) -> Any:
            begun.append(request.name)
            turns.append(turn)
            return begin(self, request, *rest, **more)

        monkeypatch.setattr(Judge, "begin", judged)
        loop = asyncio.get_running_loop()
        loop.call_soon(tick)
        # All of it lies in the socket before the sidecar reads the first.
        for number in range(FLOOD):
            sent(engine, f"f{number}", flood)
        sent(engine, "q", quiet)
        verdicts = [await engine.scheduler.expect(Verdict) for _ in range(FLOOD + 1)]
        assert all(verdict.allowed for verdict in verdicts)
        assert sorted(begun) == sorted([*(f"f{number}" for number in range(FLOOD)), "q"])
        assert len(set(turns)) == len(turns), "one verdict begins in a turn of the loop"
        if fair:
            assert begun.index("q") <= FLOOD // 4
        else:
            assert begun.index("q") == FLOOD, "a test that cannot fail without turns"


@pytest.mark.parametrize(
    ("requests_max", "prompt_bytes_max"),
    [(4, 10**6), (1000, 4800)],
    ids=["requests", "prompt bytes"],
)
async def test_who_comes_after_a_flood_of_open_requests_finds_its_part(
    tmp_path: Path, requests_max: int, prompt_bytes_max: int
) -> None:
    """Four prompts of 1,200 bytes."""
    async with harness(
        tmp_path, requests_max=requests_max, prompt_bytes_max=prompt_bytes_max
    ) as world:
        engine = await world.engine()
        flood = world.control.grant(world.tenant, PROMPT)
        quiet = world.control.grant(world.control.tenant(), PROMPT)
        for number in range(4):
            assert (await engine.open(f"f{number}", flood)).allowed
        assert not (await engine.open("f4", flood)).allowed, "the flood's fifth"
        (joined,) = world.sidecar.sessions
        assert joined.opens.refused == 1
        assert (await engine.open("q0", quiet)).allowed
        assert (await engine.open("q1", quiet)).allowed
        assert not (await engine.open("q2", quiet)).allowed, "beyond its part of two"
        for number in range(4):
            engine.scheduler.send(Finish(f"f{number}"))
        assert (await engine.open("q3", quiet)).allowed
        assert world.sidecar.statistics().requests_refused == 2
        assert world.sidecar.audit.counts["denied", "refused", "backpressure"] == 2


async def test_a_refused_open_is_put_on_record_while_the_frames_behind_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes no record of a refusal until it is told to."""
    put, late = Spool.put, list[asyncio.Future[None]]()

    def slow(spool: Spool, event: SpoolEvent) -> asyncio.Future[None] | None:
        written = put(spool, event)
        if event.kind != "denied":
            return written
        late.append(asyncio.get_running_loop().create_future())
        return late[-1]

    async with harness(tmp_path, requests_max=4) as world:
        engine = await world.engine()
        quiet = world.control.grant(world.control.tenant(), PROMPT)
        flood = world.control.grant(world.tenant, PROMPT)
        for number in range(4):
            assert (await engine.open(f"f{number}", flood)).allowed
        monkeypatch.setattr(Spool, "put", slow)
        for number in range(FLOOD):
            sent(engine, f"x{number}", flood)
        assert (await verdict_of(engine, "q0", quiet)).allowed
        assert len(late) == FLOOD
        # No more than this is ever on its way, and nothing is left out.
        for number in range(NOTES_MAX):
            sent(engine, f"y{number}", flood)
        sent(engine, "q1", quiet)
        await until(lambda: len(late) == NOTES_MAX)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(late) == NOTES_MAX
        late[0].set_exception(Unavailable("the disk is full"))  # which is nobody's harm
        await until(lambda: len(late) > NOTES_MAX)
        for written in late[1:NOTES_MAX]:
            written.set_result(None)
        await until(lambda: len(late) == FLOOD + NOTES_MAX)
        while (verdict := await engine.scheduler.expect(Verdict)).request != "q1":
            assert not verdict.allowed
        assert verdict.allowed
        assert world.sidecar.audit.counts["denied", "refused", "backpressure"] == len(late)


async def verdict_of(engine: Engine, name: str, granted: Granted) -> Verdict:
    """Behind those of others."""
    sent(engine, name, granted)
    async with asyncio.timeout(20):
        while (verdict := await engine.scheduler.expect(Verdict)).request != name:
            pass
    return verdict


async def test_verdicts_that_wait_for_one_tenants_keys_hold_up_no_other_tenant(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, opens_max=2) as world:
        engine = await world.engine()
        quiet = world.control.grant(world.control.tenant(), PROMPT)
        assert (await engine.open("warm", quiet)).allowed
        hold = world.control.before_key_lease = asyncio.Event()
        flood = world.control.grant(world.tenant, PROMPT)
        for number in range(8):
            sent(engine, f"f{number}", flood)
        await world.control.key_lease_waiting.wait()
        (joined,) = world.sidecar.sessions
        await until(lambda: len(joined.opens) == 9)
        assert joined.requests.get("f0").judged.is_set() is False  # type: ignore[union-attr]
        sent(engine, "q", quiet)
        first = await engine.scheduler.expect(Verdict)
        assert (first.request, first.allowed) == ("q", True), "before all that came before it"
        hold.set()
        verdicts = [await engine.scheduler.expect(Verdict) for _ in range(8)]
        assert {verdict.request for verdict in verdicts} == {f"f{n}" for n in range(8)}
        assert all(verdict.allowed for verdict in verdicts)


async def test_a_forged_grant_is_refused_and_holds_nothing_of_the_tenant_that_it_names(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, requests_max=2) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        head, payload, _ = granted.token.split(".")
        signature = base64.urlsafe_b64encode(bytes(64)).decode().rstrip("=")
        forged = f"{head}.{payload}.{signature}"
        (joined,) = world.sidecar.sessions
        for number in range(6):
            name = f"x{number}"
            engine.scheduler.send(
                Open(name, forged, granted.salt, pack_tokens(granted.prompt), "none")
            )
            assert not (await engine.scheduler.expect(Verdict)).allowed
            assert len(joined.opens) == 0
        assert joined.opens.refused == 0
        assert (await engine.open("right", granted)).allowed


async def test_a_request_that_was_cancelled_before_its_turn_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        (joined,) = world.sidecar.sessions
        gate = asyncio.Event()
        begin = Steps.begin

        async def held(self: Steps, *rest: Any) -> None:
            await gate.wait()
            await begin(self, *rest)

        monkeypatch.setattr(Steps, "begin", held)
        monkeypatch.setattr(Steps, "begin_now", lambda *_: False)
        sent(engine, "a", granted)
        await until(lambda: joined.requests.get("a") is not None)
        request = joined.requests.get("a")
        assert request is not None
        request.cancel(1)
        before = world.sidecar.audit.counts.total()
        gate.set()
        assert not (await engine.scheduler.expect(Verdict)).allowed
        assert len(joined.opens) == 0
        assert world.sidecar.audit.counts.total() == before
        assert (await engine.open("b", granted)).allowed


async def test_what_was_cancelled_while_it_waits_for_its_verdict_still_holds_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else opening and cancelling, or one name again and again, would heap up prompts that wait."""
    async with harness(tmp_path, requests_max=4) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        (joined,) = world.sidecar.sessions
        gate = asyncio.Event()
        begin = Steps.begin

        async def held(self: Steps, *rest: Any) -> None:
            await gate.wait()
            await begin(self, *rest)

        with monkeypatch.context() as slow:
            slow.setattr(Steps, "begin", held)
            slow.setattr(Steps, "begin_now", lambda *_: False)
            for number in range(20):
                sent(engine, f"a{number % 2}", granted)
                engine.scheduler.send(Cancel(f"a{number % 2}"))
            await until(lambda: joined.opens.refused == 16)
            assert len(joined.opens) == 4
            gate.set()
            await until(lambda: len(joined.opens) == 0)
        sent(engine, "b", granted)
        while (verdict := await engine.scheduler.expect(Verdict)).request != "b":
            assert not verdict.allowed
        assert verdict.allowed


async def test_steps_are_fair_by_weight_and_one_in_a_turn_of_the_loop() -> None:
    steps = Steps(lambda tenant: 3.0 if tenant == B else 1.0)
    order: list[ComponentId | None] = []
    per_turn: list[int] = []
    running = 0

    def tick() -> None:
        nonlocal running
        per_turn.append(running)
        running = 0
        loop.call_soon(tick)

    async def one(tenant: ComponentId | None) -> None:
        nonlocal running
        await steps.begin(tenant, 4096)
        running += 1
        order.append(tenant)

    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for tenant in (A, B, None):
            for _ in range(30):
                tasks.create_task(one(tenant))
        await asyncio.sleep(0)
        tick()
    assert max(per_turn) == 1
    assert steps.statistics().waiting == 0
    first = order[1:31]
    assert first.count(B) in range(16, 21), "three parts of five"
    assert abs(first.count(A) - first.count(None)) <= 1
    assert len(order) == 90


def test_places_and_bytes_are_held_once_and_given_back_once() -> None:
    """A model: what is held is the sum over the requests that are not over."""
    chance = Random(3)
    opens = Opens(8, 8000, 4, lambda tenant: 2.0 if tenant == C else 1.0)
    held: dict[Request, tuple[ComponentId | None, int]] = {}
    refused = 0
    for number in range(4000):
        if chance.random() < 0.6:
            tenant, nbytes = chance.choice((A, A, A, B, C, None)), chance.randrange(1, 2000)
            mine = [size for who, size in held.values() if who == tenant]
            had_room = len(held) < 8 and sum(size for _, size in held.values()) + nbytes <= 8000
            if opens.take(tenant, nbytes):
                request = Request(str(number))
                opens.keep(request, tenant, nbytes)
                held[request] = (tenant, nbytes)
            else:
                refused += 1
                assert not had_room, "while there is room whoever asks may take"
                assert mine or sum(size for _, size in held.values()) + nbytes > 8000
        elif held:
            request = chance.choice(list(held))
            opens.over(request)
            opens.over(request)
            del held[request]
        assert len(opens) == len(held) <= 16
        assert sum(size for _, size in held.values()) <= 16000
    assert refused == opens.refused > 0
    for request in held:
        opens.over(request)
    assert opens.take(A, 8000), "who is alone has the whole"


def test_whom_a_grant_names_is_read_without_trusting_it() -> None:
    def grant(payload: bytes) -> str:
        return "e30." + base64.urlsafe_b64encode(payload).decode().rstrip("=") + ".c2ln"

    names = Names()
    assert names.tenant(grant(b'{"iss": "x", "tenant": "%s"}' % A.encode())) == A
    for payload in (b"", b"{}", b"[]", b'{"tenant": 3}', b'{"tenant": "A"}', b"\xff", b"[" * 9999):
        assert names.tenant(grant(payload)) is None
    for other in ("", "a.b", "a.b.c.d", "a.\xe9.c", "x" * 300_000):
        assert names.tenant(other) is None
    for number in range(3000):
        names.tenant(grant(b'{"tenant": "%032x"}' % number))
    assert len(names._known) <= 1024
