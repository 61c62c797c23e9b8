"""The verdict: the right party hits, and the wrong one misses, for every check."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import grants
from policy.signing import Signer
from sidecar.clocks import Clocks
from strongroom.blocks import pack_tokens
from strongroom.grant import EngineDigests, Operation
from strongroom.log import InvalidationKind
from strongroom.wire.frames import Open, Verdict
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.control_plane import MODEL, TEMPLATE, TOKENIZER, FakeControlPlane
from tests.sidecar.harness import Engine, ManualClock, World, harness

HIT = 288
DENIED = -1
OTHER = "ab" * 32


def digests(**changes: str) -> EngineDigests:
    return msgspec.structs.replace(EngineDigests(MODEL, "none", TOKENIZER, TEMPLATE), **changes)


async def test_a_good_grant_hits_what_was_stored(stored: Stored) -> None:
    assert await stored.hits("r", stored.grant()) == HIT


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": digests(model=OTHER)},
        {"engine": digests(tokenizer=OTHER)},
        {"engine": digests(template=OTHER)},
        {"prompt_digest": OTHER},
        {"prompt_tokens": 304},
        {"salt_digest": OTHER},
        {"ops": (Operation.WRITE,)},
        {"spans": ()},
        {"epoch": "another"},
        {"iss": "another"},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_a_grant_that_says_otherwise_misses(
    stored: Stored, changes: dict[str, object]
) -> None:
    assert await stored.hits("good", stored.grant()) == HIT
    assert await stored.hits("bad", stored.grant(**changes)) == DENIED


async def test_another_tenant_never_hits_the_same_prompt(stored: Stored) -> None:
    world = stored.world
    other = world.control.tenant()
    assert await stored.hits("mine", stored.grant()) == HIT
    assert await stored.hits("theirs", world.control.grant(other, stored.prompt)) == 0


async def test_another_group_never_hits_the_same_prompt(stored: Stored) -> None:
    world = stored.world
    group = world.control.component()
    granted = world.control.grant(world.tenant, stored.prompt, [(300, (), (group,))])
    assert await stored.hits("mine", stored.grant()) == HIT
    assert await stored.hits("theirs", granted) == 0


async def test_other_tokens_under_a_good_grant_miss(stored: Stored) -> None:
    granted = stored.grant()
    forged = pack_tokens([*stored.prompt[:-1], 7])
    assert await stored.hits("good", granted) == HIT
    assert await stored.hits("forged", granted, tokens=forged) == DENIED
    assert await stored.hits("empty", granted, tokens=b"") == DENIED
    assert await stored.hits("odd", granted, tokens=forged[:-1]) == DENIED


async def test_another_salt_or_none_under_a_good_grant_misses(stored: Stored) -> None:
    granted = stored.grant()
    assert await stored.hits("good", granted) == HIT
    assert await stored.hits("none", granted, salt="") == DENIED
    assert await stored.hits("other", granted, salt=secrets.token_urlsafe(32)) == DENIED


async def test_a_whole_prompt_under_a_salt_of_its_own_choice_misses(stored: Stored) -> None:
    """The service signs the digest of the derived salt; a grant over another one is not used."""
    from strongroom.derivation import salt_digest

    salt = "chosen"
    granted = stored.grant(salt_digest=salt_digest(salt))
    assert await stored.hits("good", stored.grant()) == HIT
    assert await stored.hits("chosen", granted, salt=salt) == DENIED


async def test_another_adapter_misses(stored: Stored) -> None:
    granted = stored.grant()
    assert await stored.hits("good", granted, adapter="none") == HIT
    assert await stored.hits("lora", granted, adapter=OTHER) == DENIED


async def test_a_grant_signed_by_nobody_we_pinned_misses(stored: Stored) -> None:
    granted = stored.grant()
    stranger = Signer(Ed25519PrivateKey.generate())
    forged = grants.mint(granted.claims, stranger)
    head, payload, signature = granted.token.split(".")
    flipped = f"{head}.{payload}.{signature[:-4]}{'A' * 4}"
    assert await stored.hits("good", granted) == HIT
    assert await stored.hits("stranger", granted, grant=forged) == DENIED
    assert await stored.hits("flipped", granted, grant=flipped) == DENIED
    assert await stored.hits("none", granted, grant="") == DENIED
    assert await stored.hits("garbage", granted, grant="a.b.c") == DENIED


async def test_an_expired_grant_misses(stored: Stored) -> None:
    now = int(time.time())
    assert await stored.hits("good", stored.grant(iat=now - 100, exp=now + 100)) == HIT
    assert await stored.hits("expired", stored.grant(iat=now - 300, exp=now - 1)) == DENIED


@pytest.mark.parametrize("of", ["component", "subject"])
async def test_a_grant_and_keys_that_served_before_a_revocation_serve_nothing_after_it(
    stored: Stored, of: str
) -> None:
    """Signature and keys are remembered by then; whether they may be used is not."""
    world = stored.world
    granted = stored.grant()
    other = world.control.tenant()
    others = world.control.grant(other, stored.prompt)
    for number in range(3):
        assert await stored.hits(f"before-{number}", granted) == HIT
    assert await stored.hits("another tenant, before", others) == 0
    if of == "component":
        entry = world.control.revoke(world.tenant.everyone)
    else:  # the keys stay, for other subjects
        kind = InvalidationKind.SUBJECT
        entry = world.control.append(kind, tenant=world.tenant.id, subject=granted.claims.sub)
    await world.control.until_acked("fenced", entry.seq)
    assert await stored.hits("after", granted) == DENIED
    assert await stored.hits("another tenant, after", others) == 0


async def test_setting_the_wall_clock_back_keeps_no_grant_alive(tmp_path: Path) -> None:
    boot = ManualClock()
    start = time.time()
    wall = [start]
    async with harness(tmp_path, clocks=Clocks(boot, lambda: wall[0])) as world:
        engine = await world.engine()
        granted = world.control.grant(
            world.tenant, range(300), iat=int(start), exp=int(start) + 100
        )
        assert (await engine.open("before", granted)).allowed
        boot.advance(50)
        await world.sidecar.serving.renew()
        wall[0] = start - 10_000
        assert (await engine.open("within", granted)).allowed
        boot.advance(60)
        await world.sidecar.serving.renew()
        assert not (await engine.open("after", granted)).allowed


async def test_a_tenant_that_the_sidecar_is_not_enrolled_for_misses(tmp_path: Path) -> None:
    control = FakeControlPlane()
    mine, theirs = control.tenant(), control.tenant()
    control.tenants = [mine.id]
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        assert (await engine.open("mine", control.grant(mine, range(300)))).allowed
        assert not (await engine.open("theirs", control.grant(theirs, range(300)))).allowed


async def test_a_grant_ahead_of_the_log_waits_briefly_and_then_misses(stored: Stored) -> None:
    control = stored.world.control
    assert await stored.hits("at", stored.grant(seq=control.head.seq)) == HIT
    assert await stored.hits("ahead", stored.grant(seq=control.head.seq + 1)) == DENIED


async def test_a_grant_ahead_of_the_log_hits_when_the_log_arrives(tmp_path: Path) -> None:
    async with harness(tmp_path, catch_up_s=20) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(300), seq=world.control.head.seq + 1)
        opening = engine.open("r", granted)
        world.control.append(InvalidationKind.COMPONENTS, components=(world.control.component(),))
        assert (await opening).allowed


async def test_a_read_only_grant_may_not_save(stored: Stored) -> None:
    reader = await stored.engine.open("reader", stored.grant(ops=(Operation.READ,)))
    writer = await stored.engine.open("writer", stored.grant())
    assert (reader.allowed, reader.tokens, reader.save) == (True, HIT, False)
    assert writer.save
    longer = stored.world.control.grant(
        stored.world.tenant, range(5000, 5100), ops=(Operation.READ,)
    )
    await stored.engine.open("long", longer)
    assert await stored.engine.save("long", longer.prompt, 96) == 0


async def test_hits_and_saves_end_where_the_granted_spans_end(world: World) -> None:
    control, tenant = world.control, world.tenant
    document, group = control.component(), control.component()
    prompt = list(range(2000, 2300))
    spans = [(100, (), (tenant.everyone,)), (300, (document,), (group,))]
    engine = await world.engine()
    assert await engine.compute_and_save("writer", control.grant(tenant, prompt, spans)) == 5
    whole = await engine.open("whole", control.grant(tenant, prompt, spans))
    truncated = await engine.open("cut", control.grant(tenant, prompt, spans[:1]))
    assert (whole.tokens, truncated.tokens) == (288, 96)
    assert not (await engine.load("cut", 0, 288)).ok
    assert (await engine.load("cut", 0, 96)).ok
    other = list(range(3000, 3300))
    await engine.open("cut2", control.grant(tenant, other, spans[:1]))
    assert await engine.save("cut2", other, 288) == 2
    assert (await engine.open("again", control.grant(tenant, other, spans))).tokens == 96


async def test_a_shared_system_prompt_is_shared_and_what_follows_is_not(world: World) -> None:
    control, tenant = world.control, world.tenant
    mine, theirs = control.component(), control.component()
    system = list(range(64))
    engine = await world.engine()

    def spans(private: str) -> list[tuple[int, tuple[str, ...], tuple[str, ...]]]:
        return [(64, (), (tenant.everyone,)), (128, (), (private,))]

    prompt = system + list(range(500, 564))
    await engine.compute_and_save("w", control.grant(tenant, prompt, spans(mine)))  # type: ignore[arg-type]
    same = await engine.open("s", control.grant(tenant, prompt, spans(mine)))  # type: ignore[arg-type]
    other = await engine.open("o", control.grant(tenant, prompt, spans(theirs)))  # type: ignore[arg-type]
    assert (same.tokens, other.tokens) == (128, 64)


async def test_a_shorter_prompts_last_block_is_hit_by_a_longer_one(world: World) -> None:
    engine = await world.engine()
    short, long = list(range(100)), list(range(200))
    await engine.compute_and_save("w", world.control.grant(world.tenant, short))
    verdict = await engine.open("r", world.control.grant(world.tenant, long))
    assert verdict.tokens == 96
    assert (await engine.load("r", 0, 96)).ok


async def test_a_prompt_shorter_than_a_page_is_no_error(world: World) -> None:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, range(5))
    assert await engine.compute_and_save("w", granted) == 0
    verdict = await engine.open("r", granted)
    assert (verdict.allowed, verdict.tokens) == (True, 0)


async def test_other_extras_are_another_prompt(world: World) -> None:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, range(128))
    await engine.open("w", granted, extras=b"image one")
    assert await engine.save("w", granted.prompt, 128) == 2
    assert (await engine.open("a", granted, extras=b"image one")).tokens == 128
    assert (await engine.open("b", granted, extras=b"image two")).tokens == 0
    assert not (await engine.open("c", granted, extras=bytes(5000))).allowed


async def test_a_block_that_one_rank_lacks_is_a_miss(world: World) -> None:
    engine = await world.engine(tp_size=2)
    granted = world.control.grant(world.tenant, range(128))
    await engine.open("w", granted)
    assert await engine.save("w", granted.prompt, 128, rank=0) == 2
    assert (await engine.open("half", granted)).tokens == 0
    assert await engine.save("w", granted.prompt, 128, rank=1) == 2
    assert (await engine.open("both", granted)).tokens == 128
    assert (await engine.load("both", 0, 128, rank=1)).ok


async def test_another_kv_format_finds_nothing(stored: Stored) -> None:
    from tests.sidecar.harness import ENGINE, FORMAT

    world = stored.world
    (world.token_path.parent / "engine-b.token").touch(mode=0o600)
    (world.token_path.parent / "engine-b.token").write_text("token-b")
    other = msgspec.structs.replace(FORMAT, dtype="bfloat16")
    engine = await world.engine(engine="engine-b", token="token-b", format=other)
    assert await stored.hits("mine", stored.grant()) == HIT
    assert (await engine.open("theirs", stored.grant())).tokens == 0
    assert ENGINE != "engine-b"


async def test_denials_are_on_record_with_their_reason_and_hits_before_the_verdict(
    stored: Stored,
) -> None:
    events = stored.world.control.events
    await stored.hits("bad", stored.grant(prompt_digest=OTHER))
    await stored.hits("good", stored.grant())
    audit = stored.world.sidecar.audit.counts
    assert audit["denied", "refused", "prompt"] == 1
    assert audit["lookup", "hit", ""] == 1
    while not any(event.request == "good" and event.outcome == "hit" for event in events):
        await stored.world.control.news.wait()
    (denied,) = [event for event in events if event.request == "bad"]
    assert (denied.kind, denied.reason, denied.subject) == ("denied", "prompt", "alice")


async def test_too_many_open_requests_are_refused_and_counted(tmp_path: Path) -> None:
    async with harness(tmp_path, requests_max=2) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(64))
        assert (await engine.open("a", granted)).allowed
        assert (await engine.open("b", granted)).allowed
        assert not (await engine.open("c", granted)).allowed
        assert world.sidecar.audit.counts["denied", "refused", "backpressure"] == 1


async def test_a_request_that_is_not_judged_is_refused(stored: Stored) -> None:
    engine: Engine = stored.engine
    assert not (await engine.load("unknown", 0, 64)).ok
    assert await engine.save("unknown", stored.prompt, 64) == 0
    await stored.hits("denied", stored.grant(prompt_digest=OTHER))
    assert not (await engine.load("denied", 0, 64)).ok
    assert await engine.save("denied", stored.prompt, 64) == 0


@pytest.mark.parametrize("shut", [True, False], ids=["no longer", "still"])
async def test_what_may_not_be_served_any_more_once_its_record_is_written_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shut: bool
) -> None:
    """The record may wait for the disk; whether one may serve is looked at after that again."""
    real, syncing, go_on = os.fsync, threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        go_on.wait(20)
        real(descriptor)

    async with harness(tmp_path, spool_sync="before_serving") as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert (await engine.open("warm", granted)).allowed
        monkeypatch.setattr("os.fsync", slow)
        try:
            engine.scheduler.send(
                Open("r", granted.token, granted.salt, pack_tokens(PROMPT), "none")
            )
            while not syncing.is_set():
                await asyncio.sleep(0)
            if shut:
                world.sidecar.gate.shut("retired")
        finally:
            go_on.set()
        assert (await engine.scheduler.expect(Verdict)).allowed is not shut
