"""Vault's Transit engine as its HTTP API documents it, for as much as a key provider uses.

Real AES-256-GCM under keys derived by HKDF from the context, versions, `min_decryption_version`,
`trim`, `rewrap`, deletion that has to be allowed; 403 for a wrong token, 503 once sealed.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tests.service.wire_server import Answer, listening

_PATH = re.compile(r"/v1/(?P<mount>[\w-]+)/(?P<what>keys|encrypt|decrypt|rewrap)/(?P<rest>[\w/-]+)")


class Refusal(Exception):
    def __init__(self, *errors: str, status: int = 400) -> None:
        super().__init__(*errors)
        self.answer: Answer = (status, {"errors": list(errors)})


@dataclass
class Key:
    derived: bool
    exportable: bool
    versions: dict[int, bytes] = field(default_factory=dict)
    latest: int = 0
    min_decryption: int = 1
    min_encryption: int = 0
    min_available: int = 0
    deletion_allowed: bool = False

    def rotate(self) -> None:
        self.latest += 1
        self.versions[self.latest] = secrets.token_bytes(32)

    def cipher(self, version: int, body: Mapping[str, Any]) -> AESGCM:
        key = self.versions[version]
        if self.derived:
            context = base64.b64decode(body.get("context") or "")
            if not context:
                raise Refusal("missing 'context' for key derivation")
            key = HKDF(hashes.SHA256(), 32, None, context).derive(key)
        return AESGCM(key)

    def encrypt(self, body: Mapping[str, Any], plaintext: bytes) -> str:
        nonce = secrets.token_bytes(12)
        sealed = nonce + self.cipher(self.latest, body).encrypt(nonce, plaintext, None)
        return f"vault:v{self.latest}:{base64.b64encode(sealed).decode()}"

    def decrypt(self, body: Mapping[str, Any]) -> bytes:
        found = re.fullmatch(r"vault:v(\d+):(.*)", body.get("ciphertext", ""))
        if found is None:
            raise Refusal("invalid ciphertext: no prefix")
        version = int(found[1])
        if version > self.latest:
            raise Refusal("invalid ciphertext: version is too new")
        if version < self.min_decryption:
            raise Refusal("ciphertext or signature version is disallowed by policy (too old)")
        try:
            sealed = base64.b64decode(found[2], validate=True)
        except ValueError:
            raise Refusal("invalid ciphertext: could not decode base64") from None
        try:
            return self.cipher(version, body).decrypt(sealed[:12], sealed[12:], None)
        except (InvalidTag, ValueError):
            raise Refusal("invalid ciphertext: unable to decrypt") from None


class TransitServer:
    """One Vault with one Transit mount."""

    def __init__(self, mount: str = "transit") -> None:
        self.mount = mount
        self.url = ""
        self.tokens = {"s." + secrets.token_hex(12)}
        self.sealed = False
        self.keys: dict[str, Key] = {}
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        self._lock = threading.Lock()

    def material(self, name: str) -> list[bytes]:
        """What lies in Vault's storage of a key, policy floors or not."""
        return list(self.keys[name].versions.values()) if name in self.keys else []

    def handle(self, method: str, path: str, headers: Mapping[str, str], raw: bytes) -> Answer:
        self.before(path)
        with self._lock:
            self.asked.append(f"{method} {path}")
            try:
                return self._handle(method, path, headers, json.loads(raw or b"{}"))
            except Refusal as refusal:
                return refusal.answer

    def _handle(
        self, method: str, path: str, headers: Mapping[str, str], body: dict[str, Any]
    ) -> Answer:
        if self.sealed:
            raise Refusal("Vault is sealed", status=503)
        if headers.get("x-vault-token") not in self.tokens:
            raise Refusal("permission denied", status=403)
        found = _PATH.fullmatch(path)
        if found is None or found["mount"] != self.mount:
            raise Refusal(f'no handler for route "{path}"', status=404)
        name, _, verb = found["rest"].partition("/")
        if found["what"] == "keys":
            return self._keys(method, name, verb, body)
        key = self.keys.get(name)
        if key is None:
            raise Refusal("encryption key not found")
        match found["what"]:
            case "encrypt":
                text = key.encrypt(body, base64.b64decode(body["plaintext"]))
                return 200, {"data": {"ciphertext": text, "key_version": key.latest}}
            case "decrypt":
                plaintext = base64.b64encode(key.decrypt(body)).decode()
                return 200, {"data": {"plaintext": plaintext}}
            case _:
                text = key.encrypt(body, key.decrypt(body))
                return 200, {"data": {"ciphertext": text, "key_version": key.latest}}

    def _keys(self, method: str, name: str, verb: str, body: dict[str, Any]) -> Answer:
        key = self.keys.get(name)
        if method == "GET" and not verb:
            return self._read(name) if key is not None else (404, {"errors": []})
        if method == "DELETE":
            if key is None or not key.deletion_allowed:
                raise Refusal("deletion is not allowed for this key")
            del self.keys[name]
            return 204, None
        if not verb:
            if key is None:
                made = Key(bool(body.get("derived")), bool(body.get("exportable")))
                assert body["type"] == "aes256-gcm96"
                made.rotate()
                self.keys[name] = made
            return self._read(name)
        if key is None:
            raise Refusal("no existing key named " + name + " could be found")
        match verb:
            case "rotate":
                key.rotate()
            case "config":
                self._configure(key, body)
            case "trim":
                self._trim(key, int(body["min_available_version"]))
            case _:
                raise Refusal("unsupported path", status=404)
        return self._read(name)

    @staticmethod
    def _configure(key: Key, body: dict[str, Any]) -> None:
        decryption = int(body.get("min_decryption_version", key.min_decryption))
        encryption = int(body.get("min_encryption_version", key.min_encryption))
        if max(decryption, encryption) > key.latest or decryption < key.min_available:
            raise Refusal(f"cannot set min version of {decryption}, latest is {key.latest}")
        if 0 < encryption < decryption:
            raise Refusal("cannot set min encryption/decryption values")
        key.min_decryption, key.min_encryption = max(1, decryption), encryption
        key.deletion_allowed = bool(body.get("deletion_allowed", key.deletion_allowed))

    @staticmethod
    def _trim(key: Key, floor: int) -> None:
        if floor < key.min_available:
            raise Refusal("minimum available version cannot be decremented")
        if key.min_encryption == 0:
            raise Refusal(
                "minimum available version cannot be set when minimum encryption version is not set"
            )
        if floor > min(key.min_encryption, key.min_decryption):
            raise Refusal("minimum available version cannot be greater than minimum version")
        key.min_available = floor
        for version in [each for each in key.versions if each < floor]:
            del key.versions[version]

    def _read(self, name: str) -> Answer:
        key = self.keys[name]
        return 200, {
            "data": {
                "name": name,
                "type": "aes256-gcm96",
                "derived": key.derived,
                "exportable": key.exportable,
                "deletion_allowed": key.deletion_allowed,
                "latest_version": key.latest,
                "min_decryption_version": key.min_decryption,
                "min_encryption_version": key.min_encryption,
                "min_available_version": key.min_available,
                "keys": {str(version): 1 for version in key.versions},
            }
        }


@contextmanager
def transit_server() -> Iterator[TransitServer]:
    """A running Vault."""
    vault = TransitServer()
    with listening(vault.handle, "application/json") as url:
        vault.url = url
        yield vault
