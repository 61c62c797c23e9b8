"""What the registry's routes take and give."""

from __future__ import annotations

from datetime import datetime

from pydantic import ConfigDict, Field

from policy.conditions import Sensitivity
from service.registry.models import SHARED, ArtefactKind
from service.schemas import Answer, Body, ComponentIdText, DigestText, PathName

_ID = "0123456789abcdef0123456789abcdef"
_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_AT = "2026-01-31T12:00:00Z"


class ArtefactBody(Body):
    """A revision of an artefact to be registered."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "kind": "model",
                    "name": "HuggingFaceTB/SmolLM2-135M-Instruct",
                    "revision": "12fd25f77366",
                    "digest": _DIGEST,
                    "scope": SHARED,
                }
            ]
        }
    )

    kind: ArtefactKind
    name: PathName
    revision: PathName
    digest: DigestText
    """SHA-256 of what the engine measures."""
    scope: str = Field(default=SHARED, pattern="^(shared|[0-9a-f]{32})$")
    """`shared`, or the id of the one tenant that may use it."""


class ArtefactAnswer(Answer):
    """A registered artefact. Its id is what grants name."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "kind": "model",
                    "name": "HuggingFaceTB/SmolLM2-135M-Instruct",
                    "revision": "12fd25f77366",
                    "digest": _DIGEST,
                    "scope": SHARED,
                    "created_at": _AT,
                }
            ]
        }
    )

    id: str
    kind: ArtefactKind
    name: str
    revision: str
    digest: str
    scope: str
    created_at: datetime


class ArtefactPage(Answer):
    """Some artefacts, and the cursor that goes on."""

    items: list[ArtefactAnswer]
    next_cursor: str | None = None


class UpgradeBody(Body):
    """The revision that takes an artefact's place."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"revision": "7e27bd9f9532", "digest": _DIGEST}]}
    )

    revision: PathName
    digest: DigestText


class UpgradeAnswer(ArtefactAnswer):
    """The new artefact, and the one whose component was destroyed."""

    replaced: str


class DocumentBody(Body):
    """A document to be registered. Its texts are its versions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "handbook.md"}]})

    name: PathName


class VersionBody(Body):
    """A text of a document, readable by one access group. The text itself is never sent."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"content_digest": _DIGEST, "group": _ID, "sensitivity": "internal"}]
        }
    )

    content_digest: DigestText
    """SHA-256 of the text."""
    group: ComponentIdText
    sensitivity: Sensitivity = Sensitivity.RESTRICTED
    """What a rule's condition may be about; unclassified is the highest."""


class VersionAnswer(Answer):
    """A document version. Its id is what spans name."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "document": _ID,
                    "tenant": _ID,
                    "group": _ID,
                    "content_digest": _DIGEST,
                    "sensitivity": "internal",
                    "created_at": _AT,
                }
            ]
        }
    )

    id: str
    document: str
    tenant: str
    group: str
    content_digest: str
    sensitivity: Sensitivity
    created_at: datetime


class VersionPage(Answer):
    """Some versions, and the cursor that goes on."""

    items: list[VersionAnswer]
    next_cursor: str | None = None


class DocumentAnswer(Answer):
    """A document."""

    id: str
    tenant: str
    name: str
    created_at: datetime


class DocumentPage(Answer):
    """Some documents, and the cursor that goes on."""

    items: list[DocumentAnswer]
    next_cursor: str | None = None
