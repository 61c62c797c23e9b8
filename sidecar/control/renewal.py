"""The sidecar exchanges its keys while it serves, when they are old.

Rules:
- The new keys are on disk before the service hears of them, and stay there as `next` until they
  are the ones in force: a crash at any point leaves keys that the service knows.
- Where an answer was lost, the new keys are asked first: the service says whether they are in
  force. Only if they are not, the old ones ask for the change again.
- Calls under way end first, and new ones wait for the answer: each is proven by one key, before
  or after. That takes one round trip; the lease in force goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from sidecar.control.client import ControlClient
from sidecar.state import StateDirectory
from strongroom.errors import Refused, StrongroomError

_log = logging.getLogger(__name__)
_LOOK_S_MAX: Final = 3600.0


class Renewal:
    """Keeps one sidecar's keys younger than `key_life_s`."""

    def __init__(self, client: ControlClient, state: StateDirectory, key_life_s: float) -> None:
        self._client = client
        self._state = state
        self._key_life_s = key_life_s

    async def run(self) -> None:
        """Look now and then whether the keys are old; until cancelled."""
        while True:
            if self._state.has_next_keys() or self._age_s() >= self._key_life_s:
                try:
                    await self.renew()
                except StrongroomError as error:
                    # What was not settled is settled in the next round.
                    _log.warning("the keys are not exchanged yet: %s", error.code)
            await asyncio.sleep(min(_LOOK_S_MAX, self._key_life_s / 10))

    async def renew(self) -> None:
        """Exchange the keys once. Raises `Unavailable` or `Refused`, and can be called again."""
        doubtful = self._state.has_next_keys()
        new = self._state.next_keys()
        if doubtful:
            try:
                await self._client.change_keys(new, proven_by_new=True)
            except Refused:
                await self._client.change_keys(new, proven_by_new=False)
        else:
            await self._client.change_keys(new, proven_by_new=False)
        self._state.take_next_keys()
        _log.warning("keys exchanged: %s is in force", new.signer.kid)

    def _age_s(self) -> float:
        return time.time() - self._written()

    def _written(self) -> float:
        path: Path = self._state.signing_key_path
        return path.stat().st_mtime
