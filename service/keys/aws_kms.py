"""AWS KMS as the key provider, through `boto3`.

Rules:
- One version of a KEK is one KMS key, found by the alias `alias/<prefix>/<kek>/v<version>`;
  `alias/<prefix>/<kek>` is the newest. KMS's own rotation keeps every old version for ever, which
  is the opposite of what is needed here.
- Its key material is imported: drawn here, sealed to KMS's import key, overwritten. Only imported
  material can be deleted at once (`DeleteImportedKeyMaterial`); a key of KMS's own making takes
  at least seven days and can be taken back until then, so no erasure would be final in a day.
- The encryption context names KEK and owner. Rotating is `ReEncrypt`: the secret never leaves KMS.
- Credentials come from AWS's usual chain (role, profile); nothing of them is kept here.
- A secret passes through Python strings in JSON on its way (docs/threat-model.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key

from service.keys.calls import CALLS_MAX, Calls
from service.keys.provider import INSTALLATION, Wrapped, check_kek
from strongroom.errors import Corrupt, Missing, Misuse, Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId

_KEY_BYTES: Final = 32
_DELETION_DAYS: Final = 7
"""The least that KMS allows for the empty key that is left."""
_GONE: Final = frozenset(("NotFoundException",))
_UNUSABLE: Final = frozenset(("KMSInvalidStateException",))
_FOREIGN: Final = frozenset(("InvalidCiphertextException", "IncorrectKeyException"))
_BUSY: Final = frozenset(("ThrottlingException", "LimitExceededException", "RequestLimitExceeded"))

_T = TypeVar("_T")


class Kms(Protocol):
    """What is used of boto3's KMS client, which has no types of its own."""

    def create_key(self, **given: Any) -> Any: ...
    def get_parameters_for_import(self, **given: Any) -> Any: ...
    def import_key_material(self, **given: Any) -> Any: ...
    def delete_imported_key_material(self, **given: Any) -> Any: ...
    def schedule_key_deletion(self, **given: Any) -> Any: ...
    def update_key_description(self, **given: Any) -> Any: ...
    def create_alias(self, **given: Any) -> Any: ...
    def update_alias(self, **given: Any) -> Any: ...
    def delete_alias(self, **given: Any) -> Any: ...
    def describe_key(self, **given: Any) -> Any: ...
    def encrypt(self, **given: Any) -> Any: ...
    def decrypt(self, **given: Any) -> Any: ...
    def re_encrypt(self, **given: Any) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KmsPlace:
    """Which KMS, and where in it. `endpoint` None: that of the region."""

    region: str
    prefix: str = "strongroom"
    endpoint: str | None = None
    ca_file: str | None = None
    timeout_s: float = 5.0


class AwsKms:
    """`KeyProvider` over AWS KMS."""

    def __init__(self, place: KmsPlace) -> None:
        self._place = place
        self._errors, self._kms = _connect(place)
        self._calls = Calls("aws-kms")

    def __repr__(self) -> str:
        return f"AwsKms({self._place.region!r}, prefix={self._place.prefix!r})"

    @property
    def kind(self) -> str:
        return "aws_kms"

    async def prepare(self) -> None:
        """Make the installation's key if it is new; raises `Unavailable` without KMS."""
        if await self.newest(INSTALLATION) is None:
            await self.create(INSTALLATION)

    async def create(self, kek: str) -> int:
        """A new KMS key with material drawn here, under the next free alias."""
        check_kek(kek)

        def work() -> int:
            first = version = (self._newest(kek) or 0) + 1
            key = self._make_key(kek, version)
            while not self._name_key(self._alias(kek, version), key):
                version += 1  # Another process took this number.
            if version != first:
                self._kms.update_key_description(KeyId=key, Description=_description(kek, version))
            self._point(self._alias(kek), key)
            return version

        return await self._call(work)

    async def newest(self, kek: str) -> int | None:
        """The version of the key that the KEK's own alias points to."""
        check_kek(kek)
        return await self._call(lambda: self._newest(kek))

    async def wrap(self, kek: str, owner: ComponentId, secret: bytearray) -> Wrapped:
        """Encrypt under the newest version."""
        check_kek(kek)

        def work() -> Wrapped:
            version = self._newest(kek)
            if version is None:
                raise Missing("there is no such key-encryption key", field="kek")
            answer = self._kms.encrypt(
                KeyId=self._alias(kek, version),
                Plaintext=bytes(secret),
                EncryptionContext=_context(kek, version, owner),
            )
            return Wrapped(version, bytes(answer["CiphertextBlob"]))

        return await self._call(work)

    async def unwrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> bytearray:
        """Decrypt with the key of that version and no other."""
        check_kek(kek)

        def work() -> bytearray:
            answer = self._kms.decrypt(
                KeyId=self._alias(kek, wrapped.version),
                CiphertextBlob=wrapped.blob,
                EncryptionContext=_context(kek, wrapped.version, owner),
            )
            return bytearray(answer["Plaintext"])

        return await self._call(work)

    async def rewrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> Wrapped:
        """KMS's own re-encryption."""
        check_kek(kek)

        def work() -> Wrapped:
            version = self._newest(kek)
            if version is None:
                raise Missing("there is no such key-encryption key", field="kek")
            answer = self._kms.re_encrypt(
                CiphertextBlob=wrapped.blob,
                SourceKeyId=self._alias(kek, wrapped.version),
                SourceEncryptionContext=_context(kek, wrapped.version, owner),
                DestinationKeyId=self._alias(kek, version),
                DestinationEncryptionContext=_context(kek, version, owner),
            )
            return Wrapped(version, bytes(answer["CiphertextBlob"]))

        return await self._call(work)

    async def destroy(self, kek: str, version: int) -> None:
        """Delete the version's material at once, and the empty key when KMS allows it."""
        check_kek(kek)

        def work() -> None:
            found = self._describe(self._alias(kek, version))
            if found is None:
                return
            ends = self._newest(kek) == version
            key = found["KeyId"]
            if found["KeyState"] != "PendingDeletion":
                self._kms.delete_imported_key_material(KeyId=key)
                self._kms.schedule_key_deletion(KeyId=key, PendingWindowInDays=_DELETION_DAYS)
            if ends:
                self._kms.delete_alias(AliasName=self._alias(kek))

        await self._call(work)

    def close(self) -> None:
        """End the worker threads and the client's connections."""
        self._calls.close()
        self._kms.close()

    def _alias(self, kek: str, version: int | None = None) -> str:
        name = f"alias/{self._place.prefix}/{kek}"
        return name if version is None else f"{name}/v{version}"

    def _newest(self, kek: str) -> int | None:
        found = self._describe(self._alias(kek))
        return None if found is None else int(str(found["Description"]).rsplit(" v", 1)[1])

    def _describe(self, alias: str) -> dict[str, Any] | None:
        try:
            metadata: dict[str, Any] = self._kms.describe_key(KeyId=alias)["KeyMetadata"]
        except self._errors.ClientError as error:
            if _code(error) in _GONE:
                return None
            raise
        return metadata

    def _make_key(self, kek: str, version: int) -> str:
        made = self._kms.create_key(
            Description=_description(kek, version),
            KeySpec="SYMMETRIC_DEFAULT",
            KeyUsage="ENCRYPT_DECRYPT",
            Origin="EXTERNAL",
        )
        key = str(made["KeyMetadata"]["KeyId"])
        wanted = self._kms.get_parameters_for_import(
            KeyId=key, WrappingAlgorithm="RSAES_OAEP_SHA_256", WrappingKeySpec="RSA_3072"
        )
        public = load_der_public_key(wanted["PublicKey"])
        if not isinstance(public, RSAPublicKey):
            raise Unavailable("KMS gave no RSA key to import with", field="kms_region")
        material = bytearray(secrets.token_bytes(_KEY_BYTES))
        try:
            sealed = public.encrypt(
                bytes(material), OAEP(MGF1(hashes.SHA256()), hashes.SHA256(), None)
            )
        finally:
            material[:] = bytes(len(material))
        self._kms.import_key_material(
            KeyId=key,
            ImportToken=wanted["ImportToken"],
            EncryptedKeyMaterial=sealed,
            ExpirationModel="KEY_MATERIAL_DOES_NOT_EXPIRE",
        )
        return key

    def _name_key(self, alias: str, key: str) -> bool:
        try:
            self._kms.create_alias(AliasName=alias, TargetKeyId=key)
        except self._errors.ClientError as error:
            if _code(error) == "AlreadyExistsException":
                return False
            raise
        return True

    def _point(self, alias: str, key: str) -> None:
        if not self._name_key(alias, key):
            self._kms.update_alias(AliasName=alias, TargetKeyId=key)

    async def _call(self, work: Callable[[], _T]) -> _T:
        return await self._calls.run(lambda: self._typed(work))

    def _typed(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except StrongroomError:
            raise
        except self._errors.ClientError as error:
            raise _refusal(_code(error)) from error
        except (self._errors.BotoCoreError, OSError, KeyError, ValueError) as error:
            raise Unavailable("KMS does not answer as it should", field="kms_region") from error


def _connect(place: KmsPlace) -> tuple[Any, Kms]:
    try:
        import boto3  # noqa: PLC0415 - an optional extra
        import botocore.config  # noqa: PLC0415
        import botocore.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise Misuse(
            "the key provider aws_kms needs boto3: pip install 'strongroom[aws]'",
            field="key_provider",
        ) from error
    config = botocore.config.Config(
        connect_timeout=place.timeout_s,
        read_timeout=place.timeout_s,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=CALLS_MAX,
    )
    kms: Kms = boto3.client(
        "kms",
        region_name=place.region,
        endpoint_url=place.endpoint,
        verify=place.ca_file,
        config=config,
    )
    return botocore.exceptions, kms


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _refusal(code: str) -> StrongroomError:
    if code in _GONE | _UNUSABLE:
        # Pending deletion or without material: destroyed, as only `destroy` does it.
        return Missing("this version of the key-encryption key is gone", field="kek")
    if code in _FOREIGN:
        return Corrupt("a wrapped secret does not open", field="component")
    if code in _BUSY:
        return Overloaded("KMS asks for fewer requests", field="kms_region")
    return Unavailable(f"KMS refuses: {code}", field="kms_region")


def _description(kek: str, version: int) -> str:
    return f"strongroom {kek} v{version}"


def _context(kek: str, version: int, owner: ComponentId) -> dict[str, str]:
    return {"strongroom:kek": kek, "strongroom:version": str(version), "strongroom:owner": owner}
