"""AWS KMS as its API documents it (JSON 1.1), for as much as a key provider uses.

Requests have to carry a Signature Version 4 that verifies. Real AES-256-GCM with the encryption
context as AAD, RSA-OAEP import of key material, aliases, states of keys, errors by their names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.service.wire_server import Answer, listening

ACCESS_KEY = "AKIDSTRONGROOMTEST00"
SECRET_KEY = "a-secret-access-key-of-these-tests"
REGION = "eu-central-1"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/kms/aws4_request, "
    r"SignedHeaders=([^,]+), Signature=([0-9a-f]{64})"
)


class Refusal(Exception):
    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.answer: Answer = (400, {"__type": kind, "message": message})


@dataclass
class Key:
    description: str
    state: str = "PendingImport"
    material: bytes | None = None
    imports: rsa.RSAPrivateKey | None = None
    token: bytes = b""


class KmsServer:
    """One region of one account."""

    def __init__(self) -> None:
        self.url = ""
        self.keys: dict[str, Key] = {}
        self.aliases: dict[str, str] = {}
        self.asked: list[str] = []
        self.fault: str | None = None
        """Every call is refused with this."""
        self.before: Callable[[str], None] = lambda operation: None
        self._lock = threading.Lock()

    def material(self) -> list[bytes]:
        return [key.material for key in self.keys.values() if key.material is not None]

    def handle(self, method: str, path: str, headers: Mapping[str, str], raw: bytes) -> Answer:
        operation = headers.get("x-amz-target", "").removeprefix("TrentService.")
        self.before(operation)
        with self._lock:
            self.asked.append(operation)
            try:
                _check_signature(method, path, headers, raw)
                return 200, self._answer(operation, json.loads(raw))
            except Refusal as refusal:
                return refusal.answer

    def _answer(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        if self.fault is not None:
            raise Refusal(self.fault)
        work = getattr(self, f"_{operation}", None)
        if work is None:
            raise Refusal("UnknownOperationException")
        answer: dict[str, Any] = work(asked)
        return answer

    def _find(self, name: str) -> tuple[str, Key]:
        key = self.aliases.get(name, name) if name.startswith("alias/") else name
        if key not in self.keys:
            raise Refusal("NotFoundException", f"{name} is not found")
        return key, self.keys[key]

    def _usable(self, name: str) -> tuple[str, AESGCM]:
        key, found = self._find(name)
        if found.state != "Enabled" or found.material is None:
            raise Refusal("KMSInvalidStateException", f"{key} is {found.state}")
        return key, AESGCM(found.material)

    def _CreateKey(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        assert asked["Origin"] == "EXTERNAL"
        key = str(uuid.uuid4())
        self.keys[key] = Key(asked.get("Description", ""))
        return {"KeyMetadata": self._metadata(key)}

    def _GetParametersForImport(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        key, found = self._find(asked["KeyId"])
        assert asked["WrappingAlgorithm"] == "RSAES_OAEP_SHA_256"
        found.imports = _import_key(int(asked["WrappingKeySpec"][4:]))
        found.token = secrets.token_bytes(24)
        public = found.imports.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
        return {"KeyId": key, "ImportToken": _b64(found.token), "PublicKey": _b64(public)}

    def _ImportKeyMaterial(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        key, found = self._find(asked["KeyId"])
        if found.imports is None or base64.b64decode(asked["ImportToken"]) != found.token:
            raise Refusal("InvalidImportTokenException")
        material = found.imports.decrypt(
            base64.b64decode(asked["EncryptedKeyMaterial"]),
            OAEP(MGF1(hashes.SHA256()), hashes.SHA256(), None),
        )
        if len(material) != 32:
            raise Refusal("IncorrectKeyMaterialException")
        found.material, found.state, found.imports = material, "Enabled", None
        return {"KeyId": key}

    def _DeleteImportedKeyMaterial(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        key, found = self._find(asked["KeyId"])
        if found.state == "PendingDeletion":
            raise Refusal("KMSInvalidStateException")
        found.material, found.state = None, "PendingImport"
        return {"KeyId": key}

    def _ScheduleKeyDeletion(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        key, found = self._find(asked["KeyId"])
        assert 7 <= asked["PendingWindowInDays"] <= 30
        found.state = "PendingDeletion"
        return {"KeyId": key, "KeyState": found.state}

    def _UpdateKeyDescription(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self._find(asked["KeyId"])[1].description = asked["Description"]
        return {}

    def _CreateAlias(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        if re.fullmatch(r"alias/[a-zA-Z0-9/_-]+", asked["AliasName"]) is None:
            raise Refusal("InvalidAliasNameException")
        if asked["AliasName"] in self.aliases:
            raise Refusal("AlreadyExistsException")
        self.aliases[asked["AliasName"]] = self._find(asked["TargetKeyId"])[0]
        return {}

    def _UpdateAlias(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self._find(asked["AliasName"])
        self.aliases[asked["AliasName"]] = self._find(asked["TargetKeyId"])[0]
        return {}

    def _DeleteAlias(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        if self.aliases.pop(asked["AliasName"], None) is None:
            raise Refusal("NotFoundException")
        return {}

    def _DescribeKey(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"KeyMetadata": self._metadata(self._find(asked["KeyId"])[0])}

    def _metadata(self, key: str) -> dict[str, Any]:
        found = self.keys[key]
        return {
            "KeyId": key,
            "Description": found.description,
            "KeyState": found.state,
            "Enabled": found.state == "Enabled",
            "Origin": "EXTERNAL",
        }

    def _Encrypt(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        key, cipher = self._usable(asked["KeyId"])
        plaintext = base64.b64decode(asked["Plaintext"])
        return {"KeyId": key, "CiphertextBlob": _seal(key, cipher, plaintext, asked)}

    def _Decrypt(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        key, cipher = self._usable(asked["KeyId"])
        blob = base64.b64decode(asked["CiphertextBlob"])
        plaintext = _open(key, cipher, blob, asked.get("EncryptionContext"))
        return {"KeyId": key, "Plaintext": _b64(plaintext)}

    def _ReEncrypt(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        source, old = self._usable(asked["SourceKeyId"])
        key, cipher = self._usable(asked["DestinationKeyId"])
        blob = base64.b64decode(asked["CiphertextBlob"])
        plaintext = _open(source, old, blob, asked.get("SourceEncryptionContext"))
        given = {"EncryptionContext": asked.get("DestinationEncryptionContext")}
        return {"KeyId": key, "CiphertextBlob": _seal(key, cipher, plaintext, given)}


@functools.cache
def _import_key(bits: int) -> rsa.RSAPrivateKey:
    """One for all imports: KMS draws a fresh one each time, which takes a second here."""
    return rsa.generate_private_key(65537, bits)


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _aad(context: Mapping[str, str] | None) -> bytes:
    return json.dumps(context or {}, sort_keys=True).encode()


def _seal(key: str, cipher: AESGCM, plaintext: bytes, asked: Mapping[str, Any]) -> str:
    nonce = secrets.token_bytes(12)
    sealed = cipher.encrypt(nonce, plaintext, _aad(asked.get("EncryptionContext")))
    return _b64(uuid.UUID(key).bytes + nonce + sealed)


def _open(key: str, cipher: AESGCM, blob: bytes, context: Mapping[str, str] | None) -> bytes:
    if len(blob) < 28:
        raise Refusal("InvalidCiphertextException")
    if blob[:16] != uuid.UUID(key).bytes:
        raise Refusal("IncorrectKeyException")
    try:
        return cipher.decrypt(blob[16:28], blob[28:], _aad(context))
    except (InvalidTag, ValueError):
        raise Refusal("InvalidCiphertextException") from None


def _check_signature(method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
    """Signature Version 4, as AWS documents how it is verified."""
    found = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if found is None:
        raise Refusal("MissingAuthenticationTokenException")
    access, day, region, signed, signature = found.groups()
    if access != ACCESS_KEY:
        raise Refusal("UnrecognizedClientException")
    canonical = "\n".join(
        (
            method,
            path,
            "",
            *(f"{name}:{headers[name].strip()}" for name in signed.split(";")),
            "",
            signed,
            hashlib.sha256(body).hexdigest(),
        )
    )
    scope = f"{day}/{region}/kms/aws4_request"
    text = "\n".join(
        (
            "AWS4-HMAC-SHA256",
            headers["x-amz-date"],
            scope,
            hashlib.sha256(canonical.encode()).hexdigest(),
        )
    )
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (day, region, "kms", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    expected = hmac.digest(key, text.encode(), "sha256").hex()
    if not hmac.compare_digest(expected, signature):
        raise Refusal("InvalidSignatureException")


@contextmanager
def kms_server() -> Iterator[KmsServer]:
    """A running KMS."""
    kms = KmsServer()
    with listening(kms.handle, "application/x-amz-json-1.1") as url:
        kms.url = url
        yield kms
