"""Namespaces that a grant has named, and the components each one depends on."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import COMPONENT, NAMESPACE, Instant, Record
from strongroom.identity import ComponentId, NamespaceId


class Namespace(Record):
    """One identity's room, by its fingerprint."""

    __tablename__ = "namespaces"

    id: Mapped[NamespaceId] = mapped_column(NAMESPACE, primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("components.id"), index=True)
    created_at: Mapped[datetime] = mapped_column(Instant)


class NamespaceComponent(Record):
    """`component` is number `position`, in canonical order, of what `namespace` depends on."""

    __tablename__ = "namespace_components"

    namespace: Mapped[NamespaceId] = mapped_column(
        NAMESPACE, ForeignKey("namespaces.id"), primary_key=True
    )
    component: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("components.id"), primary_key=True, index=True
    )
    position: Mapped[int] = mapped_column()
