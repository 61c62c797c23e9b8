"""A second look at every release, from other sources than the first.

The first defence is the key path: the lookup key finds only blocks of the grant's namespaces,
`storage.envelope` compares the record's header with the context, GCM binds it, the store's
retired set and the request's fence stop what was invalidated. If all that is right, what is
looked at here is never wrong, and both counters stay zero for ever. Rules:
- Whose block it is: the tenant and namespace in the header that was opened, against the grant's
  own claims. Not against the context or the chain that the load was made of.
- Whether it was deleted: the components that the grant names for that namespace, against the
  components that verified log entries named, kept here apart from the log's state; and the
  namespaces that the service has said are gone.
- No `await` between this look and the release. What is caught is not released, is counted, and
  trips its breaker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Protocol

from sidecar.degrade.breaker import Crossed, Deleted
from sidecar.degrade.conditions import Condition
from sidecar.record.events import EventKind, Events
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId, NamespaceId
from strongroom.log import LogEntry

REMEMBERED_MAX: Final = 200_000


class Noted(Protocol):
    """Who is told (`Breakers`)."""

    def check(self) -> None: ...

    def note(self, condition: Condition, bad: float, cases: float) -> None: ...


class Sentry:
    """Looks at releases. Bounded: the oldest deletions are forgotten first, long after the
    requests that they could concern were fenced.
    """

    def __init__(self, breakers: Noted, events: Events) -> None:
        self._breakers = breakers
        self._events = events
        self._dead: OrderedDict[str, None] = OrderedDict()
        self.looks = 0
        self.crossed = 0
        self.deleted = 0

    def heard(self, entry: LogEntry) -> None:
        """A verified entry of the invalidation log."""
        self._remember(entry.components)

    def gone(self, namespaces: Collection[NamespaceId]) -> None:
        """The service has said that these can never be leased again."""
        self._remember(namespaces)

    def look(self, grant: GrantClaims, tenant: ComponentId, namespace: NamespaceId) -> None:
        """Right before a release: `tenant` and `namespace` are what the opened header says.

        Raises `Crossed`, `Deleted`, or `Halted` while a trip refuses every release.
        """
        self._breakers.check()
        self.looks += 1
        position = next(
            (i for i, span in enumerate(grant.spans) if span.namespace == namespace), None
        )
        if tenant != grant.tenant or position is None:
            self.crossed += 1
            self._detected(Condition.CROSS_TENANT, grant)
            raise Crossed("a block of another tenant or namespace")
        dead = self._dead
        if namespace in dead or any(part in dead for part in grant.components(position)):
            self.deleted += 1
            self._detected(Condition.READABLE, grant)
            raise Deleted("a block of something deleted")

    def _detected(self, condition: Condition, grant: GrantClaims) -> None:
        self._events.emit(EventKind.DETECTED, subject=condition.value, tenant=grant.tenant)
        self._breakers.note(condition, 1, 1)

    def _remember(self, names: Collection[str]) -> None:
        for name in names:
            self._dead[name] = None
        while len(self._dead) > REMEMBERED_MAX:
            self._dead.popitem(last=False)
