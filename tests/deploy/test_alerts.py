"""deploy/alerts.yml: every metric that it names is exposed, and every gauge has a rule."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sidecar.operations.metrics import exposition
from strongroom.wire.frames import Report
from tests.sidecar.harness import World, harness

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((Path(__file__).parents[2] / "deploy" / "alerts.yml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
]
IDS = [rule["alert"] for rule in RULES]
NAMED = re.compile(r"\bstrongroom_[a-z0-9_]+")
GAUGES = {
    "host_bytes": "strongroom_tier_used_bytes",
    "pinned_bytes": "strongroom_tier_pinned_bytes",
    "nvme_free": "strongroom_nvme_file_system_free_bytes",
    "queue_depth": "strongroom_queue_depth",
    "prefetch_pending": "strongroom_prefetch_pending",
    "transfers_in_flight": "strongroom_transfers_in_flight",
    "orphan_records": "strongroom_orphan_records",
    "tenant_quota": "strongroom_tenant_used_bytes",
    "engine_free_pages": "strongroom_engine_free_pages",
}
ACTIONS = ("stop prefetch", "lower the longest cached context", "recompute", "engine-only")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of every sample of a sidecar that has an engine, a tenant and a quota."""

    async def exposed() -> set[str]:
        async with harness(tmp_path_factory.mktemp("a"), tenant_host_bytes=4096 * 64) as world:
            return await _exposed(world)

    return asyncio.run(exposed())


async def _exposed(world: World) -> set[str]:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, range(1000, 1300))
    await engine.compute_and_save("saved", granted)
    await world.sidecar.store.flush()
    world.sidecar.watch.reported("engine-a", Report(100, 60, 1, 0, 10, 10, 10, 0))
    text = exposition(world.sidecar.snapshot()).decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_every_metric_that_a_rule_names_has_samples(
    rule: dict[str, Any], samples: set[str]
) -> None:
    named = set(NAMED.findall(rule["expr"]))
    assert named
    assert named <= samples


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_every_rule_says_what_is_seen_and_what_to_do(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]
    assert annotations["summary"].endswith(".")
    assert annotations["action"]
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}


@pytest.mark.parametrize("gauge", GAUGES)
def test_every_gauge_has_a_rule_that_reads_it_and_names_an_action(gauge: str) -> None:
    rules = [rule for rule in RULES if rule["labels"]["gauge"] == gauge]
    assert any(GAUGES[gauge] in NAMED.findall(rule["expr"]) for rule in rules)
    text = " ".join(rule["annotations"]["action"] for rule in rules).lower()
    assert any(action in text for action in ACTIONS)


def test_every_action_is_named_and_no_rule_twice() -> None:
    text = " ".join(rule["annotations"]["action"] for rule in RULES).lower()
    assert all(action in text for action in ACTIONS)
    assert len(set(IDS)) == len(IDS)
