"""Artefacts, documents and document versions.

An artefact's and a document version's id is its component id. A document's own id is no
component: it only holds versions together. What is removed keeps its row, and its name may be
registered anew, as a new component.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from policy.conditions import Sensitivity
from service.db.base import COMPONENT, Instant, Record, choice
from strongroom.identity import ComponentId, ComponentKind
from strongroom.limits import NAME_CHARS_MAX

SHARED = "shared"
"""The scope of what every tenant may use."""

_LIVING = text("removed_at IS NULL")


class ArtefactKind(StrEnum):
    """The axes of an identity that are registered here."""

    MODEL = "model"
    ADAPTER = "adapter"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    POLICY = "policy"

    @property
    def component(self) -> ComponentKind:
        """The same axis as a component's kind."""
        return ComponentKind(self.value)


class Artefact(Record):
    """One revision of a model, adapter, tokenizer, template or content policy."""

    __tablename__ = "artefacts"
    __table_args__ = (
        Index(
            "uq_artefacts_living_name",
            "scope",
            "kind",
            "name",
            "revision",
            unique=True,
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
    )

    id: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("components.id"), primary_key=True
    )
    kind: Mapped[ArtefactKind] = mapped_column(choice(ArtefactKind, "kind"))
    scope: Mapped[str] = mapped_column(String(32))
    """`shared`, or the one tenant that may use it."""
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    revision: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(Instant)
    removed_at: Mapped[datetime | None] = mapped_column(Instant)


class Document(Record):
    """A document of one tenant; its texts are its versions."""

    __tablename__ = "documents"
    __table_args__ = (
        Index(
            "uq_documents_living_name",
            "tenant",
            "name",
            unique=True,
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    created_at: Mapped[datetime] = mapped_column(Instant)
    removed_at: Mapped[datetime | None] = mapped_column(Instant)


class DocumentVersion(Record):
    """One immutable text with exactly one access group."""

    __tablename__ = "document_versions"
    __table_args__ = (
        Index(
            "uq_document_versions_living_text",
            "document",
            "content_digest",
            "group",
            unique=True,
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
    )

    id: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("components.id"), primary_key=True
    )
    document: Mapped[str] = mapped_column(String(32), ForeignKey("documents.id"))
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"), index=True)
    group: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("groups.id"), index=True)
    content_digest: Mapped[str] = mapped_column(String(64))
    sensitivity: Mapped[Sensitivity] = mapped_column(
        choice(Sensitivity, "sensitivity"), server_default=Sensitivity.RESTRICTED.value
    )
    created_at: Mapped[datetime] = mapped_column(Instant)
    removed_at: Mapped[datetime | None] = mapped_column(Instant)


class IdempotentAnswer(Record):
    """What a registration answered, so that the same request again gets the same answer."""

    __tablename__ = "idempotent_answers"

    scope: Mapped[str] = mapped_column(String(32), primary_key=True)
    """The tenant it was for, or `shared`."""
    actor: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), primary_key=True)
    key: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))
    """SHA-256 over the route and the body."""
    answer: Mapped[str] = mapped_column(String(4096))
    """The answer's JSON."""
    created_at: Mapped[datetime] = mapped_column(Instant, index=True)
