"""HashiCorp Vault's Transit engine as the key provider, through `hvac`.

Rules:
- A KEK is one Transit key, `<prefix>-<kek>`: AES-256-GCM, derived, never exportable. The context
  of the derivation names KEK and owner, so that a blob moved to another row does not open. (AAD
  would do too, but `rewrap` does not take it in every release.)
- Rotating is Vault's `rewrap`: the secret never leaves it.
- Destroying a version is `trim`, which deletes its key material. Raising `min_decryption_version`
  alone only hides it: whoever may configure the key could lower it again. With the newest
  version the whole key is deleted.
- The token is read from a private file, as a Vault agent writes it, and read again when it is
  refused. Proxies and tokens of the environment are not used.
- A secret passes through Python strings in JSON on its way (docs/threat-model.md).
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from service.keys.calls import Calls
from service.keys.provider import INSTALLATION, Wrapped, check_kek, context_of
from strongroom.errors import Corrupt, Missing, Misuse, Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId
from strongroom.private_files import read_private

_KEY_TYPE: Final = "aes256-gcm96"
_TOO_OLD: Final = "too old"
_TOO_NEW: Final = "too new"

_T = TypeVar("_T")


class Transit(Protocol):
    """What is used of `hvac`'s Transit client, which has no types of its own."""

    def read_key(self, name: str, mount_point: str) -> Any: ...
    def create_key(
        self, name: str, *, key_type: str, derived: bool, exportable: bool, mount_point: str
    ) -> Any: ...
    def rotate_key(self, name: str, mount_point: str) -> Any: ...
    def update_key_configuration(
        self,
        name: str,
        *,
        min_decryption_version: int | None = None,
        min_encryption_version: int | None = None,
        deletion_allowed: bool | None = None,
        mount_point: str,
    ) -> Any: ...
    def trim_key(self, name: str, min_version: int, mount_point: str) -> Any: ...
    def delete_key(self, name: str, mount_point: str) -> Any: ...
    def encrypt_data(self, name: str, *, plaintext: str, context: str, mount_point: str) -> Any: ...
    def decrypt_data(
        self, name: str, *, ciphertext: str, context: str, mount_point: str
    ) -> Any: ...
    def rewrap_data(self, name: str, *, ciphertext: str, context: str, mount_point: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class TransitPlace:
    """Which Vault, and where in it."""

    address: str
    token_file: Path
    mount: str = "transit"
    prefix: str = "strongroom"
    namespace: str | None = None
    ca_file: Path | None = None
    timeout_s: float = 5.0


class VaultTransit:
    """`KeyProvider` over Vault's Transit engine."""

    def __init__(self, place: TransitPlace) -> None:
        self._place = place
        self._hvac = _library()
        self._calls = Calls("vault")
        self._clients = threading.local()
        """One client a thread: their HTTP sessions are not for several."""

    def __repr__(self) -> str:
        return f"VaultTransit({self._place.address!r}, mount={self._place.mount!r})"

    @property
    def kind(self) -> str:
        return "vault_transit"

    async def prepare(self) -> None:
        """Make the installation's key if it is new; raises `Unavailable` without Vault."""
        if await self.newest(INSTALLATION) is None:
            await self.create(INSTALLATION)

    async def create(self, kek: str) -> int:
        """A new key, or a new version of it."""
        name = self._name(kek)

        def work(transit: Transit) -> int:
            known = self._read(transit, name)
            if known is not None:
                transit.rotate_key(name, mount_point=self._place.mount)
            else:
                transit.create_key(
                    name,
                    key_type=_KEY_TYPE,
                    derived=True,
                    exportable=False,
                    mount_point=self._place.mount,
                )
            made = self._read(transit, name)
            if made is None:
                raise Unavailable("Vault has not made the key", field="vault_address")
            return int(made["latest_version"])

        return await self._call(work)

    async def newest(self, kek: str) -> int | None:
        """Vault's latest version of the key."""
        name = self._name(kek)

        def work(transit: Transit) -> int | None:
            known = self._read(transit, name)
            return None if known is None else int(known["latest_version"])

        return await self._call(work)

    async def wrap(self, kek: str, owner: ComponentId, secret: bytearray) -> Wrapped:
        """Encrypt under the latest version."""
        name, context = self._name(kek), _base64(context_of(kek, owner))
        if await self.newest(kek) is None:
            # Asked first: encrypting could make a key of that name, if the policy allows it.
            raise Missing("there is no such key-encryption key", field="kek")

        def work(transit: Transit) -> Wrapped:
            answer = transit.encrypt_data(
                name, plaintext=_base64(secret), context=context, mount_point=self._place.mount
            )
            return _wrapped(answer["data"]["ciphertext"])

        return await self._call(work)

    async def unwrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> bytearray:
        """Decrypt; the version that Vault's own prefix names has to be the row's."""
        name, context = self._name(kek), _base64(context_of(kek, owner))
        ciphertext = _ciphertext(wrapped)

        def work(transit: Transit) -> bytearray:
            answer = transit.decrypt_data(
                name, ciphertext=ciphertext, context=context, mount_point=self._place.mount
            )
            return bytearray(base64.b64decode(answer["data"]["plaintext"]))

        return await self._call(work)

    async def rewrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> Wrapped:
        """Vault's own rewrap."""
        name, context = self._name(kek), _base64(context_of(kek, owner))
        ciphertext = _ciphertext(wrapped)

        def work(transit: Transit) -> Wrapped:
            answer = transit.rewrap_data(
                name, ciphertext=ciphertext, context=context, mount_point=self._place.mount
            )
            return _wrapped(answer["data"]["ciphertext"])

        return await self._call(work)

    async def destroy(self, kek: str, version: int) -> None:
        """Trim the key up to `version`, or delete it whole."""
        name, mount = self._name(kek), self._place.mount

        def work(transit: Transit) -> None:
            known = self._read(transit, name)
            if known is None or int(known["min_available_version"]) > version:
                return
            if version >= int(known["latest_version"]):
                transit.update_key_configuration(name, deletion_allowed=True, mount_point=mount)
                transit.delete_key(name, mount_point=mount)
                return
            floor = version + 1
            # Never lowered: a floor that somebody has raised stays. One after the other, since
            # hvac refuses equal floors in one call, which Vault takes.
            encryption = max(floor, int(known["min_encryption_version"]))
            decryption = max(floor, int(known["min_decryption_version"]))
            transit.update_key_configuration(
                name, min_encryption_version=encryption, mount_point=mount
            )
            transit.update_key_configuration(
                name, min_decryption_version=decryption, mount_point=mount
            )
            transit.trim_key(name, min_version=floor, mount_point=mount)

        await self._call(work)

    def close(self) -> None:
        """End the worker threads and their connections."""
        self._calls.close()

    def _name(self, kek: str) -> str:
        check_kek(kek)
        return f"{self._place.prefix}-{kek}"

    def _read(self, transit: Transit, name: str) -> dict[str, Any] | None:
        try:
            answer = transit.read_key(name, mount_point=self._place.mount)
        except self._hvac.exceptions.InvalidPath:
            return None
        data: dict[str, Any] = answer["data"]
        return data

    async def _call(self, work: Callable[[Transit], _T]) -> _T:
        return await self._calls.run(lambda: self._typed(work))

    def _typed(self, work: Callable[[Transit], _T]) -> _T:
        """Run `work` with Vault's errors as ours; with a fresh token if the old one is refused."""
        errors = self._hvac.exceptions
        try:
            try:
                return work(self._transit())
            except errors.Forbidden:
                self._clients.transit = None
                return work(self._transit())
        except StrongroomError:
            raise
        except errors.InvalidRequest as error:
            raise _refusal(error) from error
        except errors.InvalidPath as error:
            raise Missing("Vault has no such key", field="kek") from error
        except (errors.Forbidden, errors.Unauthorized) as error:
            raise Unavailable(
                "Vault refuses the token or its policy: docs/operations.md lists what it needs",
                field="vault_token_file",
            ) from error
        except errors.RateLimitExceeded as error:
            raise Overloaded("Vault asks for fewer requests", field="vault_address") from error
        except errors.VaultDown as error:
            raise Unavailable("Vault is sealed or down", field="vault_address") from error
        except (errors.VaultError, OSError, KeyError, TypeError, ValueError) as error:
            # requests' own errors are OSErrors.
            raise Unavailable("Vault gives no proper answer", field="vault_address") from error

    def _transit(self) -> Transit:
        known: Transit | None = getattr(self._clients, "transit", None)
        if known is None:
            known = self._connect()
            self._clients.transit = known
        return known

    def _connect(self) -> Transit:
        import requests  # noqa: PLC0415 - comes with hvac

        session = requests.Session()
        session.trust_env = False
        place = self._place
        try:
            token = read_private(place.token_file).decode("ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise Unavailable(
                f"there is no Vault token in {place.token_file}", field="vault_token_file"
            ) from error
        verify = True if place.ca_file is None else str(place.ca_file)
        session.verify = verify
        client = self._hvac.Client(
            url=place.address,
            token=token,
            namespace=place.namespace,
            timeout=place.timeout_s,
            verify=verify,
            session=session,
        )
        transit: Transit = client.secrets.transit
        return transit


def _library() -> Any:
    try:
        import hvac  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise Misuse(
            "the key provider vault_transit needs hvac: pip install 'strongroom[vault]'",
            field="key_provider",
        ) from error
    return hvac


def _refusal(error: Exception) -> StrongroomError:
    """What a 400 means for whoever wanted to open something."""
    said = str(error.args[0] if error.args else "")
    if _TOO_OLD in said or "not found" in said or "invalid key name" in said:
        return Missing("this version of the key-encryption key is gone", field="kek")
    if _TOO_NEW in said:
        # A standby that lags, or a Vault restored from a snapshot: nothing is lost for certain.
        return Unavailable("Vault does not know this version yet", field="vault_address")
    return Corrupt("a wrapped secret does not open", field="component")


def _wrapped(ciphertext: str) -> Wrapped:
    """`vault:v<version>:<base64>`."""
    return Wrapped(_version(ciphertext), ciphertext.encode("ascii"))


def _ciphertext(wrapped: Wrapped) -> str:
    try:
        ciphertext = wrapped.blob.decode("ascii")
        version = _version(ciphertext)
    except ValueError as error:
        raise Corrupt("a wrapped secret is not Vault's", field="component") from error
    if version != wrapped.version:
        raise Corrupt("a wrapped secret is another version's", field="component")
    return ciphertext


def _version(ciphertext: str) -> int:
    vault, version, _ = ciphertext.split(":", 2)
    if vault != "vault" or not version.startswith("v"):
        raise ValueError("no ciphertext of Vault")
    return int(version[1:])


def _base64(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode("ascii")
