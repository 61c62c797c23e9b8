"""Our bytes are the bytes of docs/format.md, as a second, independent script makes them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strongroom.blocks import ROOT_PARENT, BlockId, block_id, pack_tokens, prompt_digest
from strongroom.derivation import (
    block_key,
    engine_salt,
    namespace_keys,
    namespace_secret,
    salt_digest,
)
from strongroom.identity import NO_ADAPTER, CacheIdentity, ComponentId, LabelSet
from strongroom.kvformat import KVFormat, Layout
from strongroom.log import InvalidationKind, LogEntry, genesis
from strongroom.wire.frames import (
    Digests,
    Failure,
    Hello,
    KVFormatFields,
    LayoutFields,
    Open,
    Part,
    Ping,
    SidecarFrame,
    Slot,
    Slots,
    Verdict,
)
from strongroom.wire.framing import decode_engine_frame, decode_sidecar_frame, encode_frame

SCRIPT = Path(__file__).parents[1] / "vectors" / "make_vectors.py"
GOLDEN = SCRIPT.with_name("vectors.json")


@pytest.fixture(scope="module")
def golden() -> Any:
    return json.loads(GOLDEN.read_text())


def component(pair: str) -> ComponentId:
    return ComponentId(pair * 16)


TENANT = ComponentId("0123456789abcdef0123456789abcdef")
FULL = CacheIdentity(
    tenant=TENANT,
    model=component("11"),
    adapter=component("22"),
    tokenizer=component("33"),
    template=component("44"),
    policy=component("55"),
    labels=LabelSet(
        frozenset((component("ff"), component("06"))),
        frozenset((component("a0"), component("0a"), component("77"))),
    ),
)
PLAIN = CacheIdentity(
    tenant=TENANT,
    model=component("11"),
    adapter=NO_ADAPTER,
    tokenizer=component("33"),
    template=component("44"),
    policy=component("55"),
    labels=LabelSet(frozenset(), frozenset((component("a0"),))),
)
FORMAT = KVFormat("float32", "none", 30, 3, 64, "gqa", "default:100000")


def test_the_script_imports_nothing_of_ours_and_makes_the_file_again() -> None:
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported <= {"base64", "hashlib", "hmac", "json", "sys"}
    again = subprocess.run(
        [sys.executable, "-I", str(SCRIPT)], capture_output=True, text=True, check=True
    )
    assert again.stdout == GOLDEN.read_text()


def test_identities_encode_to_the_golden_bytes(golden: Any) -> None:
    assert PLAIN.encode().hex() == golden["identity_plain"]
    assert FULL.encode().hex() == golden["identity_full"]
    assert FULL.namespace == golden["fingerprint_full"]


def test_format_and_layout_digest_to_the_golden_bytes(golden: Any) -> None:
    assert FORMAT.digest().hex() == golden["format_digest"]
    layout = Layout("vllm-cpu-packed", "vec", 32, (49152, 49152), 2, 1, 1, 0)
    assert layout.digest().hex() == golden["layout_digest"]


def test_keys_and_salt_derive_to_the_golden_bytes(golden: Any) -> None:
    secrets = [bytes.fromhex(text) for text in golden["component_secrets"]]
    assert len(secrets) == len(FULL.components())
    secret = namespace_secret(secrets, FULL.fingerprint())
    assert secret.hex() == golden["namespace_secret"]
    keys = namespace_keys(secret, FORMAT.digest())
    assert keys.lookup.hex() == golden["lookup_key"]
    assert keys.data.hex() == golden["data_key"]
    assert engine_salt(secret) == golden["engine_salt"]
    assert salt_digest(engine_salt(secret)) == golden["salt_digest"]


def test_block_ids_and_block_keys_are_golden(golden: Any) -> None:
    packed = pack_tokens(golden["tokens"])
    assert packed.hex() == golden["packed_tokens"]
    assert prompt_digest(packed).hex() == golden["prompt_digest"]
    lookup = bytes.fromhex(golden["lookup_key"])
    first = block_id(lookup, ROOT_PARENT, 0, packed)
    assert first.hex() == golden["block_first"]
    second = block_id(lookup, first, 32, packed[:64], b"image:" + bytes(8))
    assert second.hex() == golden["block_second"]
    key = block_key(
        bytes.fromhex(golden["data_key"]), BlockId(first), bytes.fromhex(golden["block_salt"])
    )
    assert key.key.hex() == golden["block_key"]
    assert key.commitment.hex() == golden["block_commitment"]


def test_a_log_entry_hashes_to_the_golden_bytes(golden: Any) -> None:
    epoch = "00ff00ff00ff00ff"
    entry = LogEntry(
        epoch=epoch,
        seq=1,
        prev=genesis(epoch),
        at="2026-01-31T12:00:00.000000Z",
        kind=InvalidationKind.COMPONENTS,
        tenant=TENANT,
        components=(component("ff"),),
    )
    assert entry.prev == golden["log_genesis"]
    assert entry.hash() == golden["log_entry_hash"]


HELLO = Hello(
    version=1,
    engine="engine-0",
    role="worker",
    token="t" * 43,
    digests=Digests("aa" * 32, "bb" * 32, "cc" * 32),
    format=KVFormatFields("float32", "none", 30, 3, 64, "gqa", "default:100000"),
    layout=LayoutFields("vllm-cpu-packed", "vec", 32, (49152, 49152), 2, 1, 1, 0),
)


def test_frames_have_the_golden_bytes(golden: Any) -> None:
    packed = pack_tokens(golden["tokens"])
    opened = Open("r-1", "a.b.c", golden["engine_salt"], packed, "none", b"image:" + bytes(8))
    for name, sent in (("ping", Ping(5)), ("hello", HELLO), ("open", opened)):
        raw = golden[f"frame_{name}"]
        assert encode_frame(sent).hex() == raw
        assert decode_engine_frame(bytes.fromhex(raw)[4:]) == sent
    answers: dict[str, SidecarFrame] = {
        "verdict": Verdict("r-1", allowed=True, tokens=1696, save=False),
        "part": Part(7, 0, 256, 1 << 20, (1 << 40) + 1),
        "slots": Slots(9, (Slot(0, 256, 0), Slot(256, 288, 4096))),
        "failure": Failure("protocol", "frame too large", "frame", 1 << 23),
        "failure_bare": Failure("refused", "no"),
    }
    for name, answer in answers.items():
        raw = golden[f"frame_{name}"]
        assert encode_frame(answer).hex() == raw
        assert decode_sidecar_frame(bytes.fromhex(raw)[4:]) == answer
