"""Where signed heads are kept outside the database: a folder, or a bucket of an object store.

Rules:
- One head, one name: the tree's size, twenty digits wide, so that names order as sizes do.
- What is kept is never written over. The same head again changes nothing; another one under the
  name of a kept one is a fork, and is refused as `Corrupt`.
- A folder: the file is written aside, synced, linked to its name (which fails if there is one), and
  the folder is synced. A bucket: `PUT` with `If-None-Match: *`.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from strongroom.errors import Corrupt, Misuse, Unavailable

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

_NAME: Final = re.compile(r"(\d{20})\.jws")
_FORK: Final = "another head of this size was kept: the audit log has forked"


class HeadKeeper(Protocol):
    """Keeps heads for good."""

    async def put(self, size: int, jws: str) -> None:
        """Keep a head. Raises `Corrupt` if another of that size is kept, `Unavailable`."""

    async def latest(self) -> str | None:
        """The head of the largest tree that is kept. Raises `Unavailable`."""


def name_of(size: int) -> str:
    """The name of the head of a tree of `size` events."""
    return f"{size:020d}.jws"


class Folder:
    """A folder, 0700 if it is made here. Best on another disk, mounted append-only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def put(self, size: int, jws: str) -> None:
        """Keep a head."""
        try:
            await asyncio.to_thread(self._put, name_of(size), jws)
        except OSError as error:
            raise Unavailable("the folder of audit heads cannot be written") from error

    async def latest(self) -> str | None:
        """The head of the largest tree."""
        try:
            return await asyncio.to_thread(self._latest)
        except OSError as error:
            raise Unavailable("the folder of audit heads cannot be read") from error

    def _put(self, name: str, jws: str) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._path / f".{secrets.token_hex(8)}.part"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(jws)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(aside, self._path / name)
            except FileExistsError:
                if (self._path / name).read_text() != jws:
                    raise Corrupt(_FORK) from None
        finally:
            aside.unlink()
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _latest(self) -> str | None:
        if not self._path.exists():
            return None
        names = [path.name for path in self._path.iterdir() if _NAME.fullmatch(path.name)]
        return (self._path / max(names)).read_text() if names else None


class Bucket:
    """A prefix of a bucket that speaks S3. Needs `obstore`, the optional extra `s3`."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    async def put(self, size: int, jws: str) -> None:
        """Keep a head."""
        from obstore import exceptions  # noqa: PLC0415 - an optional extra

        try:
            await self._store.put_async(name_of(size), jws.encode(), mode="create")
        except exceptions.AlreadyExistsError:
            if await self._read(name_of(size)) != jws:
                raise Corrupt(_FORK) from None
        except exceptions.BaseError as error:
            raise Unavailable("the bucket of audit heads cannot be written") from error

    async def latest(self) -> str | None:
        """The head of the largest tree."""
        from obstore import exceptions  # noqa: PLC0415

        found: list[str] = []
        try:
            async for page in self._store.list():
                found += [str(each["path"]) for each in page]
        except exceptions.BaseError as error:
            raise Unavailable("the bucket of audit heads cannot be read") from error
        names = [name for name in found if _NAME.fullmatch(name)]
        return await self._read(max(names)) if names else None

    async def _read(self, name: str) -> str:
        from obstore import exceptions  # noqa: PLC0415

        try:
            result = await self._store.get_async(name)
            return bytes(await result.bytes_async()).decode()
        except exceptions.BaseError as error:
            raise Unavailable("the bucket of audit heads cannot be read") from error


def open_bucket(url: str, endpoint: str = "") -> Bucket:
    """The bucket at `s3://bucket/prefix`; credentials come from the environment.

    Raises `Misuse` for another URL, `Unavailable` without the library.
    """
    if not url.startswith("s3://"):
        raise Misuse("audit heads go to s3://bucket/prefix", field="audit_heads_url")
    try:
        from obstore.store import S3Store  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise Unavailable(
            "a bucket needs obstore: install strongroom[s3] beside the service",
            field="audit_heads_url",
        ) from error
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    config: S3Config = {"endpoint": endpoint} if endpoint else {}
    plain = endpoint.startswith("http://")
    store = S3Store(
        bucket, prefix=prefix or None, config=config, client_options={"allow_http": plain}
    )
    return Bucket(store)
