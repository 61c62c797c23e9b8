"""A real vLLM with the connector, against a sidecar whose faults the test chooses.

Everything runs in float32, where a cold and a restored prefill agree to the last bit, and every
output is held against an engine that has no connector. Prompts are random token ids.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strongroom.wire.frames import Cancel, Finish, Hello, Load, Open, Save
from tests.connectors.engine_process import (
    ENGINE_PYTHON,
    MODEL,
    EngineProcess,
    make_tiny_model,
)
from tests.connectors.sidecar_double import TOKEN, Faults, SidecarDouble

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not ENGINE_PYTHON.exists(), reason="no engine environment (make setup-engine)"
    ),
]

TINY = {
    "skip_tokenizer_init": True, "max_model_len": 2048, "max_num_batched_tokens": 512,
    "enable_chunked_prefill": True,
}  # fmt: skip
TIMES = {
    "lookup_deadline_s": 2.0, "load_deadline_s": 1.0, "save_deadline_s": 1.0,
    "heartbeat_s": 0.2, "silence_s": 2.0,
}  # fmt: skip


def prompt(seed: int, tokens: int = 700) -> list[int]:
    """The same token ids for the same seed."""
    stream = hashlib.shake_256(f"prompt {seed}".encode()).digest(2 * tokens)
    return [3 + int.from_bytes(stream[2 * i : 2 * i + 2]) % 497 for i in range(tokens)]


def ask(tokens: list[int], grant: str | None = "good", salt: str | None = "s") -> dict[str, Any]:
    return {"tokens": tokens, "grant": grant, "salt": salt}


def connector(home: Path, sidecar: SidecarDouble, **times: float) -> dict[str, Any]:
    return {
        "socket": str(sidecar.path), "token_file": str(home / "token"), **TIMES, **times,
    }  # fmt: skip


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sr") as name:
        path = Path(name)
        (path / "token").write_text(TOKEN)
        yield path


@pytest.fixture(scope="module")
def tiny(home: Path) -> Path:
    return make_tiny_model(home / "tiny", home)


@pytest.fixture(scope="module")
def plain(home: Path, tiny: Path) -> Iterator[EngineProcess]:
    """An engine without a connector, and without a prefix cache."""
    with EngineProcess(home) as engine:
        engine.ask("start", model=str(tiny), extra=None, enable_prefix_caching=False, **TINY)
        yield engine


@pytest.fixture(scope="module")
def double(home: Path) -> Iterator[SidecarDouble]:
    with SidecarDouble(home / "sidecar") as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def shared_engine(home: Path, tiny: Path, double: SidecarDouble) -> Iterator[EngineProcess]:
    with EngineProcess(home) as engine:
        engine.ask("start", model=str(tiny), extra=connector(home, double), **TINY)
        yield engine


@pytest.fixture
def sidecar(double: SidecarDouble, shared_engine: EngineProcess) -> SidecarDouble:
    """The sidecar without a fault, with no memory of the frames of other tests."""
    double.faults = Faults()
    assert shared_engine.ask("connected")["open"]
    double.renew(3600)
    double.frames.clear()
    return double


@pytest.fixture
def engine(shared_engine: EngineProcess, sidecar: SidecarDouble) -> EngineProcess:
    """The engine, with an empty prefix cache."""
    settle(shared_engine)
    return shared_engine


def settle(engine: EngineProcess) -> None:
    """Let the engine give back what it held for a save, and empty its prefix cache."""
    engine.ask("generate", requests=[{"tokens": [5, 6, 7]}], max_tokens=2)
    assert engine.ask("reset")["done"]


def generate(engine: EngineProcess, *requests: dict[str, Any], **options: Any) -> Any:
    return engine.ask("generate", requests=list(requests), **options)


def store(
    engine: EngineProcess, sidecar: SidecarDouble, tokens: list[int], salt: str = "s"
) -> None:
    """Have the engine compute and save this prompt, and forget it."""
    have = len(sidecar.blocks)
    generate(engine, ask(tokens, salt=salt))
    assert sidecar.wait(lambda: len(sidecar.blocks) >= have + -(-len(tokens) // 256))
    settle(engine)
    sidecar.frames.clear()


def test_a_restored_prompt_gives_the_output_of_a_computed_one(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    tokens = prompt(1)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    cold = generate(engine, ask(tokens))
    assert cold["cached"] == [0]
    assert cold["outputs"] == expected
    assert sidecar.wait(lambda: len(sidecar.blocks) >= 3)
    settle(engine)
    warm = generate(engine, ask(tokens))
    assert warm["outputs"] == expected
    assert warm["cached"] == [672]
    assert len(warm["loads"]) == 1
    assert warm["parameters"] == [None], "nothing of ours reaches the client"
    assert [frame.end for frame in sidecar.seen(Save) if isinstance(frame, Save)] == [672]


def test_an_allowed_request_uses_the_engines_own_prefix_cache_and_a_refused_one_does_not(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    tokens = prompt(2)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    generate(engine, ask(tokens))
    allowed = generate(engine, ask(tokens))
    refused = generate(engine, ask(tokens, "bad"))
    ungranted = generate(engine, ask(tokens, None))
    again = generate(engine, ask(tokens))
    assert allowed["cached"] == again["cached"] == [672]
    assert refused["cached"] == ungranted["cached"] == [0]
    assert refused["loads"] == ungranted["loads"] == []
    for answer in (allowed, refused, ungranted, again):
        assert answer["outputs"] == expected


def test_another_salt_finds_nothing_of_this_one(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    tokens = prompt(3)
    generate(engine, ask(tokens, salt="mine"))
    assert generate(engine, ask(tokens, salt="mine"))["cached"] == [672]
    assert generate(engine, ask(tokens, salt="theirs"))["cached"] == [0]


def test_a_load_starts_where_the_local_hit_ends(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    """The local hit, ten pages, ends inside a block of eight; its pages are shared."""
    long = prompt(4)
    short = long[:330]
    expected = generate(plain, ask(long, None, None))["outputs"]
    expected_short = generate(plain, ask(short, None, None))["outputs"]
    store(engine, sidecar, long)
    generate(engine, ask(short))
    answer = generate(engine, ask(long))
    assert answer["cached"] == [672]
    assert answer["outputs"] == expected
    loads = [frame for frame in sidecar.seen(Load) if isinstance(frame, Load)]
    assert (loads[-1].start, loads[-1].end) == (320, 672)
    again = generate(engine, ask(short))
    assert again["outputs"] == expected_short
    assert again["cached"] == [320]


def test_a_prompt_of_whole_pages_leaves_one_token_to_compute(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    tokens = prompt(5, 256)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    store(engine, sidecar, tokens)
    answer = generate(engine, ask(tokens))
    assert answer["cached"] == [224]
    assert answer["outputs"] == expected


def test_many_requests_at_once_keep_their_own_outputs(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    stored = [prompt(100 + number, 300 + 40 * number) for number in range(6)]
    for tokens in stored[:3]:
        store(engine, sidecar, tokens)
    expected = generate(plain, *[ask(tokens, None, None) for tokens in stored])["outputs"]
    grants: list[str | None] = ["good", "bad", "good", "good", None, "good"]
    requests = [ask(tokens, grant) for tokens, grant in zip(stored, grants, strict=True)]
    answer = generate(engine, *requests)
    assert answer["outputs"] == expected
    assert [count > 0 for count in answer["cached"]] == [True, False, True, False, False, False]
    assert len(answer["loads"]) == len(set(answer["loads"])) == 2


def test_a_silent_sidecar_is_a_miss_at_the_deadline_also_in_the_local_cache(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    tokens = prompt(6)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    generate(engine, ask(tokens))
    assert generate(engine, ask(tokens))["cached"] == [672]
    sidecar.faults.silent_verdict = True
    answer = generate(engine, ask(tokens))
    assert answer["cached"] == [0]
    assert answer["outputs"] == expected
    assert 2.0 <= answer["ttft"][0] < 4.0


def test_once_the_lease_is_over_the_local_cache_is_a_miss_too(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    tokens = prompt(14)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    generate(engine, ask(tokens))
    assert generate(engine, ask(tokens))["cached"] == [672]
    sidecar.renew(-1)
    lapsed = generate(engine, ask(tokens))
    sidecar.renew(3600)
    renewed = generate(engine, ask(tokens))
    assert lapsed["cached"] == [0]
    assert lapsed["loads"] == []
    assert 2.0 <= lapsed["ttft"][0] < 4.0, "it waits for a renewal until its deadline"
    assert renewed["cached"] == [672]
    assert lapsed["outputs"] == renewed["outputs"] == expected


def test_a_session_that_got_no_lease_is_a_miss_also_in_the_local_cache(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    tokens = prompt(15)
    generate(engine, ask(tokens))
    assert generate(engine, ask(tokens))["cached"] == [672]
    sidecar.faults.lease_s = None
    sidecar.drop("scheduler")
    assert sidecar.wait_for(Hello)
    assert engine.ask("connected")["open"]
    assert generate(engine, ask(tokens))["cached"] == [0]
    assert sidecar.verdicts[-1].allowed


def test_a_lease_renewed_while_a_request_waits_lets_it_in(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    tokens = prompt(16)
    generate(engine, ask(tokens))
    sidecar.renew(-1)
    sidecar.frames.clear()

    def renew() -> None:
        sidecar.wait_for(Open)
        sidecar.renew(3600)

    renewal = threading.Thread(target=renew)
    renewal.start()
    answer = generate(engine, ask(tokens))
    renewal.join()
    assert answer["cached"] == [672]
    assert answer["ttft"][0] < 2.0


@pytest.mark.parametrize(
    ("method", "grant"), [("matched", "good"), ("settle", "bad"), ("open", "good")]
)
def test_a_request_that_cannot_be_judged_reads_no_cache_and_is_not_asked_about_for_ever(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess, method: str, grant: str
) -> None:
    tokens = prompt(17)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    generate(engine, ask(tokens))
    assert generate(engine, ask(tokens))["cached"] == [672]
    engine.ask("sabotage", name=method)
    answer = generate(engine, ask(tokens, grant), *[ask(prompt(18 + n, 100)) for n in range(2)])
    engine.ask("mend", name=method)
    assert answer["cached"][0] == 0
    assert answer["outputs"][:1] == expected
    assert answer["seconds"] < 10
    assert engine.ask("drain")["left"] == 0
    assert generate(engine, ask(tokens))["cached"] == [672]


FAULTS: dict[str, tuple[dict[str, Any], int]] = {
    "silent": ({"silent_load": True}, 0),
    "garbage": ({"garbage_load": True}, 0),
    "outside of staging": ({"outside_part": True}, 0),
    "killed at the start": ({"kill_at": 0}, 0),
    "killed in the middle": ({"kill_at": 1}, 0),
    "late from the start": ({"late_parts_from": 0}, 0),
    "late from the middle": ({"late_parts_from": 1}, 256),
    "lease over at the end": ({"late_done": True}, 0),
    "failed at the start": ({"fail_load_at": 0}, 0),
    "failed in the middle": ({"fail_load_at": 1}, 256),
    "fenced at the start": ({"fence_at": 0}, 0),
    "fenced in the middle": ({"fence_at": 1}, 0),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_load_that_goes_wrong_is_recomputed_and_reported_once(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess, fault: str
) -> None:
    tokens = prompt(1000 + list(FAULTS).index(fault))
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    store(engine, sidecar, tokens)
    before = engine.ask("statistics")["transfers"]
    sidecar.faults = Faults(**FAULTS[fault][0])
    answer = generate(engine, ask(tokens))
    after = engine.ask("statistics")["transfers"]
    assert answer["outputs"] == expected
    assert len(answer["loads"]) == 1
    assert after["loads"] - before["loads"] == 1
    assert after["loads_failed"] - before["loads_failed"] == 1
    sidecar.faults = Faults()
    assert engine.ask("connected")["open"]
    settle(engine)
    assert engine.ask("generate", requests=[{"tokens": [5, 6]}], max_tokens=2)["used_pages"] == 0
    healed = generate(engine, ask(tokens))
    assert healed["outputs"] == expected
    assert healed["cached"] == [672]


def test_an_aborted_load_is_reported_once_and_its_pages_are_free(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    tokens = prompt(7)
    store(engine, sidecar, tokens)
    sidecar.faults.silent_load = True
    answer = engine.ask("abort", request=ask(tokens), until="WAITING_FOR_REMOTE_KVS")
    assert answer["statuses"] == ["WAITING_FOR_REMOTE_KVS"]
    assert len(answer["loads"]) == 1
    assert answer["left"] == 0
    assert answer["used_pages"] == 0
    assert sidecar.wait_for(Cancel)


def test_a_request_aborted_while_it_waits_for_its_verdict_leaves_nothing(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    sidecar.faults.silent_verdict = True
    answer = engine.ask("abort", request=ask(prompt(8)), until="WAITING")
    assert answer["loads"] == []
    assert (answer["left"], answer["used_pages"]) == (0, 0)


def test_without_a_sidecar_the_engine_computes_and_with_a_new_one_it_restores(
    engine: EngineProcess, sidecar: SidecarDouble, plain: EngineProcess
) -> None:
    tokens = prompt(9)
    expected = generate(plain, ask(tokens, None, None))["outputs"]
    store(engine, sidecar, tokens)
    assert generate(engine, ask(tokens))["cached"] == [672]
    sidecar.close()
    away = generate(engine, ask(tokens))
    assert away["cached"] == [0], "a local hit that no one can fence is no hit"
    assert away["outputs"] == expected
    assert away["ttft"][0] < 1.0, "a sidecar that is gone is not waited for"
    sidecar.restart()
    assert engine.ask("connected")["open"]
    settle(engine)
    back = generate(engine, ask(tokens))
    assert back["cached"] == [672]
    assert back["outputs"] == expected


def test_pages_are_not_held_for_a_sidecar_that_gives_no_slots(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    sidecar.faults.silent_slots = True
    generate(engine, ask(prompt(10)))
    answer = engine.ask("drain")
    assert (answer["left"], answer["used_pages"]) == (0, 0)
    assert 0.5 < answer["seconds"] < 5


def test_a_save_that_finds_little_room_is_finished_in_rounds(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    sidecar.faults.slots_max = 1
    have = len(sidecar.blocks)
    generate(engine, ask(prompt(11)), max_tokens=60)
    assert engine.ask("drain")["left"] == 0
    assert sidecar.wait(lambda: len(sidecar.blocks) == have + 3)


def test_what_depends_on_more_than_token_ids_is_not_cached(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    request = {**ask(prompt(12, 64)), "sampling": {"prompt_logprobs": 1}}
    generate(engine, request)
    assert not sidecar.seen(Open)
    generate(engine, ask(prompt(12, 64)))
    assert len(sidecar.seen(Open)) == 1
    assert "requests with prompt logprobs are not cached" in engine.log()


def test_every_request_is_ended_towards_the_sidecar(
    engine: EngineProcess, sidecar: SidecarDouble
) -> None:
    generate(engine, *[ask(prompt(20 + number, 100)) for number in range(4)])
    assert sidecar.wait_for(Finish, 4)


def test_the_engines_process_holds_nothing_but_the_connector(engine: EngineProcess) -> None:
    assert engine.ask("statistics")["modules"] == []


def test_preempted_requests_keep_their_outputs(
    home: Path, tiny: Path, plain: EngineProcess
) -> None:
    """Room for 54 pages, three prompts of 16, and each grows to 20: some are preempted."""
    prompts = [prompt(300 + number, 500) for number in range(4)]
    expected = generate(plain, *[ask(t, None, None) for t in prompts], max_tokens=120)["outputs"]
    with SidecarDouble(home / "tight") as sidecar, EngineProcess(home) as engine:
        engine.ask(
            "start", model=str(tiny), extra=connector(home, sidecar),
            num_gpu_blocks_override=55, **{**TINY, "max_model_len": 1024},
        )  # fmt: skip
        requests = [ask(tokens) for tokens in prompts]
        first = generate(engine, *requests, max_tokens=120)
        assert first["preemptions"] > 0
        assert first["outputs"] == expected
        assert engine.ask("drain")["used_pages"] == 0
        assert engine.ask("reset")["done"]
        second = generate(engine, *requests, max_tokens=120)
        assert second["outputs"] == expected
        assert second["preemptions"] > 0
        assert len(second["loads"]) >= 4
        assert engine.ask("drain")["used_pages"] == 0
        # The same with a lease that ends at the first preemption: who resumes is judged anew.
        assert engine.ask("reset")["done"]
        third = generate(engine, *requests, max_tokens=120, lapse_at_preemption=True)
        assert third["outputs"] == expected
        assert third["preemptions"] > 0
        assert_resumed_without_cache(third["asked"])
        assert engine.ask("drain")["used_pages"] == 0


def assert_resumed_without_cache(asked: list[tuple[str, int, int | None]]) -> None:
    """Each of these is first told to ask again, and next has no local hit and loads nothing."""
    first = {key: answer for key, _, answer in reversed(asked)}
    last = {key: (local, answer) for key, local, answer in asked}
    assert first
    assert set(first.values()) == {None}
    assert set(last.values()) == {(0, 0)}
    assert any(local > 0 for _, local, _ in asked), "there was a local hit to be refused"


@pytest.mark.parametrize(
    ("change", "policy", "named"),
    [
        ({"sockets": "x"}, "recompute", "sockets"),
        ({}, "fail", "kv_load_failure_policy"),
    ],
)
def test_wrong_settings_stop_the_start_and_are_named(
    home: Path, tiny: Path, double: SidecarDouble, change: dict[str, Any], policy: str, named: str
) -> None:
    extra = {**connector(home, double), **change}
    with EngineProcess(home) as engine:
        answer = engine.attempt("start", model=str(tiny), extra=extra, policy=policy, **TINY)
        assert "error" in answer
        assert named in engine.log() + answer["error"]


def test_an_engine_that_cannot_be_described_runs_without_any_prefix_cache(
    home: Path, tiny: Path, double: SidecarDouble
) -> None:
    with EngineProcess(home) as engine:
        engine.ask(
            "start", model=str(tiny), extra=connector(home, double), load_format="dummy", **TINY
        )
        tokens = prompt(13)
        generate(engine, ask(tokens))
        assert generate(engine, ask(tokens))["cached"] == [0]
        assert "strongroom is off" in engine.log()


@pytest.mark.skipif(not MODEL.exists(), reason="no model (make model)")
def test_a_small_language_model_answers_the_same_after_its_engine_was_restarted(
    home: Path,
) -> None:
    facts = " ".join(f"Vault number {n} holds {n * 7 % 23} gold bars." for n in range(1, 140))
    question = facts + " Question: how many gold bars does vault number 3 hold? Answer:"
    options = {"model": str(MODEL), "max_model_len": 4096}
    with SidecarDouble(home / "smol", staging_bytes=256 * 1024 * 1024) as sidecar:
        with EngineProcess(home) as engine:
            engine.ask("start", extra=connector(home, sidecar), **options)
            tokens = engine.ask("tokenize", text=question)["tokens"]
            engine.ask("generate", requests=[{"tokens": tokens[:64]}], max_tokens=2)
            cold = generate(engine, ask(tokens), max_tokens=24)
            assert engine.ask("drain")["left"] == 0
        assert sidecar.wait(lambda: len(sidecar.blocks) == -(-(len(tokens) // 32 * 32) // 256))
        with EngineProcess(home) as engine:
            engine.ask("start", extra=connector(home, sidecar), **options)
            engine.ask("generate", requests=[{"tokens": tokens[:64]}], max_tokens=2)
            warm = generate(engine, ask(tokens), max_tokens=24)
    assert len(tokens) > 1600
    assert cold["cached"] == [0]
    assert warm["cached"] == [(len(tokens) - 1) // 32 * 32]
    assert warm["outputs"] == cold["outputs"]
    assert warm["text"] == cold["text"]
    assert warm["ttft"][0] * 5 < cold["ttft"][0]
