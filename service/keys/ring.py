"""The embedded key provider: KEK versions as files in the key directory.

A wrapped secret is `nonce (12) ‖ AES-256-GCM(secret) ‖ tag (16)`; the AAD names the KEK, its
version and the owner, so that a blob moved to another row or another ring does not open.
Files are read once, when the ring is opened or a version is first met; writing one goes
through a single worker thread, so that the event loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from service.keys import files
from service.keys.provider import INSTALLATION, Wrapped, check_kek
from strongroom.canonical import encode_fields
from strongroom.errors import Conflict, Corrupt, Missing
from strongroom.identity import ComponentId

NONCE_BYTES: Final = 12
_AAD_MAGIC: Final = b"SRKW"
_FILE: Final = re.compile(r"kek-(installation|[0-9a-f]{32})-v([1-9][0-9]*)\.key")

_T = TypeVar("_T")


class LocalFileRing:
    """`KeyProvider` over a directory. Open it with `LocalFileRing.open`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ciphers: dict[tuple[str, int], AESGCM] = {}
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="key-ring")

    def __repr__(self) -> str:
        return f"LocalFileRing({str(self._directory)!r}, versions={len(self._ciphers)})"

    @property
    def kind(self) -> str:
        return "file_ring"

    @classmethod
    def open(cls, directory: Path) -> LocalFileRing:
        """Check the directory, read every version, and make the installation's KEK if new.

        Raises `Misuse` for permissions that are too wide or a foreign owner.
        """
        files.prepare_directory(directory)
        ring = cls(directory)
        for path in directory.iterdir():
            named = _FILE.fullmatch(path.name)
            if named is not None:
                ring._load(named[1], int(named[2]))
        if ring._newest(INSTALLATION) is None:
            ring._create(INSTALLATION)
        return ring

    async def prepare(self) -> None:
        """Nothing: opening the ring has made the installation's key."""

    async def create(self, kek: str) -> int:
        """Add a version, on disk before it is used."""
        check_kek(kek)
        return await self._on_disk(lambda: self._create(kek))

    async def newest(self, kek: str) -> int | None:
        """The newest version on disk: another process of the installation may have added it."""
        check_kek(kek)
        return await self._on_disk(lambda: self._newest(kek))

    async def wrap(self, kek: str, owner: ComponentId, secret: bytearray) -> Wrapped:
        """Wrap `secret` under the newest version."""
        version = await self.newest(kek)
        if version is None:
            raise Missing("there is no such key-encryption key", field="kek")
        cipher = await self._cipher(kek, version)
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Wrapped(version, nonce + cipher.encrypt(nonce, secret, _aad(kek, version, owner)))

    async def unwrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> bytearray:
        """The secret, in a buffer of its own."""
        check_kek(kek)
        cipher = await self._cipher(kek, wrapped.version)
        nonce, sealed = wrapped.blob[:NONCE_BYTES], wrapped.blob[NONCE_BYTES:]
        secret = bytearray(max(0, len(sealed) - 16))
        try:
            cipher.decrypt_into(nonce, sealed, _aad(kek, wrapped.version, owner), secret)
        except (InvalidTag, ValueError) as error:
            # decrypt_into leaves plaintext behind on a wrong tag.
            secret[:] = bytes(len(secret))
            raise Corrupt("a wrapped secret does not open", field="component") from error
        return secret

    async def rewrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> Wrapped:
        """Open and wrap again; the secret is in a buffer that is overwritten."""
        secret = await self.unwrap(kek, owner, wrapped)
        try:
            return await self.wrap(kek, owner, secret)
        finally:
            secret[:] = bytes(len(secret))

    async def destroy(self, kek: str, version: int) -> None:
        """Forget the version and overwrite its file."""
        check_kek(kek)
        self._ciphers.pop((kek, version), None)
        await self._on_disk(lambda: files.destroy(self._path(kek, version)))

    def close(self) -> None:
        """Drop the keys and stop the worker."""
        self._ciphers.clear()
        self._disk.shutdown(wait=True)

    async def _cipher(self, kek: str, version: int) -> AESGCM:
        cipher = self._ciphers.get((kek, version))
        if cipher is None:
            cipher = await self._on_disk(lambda: self._load(kek, version))
        return cipher

    async def _on_disk(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _path(self, kek: str, version: int) -> Path:
        return self._directory / f"kek-{kek}-v{version}.key"

    def _load(self, kek: str, version: int) -> AESGCM:
        cipher = AESGCM(files.read(self._path(kek, version)))
        self._ciphers[kek, version] = cipher
        return cipher

    def _newest(self, kek: str) -> int | None:
        versions = [
            int(named[2])
            for path in self._directory.iterdir()
            if (named := _FILE.fullmatch(path.name)) is not None and named[1] == kek
        ]
        return max(versions, default=None)

    def _create(self, kek: str) -> int:
        while True:
            version = (self._newest(kek) or 0) + 1
            key = secrets.token_bytes(files.KEY_BYTES)
            try:
                files.create(self._path(kek, version), key)
            except Conflict:
                continue  # Another process took this number.
            self._ciphers[kek, version] = AESGCM(key)
            return version


def _aad(kek: str, version: int, owner: ComponentId) -> bytes:
    return encode_fields(
        _AAD_MAGIC,
        1,
        ((1, kek.encode()), (2, version.to_bytes(4, "little")), (3, bytes.fromhex(owner))),
    )
