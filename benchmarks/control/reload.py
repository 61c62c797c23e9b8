"""Other tenants' decisions while one large tenant's policy is loaded and built anew.

The service's own parts: a SQLite database with the tenant's rules, the loader, the thread that
builds. A sample is one uncached decision of another tenant, from where the event loop was asked
for a turn until the answer is there, so that both what the loader does on the loop and what the
builder does beside it are in it. Quiet and loaded stretches are taken in turn.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path
from random import Random  # noqa: TID251 - seeded questions, no secret
from typing import Final

from benchmarks.control.group import GROUP
from benchmarks.control.policy import house, question, rules_of
from benchmarks.rows import Row, ratio
from benchmarks.suite import Bench, Suite
from policy.decide import decide
from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from service.app import create_app
from service.auth.actor import SYSTEM
from service.db.migrate import upgrade_async
from service.policies.source import load
from service.rules.models import Origin
from service.rules.store import Edition
from service.runtime import Runtime
from service.settings import read_settings
from service.tenancy import store as tenancy
from strongroom.identity import ComponentId

_OTHERS: Final = 8
_MS: Final = 1e3


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    with bench.folder("reload") as folder:
        pairs = asyncio.run(_rounds(bench, folder))
    note = f"a tenant of {bench.scale.reloaded_rules} rules, over and over, on SQLite"
    return [ratio("tenant_reload_other_p99", "ms", pairs, note=note)]


async def _rounds(bench: Bench, folder: Path) -> list[tuple[float, float]]:
    settings = read_settings({}, state_directory=folder)
    await upgrade_async(settings.database)
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    others = [house(number, bench.scale.tenant_rules) for number in range(_OTHERS)]
    pairs = []
    async with app.router.lifespan_context(app):
        large = await _large(runtime, bench.scale.reloaded_rules)
        for number in bench.rounds("reload"):
            random = Random(number)
            quiet = await _p99_ms(others, bench, random, asyncio.Event(), least=1)
            reloaded = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                reloading = tasks.create_task(_reload(runtime, large, reloaded))
                loaded = await _p99_ms(others, bench, random, reloaded, least=bench.scale.decisions)
                reloading.cancel()
            pairs.append((loaded, quiet))
    return pairs


async def _large(runtime: Runtime, rules: int) -> ComponentId:
    async with runtime.changes.begin(SYSTEM) as change:
        tenant = (await tenancy.create_tenant(change.session, "large")).id
        edition = Edition(change, tenant, Origin.EDITED)
        for rule in rules_of(_OTHERS, rules):
            await edition.add(rule)
        await edition.close(await tenancy.bump_revision(change.session, tenant))
    return tenant


async def _reload(runtime: Runtime, tenant: ComponentId, once: asyncio.Event) -> None:
    """Load and build the tenant's policy until cancelled."""
    while True:
        async with runtime.database.snapshots() as session:
            source = await load(session, await tenancy.get_tenant(session, tenant))
        await runtime.enforcers.policy_of(source)
        once.set()


async def _p99_ms(
    others: list[TenantEnforcer], bench: Bench, random: Random, done: asyncio.Event, *, least: int
) -> float:
    """Of `decisions` samples; when loaded, of as many more as one whole reload takes."""
    samples = []
    for number in count():
        enough = number >= max(least, bench.scale.decisions)
        if enough and (least == 1 or done.is_set()):
            break
        tenant = number % _OTHERS
        subject, resource = question(random, tenant, bench.scale.tenant_rules)
        begun = time.perf_counter()
        await asyncio.sleep(0)
        decide(others[tenant], subject, Permission.GROUP_READ, resource)
        samples.append(time.perf_counter() - begun)
    return sorted(samples)[int(len(samples) * 0.99)] * _MS


SUITE = Suite(
    name="control-reload",
    summary="other tenants' decisions while a large tenant's policy is loaded anew",
    rows=("tenant_reload_other_p99",),
    measure=measure,
    group=GROUP,
)
