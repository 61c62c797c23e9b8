"""Grants whose signature was verified here already.

A request's grant comes more than once: with a hint, with the request, and again when the engine
preempted it. Rules:
- A grant is known by the SHA-256 of its exact bytes. What is remembered is that the pinned key
  signed these bytes and what they say, and nothing else: time is judged at every use, and so are
  log position, life, prompt, engine and salt, by whoever asks.
- What is remembered is dropped whenever the log has moved, and bounded in number. Refusals are
  not remembered.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from policy import grants
from policy.signing import Verifier
from strongroom.grant import GrantClaims
from strongroom.log import LogHead

SEEN_MAX: Final = 1024


class SeenGrants:
    """Verifies grants of one issuer. Used on the event loop alone."""

    def __init__(self, verifier: Verifier, issuer: str, *, seen_max: int = SEEN_MAX) -> None:
        self._verifier = verifier
        self._issuer = issuer
        self._seen_max = seen_max
        self._seen: OrderedDict[bytes, GrantClaims] = OrderedDict()
        self._head: LogHead | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def verify(self, token: str, *, now_s: int, head: LogHead | None) -> GrantClaims:
        """The claims of a good grant, or `Refused`; `head` is where the log stands."""
        if head != self._head:
            self._seen.clear()
            self._head = head
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        claims = self._seen.get(digest)
        if claims is None:
            claims = grants.verify(token, self._verifier, now_s=now_s, issuer=self._issuer)
            self._seen[digest] = claims
            if len(self._seen) > self._seen_max:
                self._seen.popitem(last=False)
        else:
            grants.check_time(claims, now_s=now_s)
        return claims
