"""The cache identity: whose, and of what, a block's KV is.

Rules:
- An identity names components by id, never by value; a component's id is used once, for ever.
- No field is optional. "No adapter" is `NO_ADAPTER`, which has its own tag and brings no secret.
- One identity has one encoding, and no two identities share it (docs/format.md section 2).
- The fingerprint, SHA-256 of that encoding, is also the namespace's id.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NewType

from strongroom.canonical import encode_fields
from strongroom.errors import Misuse
from strongroom.limits import LABELS_MAX

ComponentId = NewType("ComponentId", str)
"""16 random bytes as 32 lowercase hexadecimal digits."""

NamespaceId = NewType("NamespaceId", str)
"""An identity's fingerprint as 64 lowercase hexadecimal digits."""

COMPONENT_ID_BYTES: Final = 16
IDENTITY_MAGIC: Final = b"SRID"
IDENTITY_VERSION: Final = 1
NO_ADAPTER: Final = "none"
_COMPONENT_ID = re.compile(r"[0-9a-f]{32}")
_NAMESPACE_ID = re.compile(r"[0-9a-f]{64}")


class ComponentKind(StrEnum):
    """The axes of an identity."""

    TENANT = "tenant"
    MODEL = "model"
    ADAPTER = "adapter"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    POLICY = "policy"
    DOCUMENT_VERSION = "document_version"
    GROUP = "group"


class _Tag:
    """Field tags of the identity encoding; append-only."""

    TENANT = 1
    MODEL = 2
    ADAPTER = 3
    NO_ADAPTER = 4
    TOKENIZER = 5
    TEMPLATE = 6
    POLICY = 7
    DOCUMENT_VERSIONS = 8
    GROUPS = 9


def new_component_id() -> ComponentId:
    """Draw an id that was never used: 128 random bits."""
    return ComponentId(secrets.token_hex(COMPONENT_ID_BYTES))


def parse_component_id(text: object, field: str = "component") -> ComponentId:
    """Check that `text` is a component id, naming `field` in the error otherwise."""
    if not isinstance(text, str) or _COMPONENT_ID.fullmatch(text) is None:
        raise Misuse(f"{field} must be 32 lowercase hexadecimal digits", field=field, limit=32)
    return ComponentId(text)


def parse_namespace_id(text: object, field: str = "namespace") -> NamespaceId:
    """Check that `text` is a namespace id, naming `field` in the error otherwise."""
    if not isinstance(text, str) or _NAMESPACE_ID.fullmatch(text) is None:
        raise Misuse(f"{field} must be 64 lowercase hexadecimal digits", field=field, limit=64)
    return NamespaceId(text)


@dataclass(frozen=True, slots=True)
class LabelSet:
    """The document versions and access groups that a token's KV depends on.

    Both are kept as sets; the union of two label sets is `|`.
    """

    documents: frozenset[ComponentId]
    groups: frozenset[ComponentId]

    def __post_init__(self) -> None:
        if len(self.documents) + len(self.groups) > LABELS_MAX:
            raise Misuse("too many labels in one identity", field="labels", limit=LABELS_MAX)
        if self.documents & self.groups:
            raise Misuse("one component id cannot be a document and a group", field="labels")

    def __or__(self, other: LabelSet) -> LabelSet:
        return LabelSet(self.documents | other.documents, self.groups | other.groups)

    def __le__(self, other: LabelSet) -> bool:
        return self.documents <= other.documents and self.groups <= other.groups


NO_LABELS: Final = LabelSet(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """One exact identity. Equality of identities is equality of their encodings."""

    tenant: ComponentId
    model: ComponentId
    adapter: ComponentId | Literal["none"]
    tokenizer: ComponentId
    template: ComponentId
    policy: ComponentId
    labels: LabelSet

    def __post_init__(self) -> None:
        for name in ("tenant", "model", "tokenizer", "template", "policy"):
            parse_component_id(getattr(self, name), name)
        if self.adapter != NO_ADAPTER:
            parse_component_id(self.adapter, "adapter")
        for label in self.labels.documents | self.labels.groups:
            parse_component_id(label, "labels")

    def encode(self) -> bytes:
        """The canonical bytes (docs/format.md section 2)."""
        adapter = (
            (_Tag.NO_ADAPTER, b"")
            if self.adapter == NO_ADAPTER
            else (_Tag.ADAPTER, bytes.fromhex(self.adapter))
        )
        return encode_fields(
            IDENTITY_MAGIC,
            IDENTITY_VERSION,
            (
                (_Tag.TENANT, bytes.fromhex(self.tenant)),
                (_Tag.MODEL, bytes.fromhex(self.model)),
                adapter,
                (_Tag.TOKENIZER, bytes.fromhex(self.tokenizer)),
                (_Tag.TEMPLATE, bytes.fromhex(self.template)),
                (_Tag.POLICY, bytes.fromhex(self.policy)),
                (_Tag.DOCUMENT_VERSIONS, bytes.fromhex("".join(sorted(self.labels.documents)))),
                (_Tag.GROUPS, bytes.fromhex("".join(sorted(self.labels.groups)))),
            ),
        )

    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical bytes; 32 bytes."""
        return hashlib.sha256(self.encode()).digest()

    @property
    def namespace(self) -> NamespaceId:
        """The id of this identity's namespace: the fingerprint in hexadecimal."""
        return NamespaceId(self.fingerprint().hex())

    def components(self) -> tuple[ComponentId, ...]:
        """Every component in canonical order: the order in which secrets enter the derivation."""
        adapter = () if self.adapter == NO_ADAPTER else (ComponentId(self.adapter),)
        return (
            self.tenant,
            self.model,
            *adapter,
            self.tokenizer,
            self.template,
            self.policy,
            *sorted(self.labels.documents),
            *sorted(self.labels.groups),
        )
