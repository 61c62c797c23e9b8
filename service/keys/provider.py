"""What keeps key-encryption keys: a protocol, so that a KMS can stand where the files do.

A KEK has an id (a tenant's component id, or `INSTALLATION`) and versions that only grow.
`wrap` uses the newest version; `unwrap` any that is not destroyed. What is wrapped is bound
to its owner: unwrapping under another owner or another KEK fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from strongroom.errors import Unavailable
from strongroom.identity import ComponentId

INSTALLATION: Final = "installation"
"""The KEK of what belongs to no tenant."""

_INFO_KEY: Final = "strongroom.key_provider"


@dataclass(frozen=True, slots=True, repr=False)
class Wrapped:
    """A secret under version `version` of a KEK."""

    version: int
    blob: bytes


class KeyProvider(Protocol):
    """Keys that never leave it. Raises `Missing` for a version that is not there (any more)."""

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

    async def destroy(self, kek: str, version: int) -> None:
        """Make `version` unusable for ever. Idempotent."""
        ...


def session_info(provider: KeyProvider) -> dict[str, KeyProvider]:
    """What `open_database` puts into every session, so that repositories find the provider."""
    return {_INFO_KEY: provider}


def provider_of(session: AsyncSession) -> KeyProvider:
    """The provider that this session was opened with."""
    provider: KeyProvider | None = session.info.get(_INFO_KEY)
    if provider is None:
        raise Unavailable("this database was opened without a key provider")
    return provider
