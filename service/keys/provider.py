"""What keeps key-encryption keys: a protocol, so that a KMS can stand where the files do.

A KEK has an id (a tenant's component id, or `INSTALLATION`) and versions that only grow.
`wrap` uses the newest version; `unwrap` any that is not destroyed. What is wrapped is bound
to its owner: unwrapping under another owner or another KEK fails.

What each provider must keep is one suite, `tests/service/test_key_providers.py`:
- `Missing`: the version is not there (any more). `Corrupt`: it is there and does not open this.
- `Unavailable`: it cannot be said now (sealed, unreachable, refused); nothing is concluded of it.
- A destroyed version never opens anything again, not even for whoever keeps the provider: what
  can be taken back (a disabled key, a floor of versions) is no destruction.
- No message and no `repr` holds a secret, a key or a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from strongroom.canonical import encode_fields
from strongroom.errors import Misuse, Unavailable
from strongroom.identity import ComponentId

INSTALLATION: Final = "installation"
"""The KEK of what belongs to no tenant."""

_INFO_KEY: Final = "strongroom.key_provider"
_KEK: Final = re.compile(r"installation|[0-9a-f]{32}")
_CONTEXT_MAGIC: Final = b"SRKC"


@dataclass(frozen=True, slots=True, repr=False)
class Wrapped:
    """A secret under version `version` of a KEK."""

    version: int
    blob: bytes


class KeyProvider(Protocol):
    """Keys that never leave it. Raises `Missing` for a version that is not there (any more)."""

    @property
    def kind(self) -> str:
        """Which provider it is, as settings and status name it."""
        ...

    async def prepare(self) -> None:
        """Make the installation's KEK if it is new, before the first request is served."""
        ...

    async def create(self, kek: str) -> int:
        """Add a version to `kek`, the first one if it is new, and return its number."""
        ...

    async def newest(self, kek: str) -> int | None:
        """The number of the version that `wrap` uses; None if the KEK is not there."""
        ...

    async def wrap(self, kek: str, owner: ComponentId, secret: bytearray) -> Wrapped:
        """Wrap `secret` for `owner` under the newest version."""
        ...

    async def unwrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> bytearray:
        """The secret in a buffer that the caller overwrites. Raises `Corrupt` on a wrong tag."""
        ...

    async def rewrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> Wrapped:
        """The same secret under the newest version; a KMS does it without showing it to us."""
        ...

    async def destroy(self, kek: str, version: int) -> None:
        """Make `version` unusable for ever; the oldest first. Idempotent.

        With the newest version the KEK itself ends.
        """
        ...

    def close(self) -> None:
        """Drop what is held: keys, connections, workers."""
        ...


def check_kek(kek: str) -> None:
    """Raise `Misuse` for what is no KEK's name: it becomes part of paths and of foreign names."""
    if _KEK.fullmatch(kek) is None:
        raise Misuse("a KEK is named by a tenant's id or `installation`", field="kek")


def context_of(kek: str, owner: ComponentId) -> bytes:
    """What a foreign KMS binds a secret to; it has its own version in what it wraps."""
    return encode_fields(_CONTEXT_MAGIC, 1, ((1, kek.encode()), (2, bytes.fromhex(owner))))


def session_info(provider: KeyProvider) -> dict[str, KeyProvider]:
    """What `open_database` puts into every session, so that repositories find the provider."""
    return {_INFO_KEY: provider}


def provider_of(session: AsyncSession) -> KeyProvider:
    """The provider that this session was opened with."""
    provider: KeyProvider | None = session.info.get(_INFO_KEY)
    if provider is None:
        raise Unavailable("this database was opened without a key provider")
    return provider
