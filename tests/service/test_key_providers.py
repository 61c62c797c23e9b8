"""One contract, kept by every key provider: file ring, Vault Transit, AWS KMS.

Vault and KMS are their real clients against servers that speak the real protocols
(`transit_server`, `kms_server`), over sockets.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.keys.aws_kms import AwsKms, KmsPlace
from service.keys.provider import INSTALLATION, KeyProvider, Wrapped
from service.keys.ring import LocalFileRing
from service.keys.transit import TransitPlace, VaultTransit
from strongroom.errors import Corrupt, Missing, Misuse, Overloaded, StrongroomError, Unavailable
from strongroom.identity import new_component_id
from strongroom.private_files import replace_file
from tests.service.kms_server import ACCESS_KEY, REGION, SECRET_KEY, KmsServer, kms_server
from tests.service.transit_server import TransitServer, transit_server

SECRET = bytes(range(200, 232))


@dataclass(frozen=True)
class Held:
    """A provider, another one over the same keys, and what lies where the keys are kept."""

    provider: KeyProvider
    other: KeyProvider
    material: Callable[[], list[bytes]]


@pytest.fixture
def vault() -> Iterator[TransitServer]:
    with transit_server() as server:
        yield server


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[KmsServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with kms_server() as server:
        yield server


def transit_place(vault: TransitServer, folder: Path) -> TransitPlace:
    token_file = folder / "vault.token"
    replace_file(token_file, next(iter(vault.tokens)).encode())
    return TransitPlace(vault.url, token_file)


@pytest.fixture(params=["file_ring", "vault_transit", "aws_kms"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Held]:
    match request.param:
        case "file_ring":
            directory = tmp_path / "keys"
            made = (LocalFileRing.open(directory), LocalFileRing.open(directory))
            held = Held(*made, lambda: [path.read_bytes() for path in directory.iterdir()])
        case "vault_transit":
            vault: TransitServer = request.getfixturevalue("vault")
            place = transit_place(vault, tmp_path)
            held = Held(
                VaultTransit(place),
                VaultTransit(place),
                lambda: [each for name in vault.keys for each in vault.material(name)],
            )
        case _:
            kms: KmsServer = request.getfixturevalue("kms")
            where = KmsPlace(REGION, endpoint=kms.url)
            held = Held(AwsKms(where), AwsKms(where), kms.material)
    assert held.provider.kind == request.param
    yield held
    held.provider.close()
    held.other.close()


async def new_kek(provider: KeyProvider) -> str:
    kek = str(new_component_id())
    assert await provider.newest(kek) is None
    assert await provider.create(kek) == 1
    return kek


async def test_a_wrapped_secret_opens_for_its_owner_alone(held: Held) -> None:
    kek, owner, other = await new_kek(held.provider), new_component_id(), new_component_id()
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    assert SECRET not in wrapped.blob
    assert wrapped.version == 1
    assert len(wrapped.blob) <= 512
    assert await held.provider.unwrap(kek, owner, wrapped) == SECRET
    assert await held.other.unwrap(kek, owner, wrapped) == SECRET
    with pytest.raises(Corrupt):
        await held.provider.unwrap(kek, other, wrapped)


async def test_a_secret_of_one_tenant_does_not_open_under_anothers_key(held: Held) -> None:
    one, two = await new_kek(held.provider), await new_kek(held.provider)
    owner = new_component_id()
    wrapped = await held.provider.wrap(one, owner, bytearray(SECRET))
    with pytest.raises(Corrupt):
        await held.provider.unwrap(two, owner, wrapped)
    with pytest.raises(Corrupt):
        await held.provider.rewrap(two, owner, wrapped)


async def test_wrapping_twice_gives_two_forms(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    first = await held.provider.wrap(kek, owner, bytearray(SECRET))
    assert (await held.provider.wrap(kek, owner, bytearray(SECRET))).blob != first.blob


async def test_a_kek_that_is_not_there_wraps_and_opens_nothing(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    nowhere = str(new_component_id())
    with pytest.raises(Missing):
        await held.provider.wrap(nowhere, owner, bytearray(SECRET))
    with pytest.raises(Missing):
        await held.provider.unwrap(nowhere, owner, wrapped)


async def test_rewrapping_keeps_the_secret_and_takes_the_newest_version(held: Held) -> None:
    kek, owner, other = await new_kek(held.provider), new_component_id(), new_component_id()
    old = await held.provider.wrap(kek, owner, bytearray(SECRET))
    assert await held.other.create(kek) == 2
    assert await held.provider.newest(kek) == 2
    new = await held.provider.rewrap(kek, owner, old)
    assert new.version == 2
    assert new.blob != old.blob
    assert await held.provider.unwrap(kek, owner, new) == SECRET
    assert await held.provider.unwrap(kek, owner, old) == SECRET
    with pytest.raises(Corrupt):
        await held.provider.unwrap(kek, other, new)
    with pytest.raises(Corrupt):
        await held.provider.rewrap(kek, other, old)


async def test_a_form_passed_off_as_another_versions_does_not_open(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    await held.provider.create(kek)
    with pytest.raises(Corrupt):
        await held.provider.unwrap(kek, owner, Wrapped(2, wrapped.blob))


@pytest.mark.parametrize("cut", [0, 1, 12, 30])
async def test_a_form_cut_short_or_changed_does_not_open(held: Held, cut: int) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    with pytest.raises(Corrupt):
        await held.provider.unwrap(kek, owner, Wrapped(1, wrapped.blob[:cut]))
    changed = bytearray(wrapped.blob)
    changed[-20] ^= 1
    with pytest.raises(Corrupt):
        await held.provider.unwrap(kek, owner, Wrapped(1, bytes(changed)))


async def test_a_destroyed_version_opens_nothing_and_no_material_of_it_is_left(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    old = await held.provider.wrap(kek, owner, bytearray(SECRET))
    before = held.material()
    await held.provider.create(kek)
    new = await held.provider.rewrap(kek, owner, old)
    for provider in (held.provider, held.other, held.provider):
        await provider.destroy(kek, 1)
    for provider in (held.provider, held.other):
        assert await provider.unwrap(kek, owner, new) == SECRET
        with pytest.raises(Missing):
            await provider.unwrap(kek, owner, old)
        with pytest.raises(Missing):
            await provider.rewrap(kek, owner, old)
    left = held.material()
    gone = [each for each in before if each not in left]
    assert len(gone) == 1, "one version's material is deleted, not hidden"
    assert await held.provider.create(kek) == 3


async def test_versions_are_destroyed_one_after_another(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    forms = [await held.provider.wrap(kek, owner, bytearray(SECRET))]
    for _ in range(3):
        await held.provider.create(kek)
        forms.append(await held.provider.wrap(kek, owner, bytearray(SECRET)))
    for version in (1, 2, 3):
        await held.provider.destroy(kek, version)
        for form in forms:
            if form.version <= version:
                with pytest.raises(Missing):
                    await held.provider.unwrap(kek, owner, form)
            else:
                assert await held.provider.unwrap(kek, owner, form) == SECRET


async def test_a_kek_ends_with_its_newest_version(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    kept = await new_kek(held.provider)
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    await held.provider.destroy(kek, 1)
    await held.provider.destroy(kek, 1)
    assert await held.provider.newest(kek) is None
    with pytest.raises(Missing):
        await held.provider.unwrap(kek, owner, wrapped)
    assert await held.provider.newest(kept) == 1


async def test_versions_made_at_once_are_all_there(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    made = await asyncio.gather(held.provider.create(kek), held.other.create(kek))
    assert max(made) == 3
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    assert wrapped.version in {2, 3}
    assert await held.other.unwrap(kek, owner, wrapped) == SECRET


async def test_a_kek_is_named_like_no_path(held: Held) -> None:
    owner = new_component_id()
    for name in ("../../etc/passwd", "INSTALLATION", "a" * 31, "x/../y", ""):
        with pytest.raises(Misuse):
            await held.provider.create(name)
        with pytest.raises(Misuse):
            await held.provider.unwrap(name, owner, Wrapped(1, b""))


async def test_what_is_printed_of_a_provider_holds_no_key(held: Held) -> None:
    kek, owner = await new_kek(held.provider), new_component_id()
    wrapped = await held.provider.wrap(kek, owner, bytearray(SECRET))
    printed = f"{held.provider!r} {held.provider} {wrapped!r} {wrapped}".encode()
    for material in (*held.material(), wrapped.blob, SECRET):
        for form in (material, material.hex().encode(), base64.b64encode(material)):
            assert form not in printed


# Vault alone


@pytest.fixture
def transit(vault: TransitServer, tmp_path: Path) -> Iterator[VaultTransit]:
    provider = VaultTransit(transit_place(vault, tmp_path))
    yield provider
    provider.close()


async def test_keys_in_vault_are_derived_and_not_exportable(
    transit: VaultTransit, vault: TransitServer
) -> None:
    await transit.prepare()
    await transit.prepare()
    key = vault.keys[f"strongroom-{INSTALLATION}"]
    assert (key.derived, key.exportable, key.latest) == (True, False, 1)


async def test_rotation_in_vault_never_shows_the_secret(
    transit: VaultTransit, vault: TransitServer
) -> None:
    kek, owner = await new_kek(transit), new_component_id()
    wrapped = await transit.wrap(kek, owner, bytearray(SECRET))
    vault.asked.clear()
    await transit.rewrap(kek, owner, wrapped)
    [asked] = vault.asked
    assert asked.split() == ["POST", f"/v1/transit/rewrap/strongroom-{kek}"]


async def test_a_wrong_token_is_refused_until_the_file_has_a_good_one(
    transit: VaultTransit, vault: TransitServer, tmp_path: Path
) -> None:
    kek, owner = await new_kek(transit), new_component_id()
    wrapped = await transit.wrap(kek, owner, bytearray(SECRET))
    old = vault.tokens.copy()
    vault.tokens = {"s.new"}
    with pytest.raises(Unavailable, match="refuses the token") as refusal:
        await transit.unwrap(kek, owner, wrapped)
    assert not any(token in str(refusal.value) for token in old)
    replace_file(tmp_path / "vault.token", b"s.new\n")
    assert await transit.unwrap(kek, owner, wrapped) == SECRET


async def test_a_sealed_vault_is_unavailable_and_nothing_is_missing(
    transit: VaultTransit, vault: TransitServer
) -> None:
    kek, owner = await new_kek(transit), new_component_id()
    wrapped = await transit.wrap(kek, owner, bytearray(SECRET))
    vault.sealed = True
    with pytest.raises(Unavailable, match="sealed"):
        await transit.unwrap(kek, owner, wrapped)
    with pytest.raises(Unavailable, match="sealed"):
        await transit.newest(kek)
    vault.sealed = False
    assert await transit.unwrap(kek, owner, wrapped) == SECRET


async def test_a_version_that_vault_does_not_know_yet_is_unavailable(
    transit: VaultTransit, vault: TransitServer
) -> None:
    kek, owner = await new_kek(transit), new_component_id()
    await transit.create(kek)
    wrapped = await transit.wrap(kek, owner, bytearray(SECRET))
    vault.keys[f"strongroom-{kek}"].latest = 1
    with pytest.raises(Unavailable, match="does not know this version yet"):
        await transit.unwrap(kek, owner, wrapped)


async def test_a_vault_that_is_away_is_unavailable(tmp_path: Path) -> None:
    replace_file(tmp_path / "vault.token", b"s.x")
    provider = VaultTransit(TransitPlace("http://127.0.0.1:9", tmp_path / "vault.token"))
    with pytest.raises(Unavailable):
        await provider.prepare()
    provider.close()


async def test_a_token_file_that_others_may_read_is_refused(
    transit: VaultTransit, tmp_path: Path
) -> None:
    (tmp_path / "vault.token").chmod(0o644)
    with pytest.raises(Misuse, match="permissions"):
        await transit.prepare()


async def test_a_floor_raised_in_vault_is_not_lowered(
    transit: VaultTransit, vault: TransitServer
) -> None:
    kek = await new_kek(transit)
    for _ in range(3):
        await transit.create(kek)
    key = vault.keys[f"strongroom-{kek}"]
    key.min_decryption = key.min_encryption = 4
    await transit.destroy(kek, 1)
    assert (key.min_decryption, key.min_encryption, key.min_available) == (4, 4, 2)


# KMS alone


@pytest.fixture
def aws(kms: KmsServer) -> Iterator[AwsKms]:
    provider = AwsKms(KmsPlace(REGION, endpoint=kms.url))
    yield provider
    provider.close()


async def test_rotation_in_kms_never_shows_the_secret(aws: AwsKms, kms: KmsServer) -> None:
    kek, owner = await new_kek(aws), new_component_id()
    wrapped = await aws.wrap(kek, owner, bytearray(SECRET))
    kms.asked.clear()
    await aws.rewrap(kek, owner, wrapped)
    assert "ReEncrypt" in kms.asked
    assert "Decrypt" not in kms.asked


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("AccessDeniedException", Unavailable),
        ("DisabledException", Unavailable),
        ("KeyUnavailableException", Unavailable),
        ("ThrottlingException", Overloaded),
        ("KMSInvalidStateException", Missing),
    ],
)
async def test_a_refusal_of_kms_is_told_by_what_it_means(
    aws: AwsKms, kms: KmsServer, fault: str, expected: type[StrongroomError]
) -> None:
    kek, owner = await new_kek(aws), new_component_id()
    wrapped = await aws.wrap(kek, owner, bytearray(SECRET))
    kms.fault = fault
    with pytest.raises(expected):
        await aws.unwrap(kek, owner, wrapped)
    kms.fault = None
    assert await aws.unwrap(kek, owner, wrapped) == SECRET


async def test_wrong_credentials_are_refused(
    aws: AwsKms, kms: KmsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await aws.prepare()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    thief = AwsKms(KmsPlace(REGION, endpoint=kms.url))
    with pytest.raises(Unavailable, match="InvalidSignatureException"):
        await thief.newest(INSTALLATION)
    thief.close()
    assert await aws.newest(INSTALLATION) == 1


# The extras


@pytest.mark.parametrize(
    ("library", "extra", "build"),
    [
        ("hvac", "vault", lambda: VaultTransit(TransitPlace("http://127.0.0.1:9", Path("t")))),
        ("boto3", "aws", lambda: AwsKms(KmsPlace(REGION))),
    ],
)
def test_a_missing_extra_says_what_to_install(
    library: str, extra: str, build: Callable[[], KeyProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Misuse, match=rf"pip install 'strongroom\[{extra}\]'"):
        build()
