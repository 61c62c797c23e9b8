"""Nothing that a prompt or its KV said is in any file, log line or message to the service."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from strongroom.blocks import pack_tokens
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import harness

CANARY = b"canary-plaintext-0123456789abcdef"
PROMPT = [int.from_bytes(b"cana", "little")] * 300


async def test_no_plaintext_key_salt_or_token_lies_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content(prompt: list[int], page: int, layer: int, rank: int = 0) -> bytes:
        return (CANARY * 16)[:512]

    monkeypatch.setattr("tests.sidecar.harness.page_content", content)
    caplog.set_level(logging.DEBUG)
    control = FakeControlPlane()
    sent: list[bytes] = []
    original = control.handle_async_request

    async def recorded(request):  # type: ignore[no-untyped-def]
        sent.append(await request.aread())
        return await original(request)

    monkeypatch.setattr(control, "handle_async_request", recorded)
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        granted = control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("w", granted) == 5
        await engine.open("r", granted)
        restored = await engine.load("r", 0, 288)
        assert restored.ok
        assert CANARY in restored.blocks[0]
        await engine.open("denied", granted, salt="wrong")
        await world.sidecar.store.flush()
        token = world.token
        secret = control.secret(granted.namespaces[0])
    needles = {
        "kv": CANARY,
        "tokens": pack_tokens(PROMPT)[:64],
        "salt": granted.salt.encode(),
        "secret": secret,
        "engine token": token.encode(),
    }
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".token"]
    assert any("nvme" in str(path) for path in files)
    haystacks = {str(path): path.read_bytes() for path in files}
    haystacks["log"] = caplog.text.encode()
    haystacks["sent"] = b"\n".join(sent)
    for what, needle in needles.items():
        for where, hay in haystacks.items():
            assert needle not in hay, f"{what} in {where}"
            assert needle.hex().encode() not in hay, f"{what} in {where}"
