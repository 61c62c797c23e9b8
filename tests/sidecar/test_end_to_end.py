"""The whole path on a real socket and real storage: save, hit, restore, restart."""

from __future__ import annotations

from pathlib import Path

from tests.sidecar.harness import block_content, harness

PROMPT = list(range(1000, 1300))


async def test_what_was_saved_is_hit_and_restored_bit_for_bit(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        first = await engine.open("r1", granted)
        assert (first.allowed, first.tokens, first.save) == (True, 0, True)
        assert await engine.save("r1", PROMPT, 288) == 5
        second = await engine.open("r2", world.control.grant(world.tenant, PROMPT))
        assert (second.allowed, second.tokens) == (True, 288)
        restored = await engine.load("r2", 0, 288)
        assert restored.ok
        assert restored.blocks == {
            start: block_content(PROMPT, start, min(start + 64, 288)) for start in range(0, 288, 64)
        }
        assert world.sidecar.statistics().staging_used_bytes == 0


async def test_a_restarted_sidecar_restores_from_nvme(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        await engine.compute_and_save("r1", world.control.grant(world.tenant, PROMPT))
        control, tenant = world.control, world.tenant
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        verdict = await engine.open("r1", control.grant(tenant, PROMPT))
        assert verdict.tokens == 288
        restored = await engine.load("r1", 0, 288)
        assert restored.ok
        assert restored.blocks[64] == block_content(PROMPT, 64, 128)
