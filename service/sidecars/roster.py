"""The live sidecars, read once for all the calls and streams that ask at one time.

Nothing is remembered: whoever asks gets what a read brought that began after it asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import select

from policy.signing import decode_base64url
from service.db.session import Sessions
from service.log.together import Together
from service.sidecars.models import Sidecar, SidecarTenant
from service.sidecars.store import Enrolled


class Roster:
    """Used from the event loop only."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._asked: set[str] = set()
        self._together: Together[Mapping[str, Enrolled]] = Together(self._read)

    async def find(self, sidecar: str) -> Enrolled | None:
        """The live sidecar with this id, or None."""
        self._asked.add(sidecar)
        return (await self._together.get()).get(sidecar)

    async def is_current(self, proven: Enrolled) -> bool:
        """Whether the sidecar is live, and the key that proved the call still its key."""
        found = await self.find(proven.id)
        return found is not None and found.signing_key == proven.signing_key

    async def _read(self) -> Mapping[str, Enrolled]:
        asked, self._asked = self._asked, set()
        try:
            async with self._sessions() as session:
                rows = (
                    await session.execute(
                        select(
                            Sidecar.id,
                            Sidecar.name,
                            Sidecar.signing_key,
                            Sidecar.hpke_key,
                            Sidecar.every_tenant,
                        ).where(Sidecar.id.in_(asked), Sidecar.revoked_at.is_(None))
                    )
                ).all()
                tenants: dict[str, set[str]] = defaultdict(set)
                for sidecar, tenant in await session.execute(
                    select(SidecarTenant.sidecar, SidecarTenant.tenant).where(
                        SidecarTenant.sidecar.in_([row.id for row in rows if not row.every_tenant])
                    )
                ):
                    tenants[sidecar].add(str(tenant))
        except BaseException:
            self._asked |= asked
            raise
        return {
            row.id: Enrolled(
                row.id,
                row.name,
                decode_base64url(row.signing_key, "signing_key"),
                decode_base64url(row.hpke_key, "hpke_key"),
                None if row.every_tenant else frozenset(tenants[row.id]),
            )
            for row in rows
        }
