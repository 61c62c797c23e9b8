"""How much one key lease carries: a grant that could never be leased is not issued.

A lease names every component of every namespace, and labels only grow along a prompt, so its
size grows with the square of the spans that differ in their labels. Per namespace a signed
lease has 35 bytes of JSON a component, 96 of its own, and 43 for the sealed secret; base64url
makes four bytes of three. `COMPONENTS_MAX` leaves room for `SPANS_MAX` namespaces in a JWS of
`policy.signing.JWS_BYTES_MAX` (1 MiB): 140 B * 1024 + 35 B * 18 000 + 1 KiB < 3/4 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strongroom.errors import Misuse
from strongroom.identity import CacheIdentity

COMPONENTS_MAX: Final = 18_000
"""Components of all distinct namespaces of one grant together, counted once for each."""


def check_lease_size(identities: Iterable[CacheIdentity]) -> None:
    """Raise `Misuse` when the namespaces of `identities` do not fit into one lease."""
    total = sum(len(identity.components()) for identity in dict.fromkeys(identities))
    if total > COMPONENTS_MAX:
        raise Misuse(
            "the spans differ too often in their labels for one lease: put those of one document "
            "or group together, or ask for a shorter prompt",
            field="spans",
            limit=COMPONENTS_MAX,
        )
