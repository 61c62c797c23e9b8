"""What one engine's requests take of a sidecar, by tenant: places, memory, and turns on the loop.

Rules:
- A request belongs to the tenant that its grant names. That is read before anything is verified,
  to know whose turn it is, and for nothing else: a grant that turns out to be forged costs the
  tenant that it named one turn, and until its verdict a place and its prompt's bytes. What names
  nobody has one part together. (Who is known by an earlier use alone would not do: a request's
  first grant is always new, and all such would stand in one queue, behind any flood of them.)
- Places (`requests_max`) and prompt bytes (`prompt_bytes_max`) are held from the `Open` on, until
  the request is over and nobody works out its verdict: one that was cancelled while it waited for
  that still has its prompt. While there is some left whoever asks may take; after that every
  tenant still finds its part (`sidecar.engines.holdings`), and is refused beyond it.
- The socket is read on while verdicts are worked out: a tenant's `Open` waits behind that
  tenant's own alone, of which `opens_max` are worked out at once.
- Verdicts begin one in a turn of the event loop (`Steps`), over all engines and gateways, in
  start-time fair order by tenant. Between two of them the loop does what else has come: a
  thousand `Open`s that came together hold up no other tenant's lookup, and no load.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from dataclasses import dataclass
from typing import Final

import msgspec

from sidecar.engines.holdings import Holdings, PerTenant
from sidecar.lookup.request import Request
from storage.fair import Fair, FairStatistics, Weight, equal_weights
from strongroom.errors import Misuse
from strongroom.identity import ComponentId, parse_component_id
from strongroom.limits import GRANT_BYTES_MAX

_VERDICT_BYTES: Final = 64 * 1024
"""What a verdict costs beside its prompt's bytes, in bytes that would be hashed meanwhile."""
_NAMED_MAX: Final = 1024


class _Named(msgspec.Struct):
    tenant: str


_decoder: Final = msgspec.json.Decoder(_Named)


class Names:
    """The tenants that grants name. A grant comes more than once, and is read once."""

    def __init__(self) -> None:
        self._known: dict[int, ComponentId | None] = {}

    def tenant(self, grant: str) -> ComponentId | None:
        """Whom the grant names, verified or not; None where it names nobody."""
        key = hash(grant)  # keyed by the interpreter: nobody finds two that have the same
        if key not in self._known:
            if len(self._known) >= _NAMED_MAX:
                self._known.clear()
            self._known[key] = _named(grant)
        return self._known[key]


def _named(grant: str) -> ComponentId | None:
    if len(grant) > GRANT_BYTES_MAX:
        return None
    try:
        _, payload, _ = grant.split(".")
        payload_bytes = base64.urlsafe_b64decode(payload + "==")
        return parse_component_id(_decoder.decode(payload_bytes).tenant)
    except (ValueError, msgspec.DecodeError, Misuse, RecursionError):
        return None


class Steps:
    """Verdicts begin one in a turn of the event loop, fair by tenant."""

    def __init__(self, weight: Weight = equal_weights) -> None:
        # Bounded by the requests and hints that wait, each of which holds a place.
        self._turns = Fair("verdicts", 1, waiting_max=sys.maxsize, weight=weight)

    async def begin(self, tenant: ComponentId | None, prompt_bytes: int) -> None:
        """Return when the verdict on such a prompt may begin: at once when nobody waits."""
        await self._turns.begin(tenant or _NOBODY, _VERDICT_BYTES + prompt_bytes)
        # Whoever was let in goes on before this runs.
        asyncio.get_running_loop().call_soon(self._turns.end)

    def begin_now(self, tenant: ComponentId | None, prompt_bytes: int) -> bool:
        """Whether the verdict may begin in this very turn of the loop: none has begun in it, and
        nobody waits.
        """
        if not self._turns.begin_now(tenant or _NOBODY, _VERDICT_BYTES + prompt_bytes):
            return False
        asyncio.get_running_loop().call_soon(self._turns.end)
        return True

    def statistics(self) -> FairStatistics:
        """A frozen snapshot."""
        return self._turns.statistics()


_NOBODY: Final = ComponentId("")
"""Whose turn it is when a grant names nobody."""


@dataclass(slots=True)
class _Place:
    tenant: ComponentId | None
    nbytes: int
    judging: bool = False
    over: bool = False


class Opens:
    """The open requests of one engine. Used on the event loop's thread."""

    def __init__(
        self,
        requests_max: int,
        prompt_bytes_max: int,
        opens_max: int,
        weight: Weight = equal_weights,
    ) -> None:
        self._requests = Holdings(requests_max, weight)
        self._bytes = Holdings(prompt_bytes_max, weight)
        self._places: dict[Request, _Place] = {}
        self.judging = PerTenant(opens_max)
        self.refused = 0
        """Requests that were beyond their tenant's part, since start."""

    def __len__(self) -> int:
        return len(self._places)

    def take(self, tenant: ComponentId | None, nbytes: int) -> bool:
        """Hold a place and so many bytes, for a request that `keep` is told of at once; false,
        with nothing held, where it is not the tenant's to take.
        """
        if not self._requests.take(tenant):
            self.refused += 1
            return False
        if not self._bytes.take(tenant, nbytes):
            self._requests.give_back(tenant)
            self.refused += 1
            return False
        return True

    def keep(self, request: Request, tenant: ComponentId | None, nbytes: int) -> None:
        """What was taken is held until `over(request)`, and as long as it is judged."""
        self._places[request] = _Place(tenant, nbytes)

    def judging_later(self, request: Request, judging: asyncio.Task[None]) -> None:
        """A task works out its verdict, and has its prompt until it ends, however it does."""
        place = self._places.get(request)
        if place is not None:
            place.judging = True
            judging.add_done_callback(lambda _: self._judged(request))

    def over(self, request: Request) -> None:
        """The engine has said that it is over, or its verdict was negative. Repeatable."""
        place = self._places.get(request)
        if place is not None:
            place.over = True
            self._free(request, place)

    def _judged(self, request: Request) -> None:
        place = self._places.get(request)
        if place is not None:
            place.judging = False
            self._free(request, place)

    def _free(self, request: Request, place: _Place) -> None:
        if place.over and not place.judging:
            del self._places[request]
            self._requests.give_back(place.tenant)
            self._bytes.give_back(place.tenant, place.nbytes)
