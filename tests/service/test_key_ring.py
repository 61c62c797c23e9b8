"""The local key ring: permissions, binding of wrapped secrets, versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.auth.signing_keys import SERVICE_KEY, TOKEN_KEY, load_signer
from service.keys.provider import INSTALLATION, Wrapped
from service.keys.ring import LocalFileRing
from strongroom.errors import Corrupt, Missing, Misuse
from strongroom.identity import ComponentId, new_component_id

SECRET = bytes(range(32))


async def test_a_wrapped_secret_opens_for_its_owner_alone(ring: LocalFileRing) -> None:
    owner, other = new_component_id(), new_component_id()
    wrapped = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    assert SECRET not in wrapped.blob
    assert await ring.unwrap(INSTALLATION, owner, wrapped) == SECRET
    with pytest.raises(Corrupt):
        await ring.unwrap(INSTALLATION, other, wrapped)


async def test_a_secret_wrapped_for_one_tenant_does_not_open_under_anothers_key(
    ring: LocalFileRing,
) -> None:
    owner = new_component_id()
    one, two = new_component_id(), new_component_id()
    await ring.create(one)
    await ring.create(two)
    wrapped = await ring.wrap(one, owner, bytearray(SECRET))
    assert await ring.unwrap(one, owner, wrapped) == SECRET
    with pytest.raises(Corrupt):
        await ring.unwrap(two, owner, wrapped)


async def test_a_blob_renamed_to_another_version_does_not_open(ring: LocalFileRing) -> None:
    owner = new_component_id()
    wrapped = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    assert await ring.create(INSTALLATION) == 2
    with pytest.raises(Corrupt):
        await ring.unwrap(INSTALLATION, owner, Wrapped(2, wrapped.blob))


@pytest.mark.parametrize("cut", [0, 11, 12, 27, 59])
async def test_a_blob_cut_short_does_not_open(ring: LocalFileRing, cut: int) -> None:
    owner = new_component_id()
    wrapped = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    with pytest.raises(Corrupt):
        await ring.unwrap(INSTALLATION, owner, Wrapped(1, wrapped.blob[:cut]))


async def test_a_new_version_wraps_and_the_old_one_still_opens(ring: LocalFileRing) -> None:
    owner = new_component_id()
    old = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    await ring.create(INSTALLATION)
    new = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    assert (old.version, new.version) == (1, 2)
    assert await ring.unwrap(INSTALLATION, owner, old) == SECRET


async def test_a_destroyed_version_opens_nothing_and_its_file_is_gone(
    ring: LocalFileRing, key_directory: Path
) -> None:
    owner = new_component_id()
    old = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    await ring.create(INSTALLATION)
    new = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    key = (key_directory / "kek-installation-v1.key").read_bytes()
    await ring.destroy(INSTALLATION, 1)
    await ring.destroy(INSTALLATION, 1)
    assert await ring.unwrap(INSTALLATION, owner, new) == SECRET
    with pytest.raises(Missing):
        await ring.unwrap(INSTALLATION, owner, old)
    assert not any(key in path.read_bytes() for path in key_directory.iterdir())


async def test_a_reopened_ring_has_the_same_keys(ring: LocalFileRing, key_directory: Path) -> None:
    owner = new_component_id()
    wrapped = await ring.wrap(INSTALLATION, owner, bytearray(SECRET))
    again = LocalFileRing.open(key_directory)
    assert await again.unwrap(INSTALLATION, owner, wrapped) == SECRET
    again.close()


async def test_a_version_made_by_another_process_is_used(
    ring: LocalFileRing, key_directory: Path
) -> None:
    other = LocalFileRing.open(key_directory)
    assert await other.create(INSTALLATION) == 2
    wrapped = await ring.wrap(INSTALLATION, new_component_id(), bytearray(SECRET))
    assert wrapped.version == 2
    other.close()


async def test_a_kek_is_named_like_no_path(ring: LocalFileRing) -> None:
    with pytest.raises(Misuse):
        await ring.create(ComponentId("../../etc/passwd"))


def test_the_ring_makes_private_files(ring: LocalFileRing, key_directory: Path) -> None:
    load_signer(key_directory, SERVICE_KEY)
    assert key_directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in key_directory.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(
    ring: LocalFileRing, key_directory: Path, mode: int
) -> None:
    key_directory.chmod(mode)
    with pytest.raises(Misuse, match="chmod 0700"):
        LocalFileRing.open(key_directory)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_file_that_others_may_read_is_refused(
    ring: LocalFileRing, key_directory: Path, mode: int
) -> None:
    (key_directory / "kek-installation-v1.key").chmod(mode)
    with pytest.raises(Misuse, match="chmod 0600"):
        LocalFileRing.open(key_directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(ring: LocalFileRing, key_directory: Path) -> None:
    os.chown(key_directory / "kek-installation-v1.key", 12345, 12345)
    with pytest.raises(Misuse, match="chown"):
        LocalFileRing.open(key_directory)


def test_a_link_among_the_keys_is_refused(
    ring: LocalFileRing, key_directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(SECRET)
    (key_directory / TOKEN_KEY).symlink_to(target)
    with pytest.raises(Misuse, match="is a link"):
        load_signer(key_directory, TOKEN_KEY)


def test_a_key_file_cut_short_is_corrupt(ring: LocalFileRing, key_directory: Path) -> None:
    path = key_directory / "kek-installation-v1.key"
    path.write_bytes(SECRET[:31])
    with pytest.raises(Corrupt, match="32 bytes"):
        LocalFileRing.open(key_directory)


def test_the_signing_key_is_the_same_after_a_restart(key_directory: Path) -> None:
    first, again = (load_signer(key_directory, SERVICE_KEY) for _ in range(2))
    token = load_signer(key_directory, TOKEN_KEY)
    assert first.kid == again.kid
    assert first.kid != token.kid
