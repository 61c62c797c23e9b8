"""Taking a sidecar's report into the catalogue.

Rules:
- A report carries amounts, not differences: said twice it changes nothing.
- Reports of a run are numbered from 0. Number 0 forgets what an earlier run said. One that was
  taken already is passed over; where one is missing, or the run is unknown here (a restored
  database), the sidecar is told to begin anew, and says everything again.
- What is not known here, or is not the sidecar's to hold, is left out without a word.
- It has a transaction of its own, which takes neither the log's row nor the audit's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import now
from service.grants.models import Namespace
from service.residency.models import ResidencyReport, ResidencyRow, Tier
from service.sidecars.store import Enrolled
from strongroom.control import RESIDENCY_ROWS_MAX, ResidencyAmount, ResidencyRequest
from strongroom.errors import Misuse
from strongroom.identity import NamespaceId, parse_namespace_id

COUNT_MAX: Final = 2**62
_RUN: Final = re.compile(r"[0-9a-f]{32}")
_IN_MAX: Final = 500

Amounts = dict[tuple[Tier, NamespaceId], ResidencyAmount]


async def take(session: AsyncSession, sidecar: Enrolled, report: ResidencyRequest) -> bool:
    """Take a report; True asks the sidecar to begin anew. Raises `Misuse`."""
    amounts = _checked(report)
    last = await session.get(ResidencyReport, sidecar.id, with_for_update=True)
    if last is not None and last.run == report.run and report.number <= last.number:
        return False
    if report.number == 0:
        await session.execute(delete(ResidencyRow).where(ResidencyRow.sidecar == sidecar.id))
    elif last is None or last.run != report.run or report.number != last.number + 1:
        return True
    if last is None:
        last = ResidencyReport(sidecar=sidecar.id)
        session.add(last)
    last.run, last.number, last.at = report.run, report.number, now()
    await session.flush()
    await _put(session, sidecar, amounts)
    return False


def _checked(report: ResidencyRequest) -> Amounts:
    if len(report.amounts) > RESIDENCY_ROWS_MAX:
        raise Misuse("too many amounts at once", field="amounts", limit=RESIDENCY_ROWS_MAX)
    if _RUN.fullmatch(report.run) is None:
        raise Misuse("a run is 32 hexadecimal digits", field="run", limit=32)
    if not 0 <= report.number <= COUNT_MAX:
        raise Misuse("a number starts at 0", field="number", limit=COUNT_MAX)
    amounts: Amounts = {}
    for amount in report.amounts:
        if amount.tier not in list(Tier):
            raise Misuse("unknown tier", field="tier", limit=", ".join(Tier))
        if not (0 <= amount.blocks <= COUNT_MAX and 0 <= amount.bytes <= COUNT_MAX):
            raise Misuse("an amount is negative or too large", field="amounts", limit=COUNT_MAX)
        namespace = parse_namespace_id(amount.namespace, "namespace")
        amounts[Tier(amount.tier), namespace] = amount
    return amounts


async def _put(session: AsyncSession, sidecar: Enrolled, amounts: Amounts) -> None:
    by_tier: dict[Tier, list[NamespaceId]] = defaultdict(list)
    for tier, namespace in amounts:
        by_tier[tier].append(namespace)
    for tier, namespaces in by_tier.items():
        for start in range(0, len(namespaces), _IN_MAX):
            await session.execute(
                delete(ResidencyRow).where(
                    ResidencyRow.sidecar == sidecar.id,
                    ResidencyRow.tier == tier,
                    ResidencyRow.namespace.in_(namespaces[start : start + _IN_MAX]),
                )
            )
    theirs = await _may_hold(session, sidecar, sorted({name for _, name in amounts}))
    rows = [
        {
            "sidecar": sidecar.id,
            "namespace": namespace,
            "tier": tier,
            "blocks": amount.blocks,
            "bytes": amount.bytes,
        }
        for (tier, namespace), amount in amounts.items()
        if amount.blocks and namespace in theirs
    ]
    if rows:
        await session.execute(insert(ResidencyRow), rows)


async def _may_hold(
    session: AsyncSession, sidecar: Enrolled, namespaces: Sequence[NamespaceId]
) -> set[NamespaceId]:
    found: set[NamespaceId] = set()
    for start in range(0, len(namespaces), _IN_MAX):
        rows = await session.execute(
            select(Namespace.id, Namespace.tenant).where(
                Namespace.id.in_(namespaces[start : start + _IN_MAX])
            )
        )
        found |= {namespace for namespace, tenant in rows if sidecar.may_lease(tenant)}
    return found
