"""Run by Alembic, on the connection that `service.db.migrate` hands over."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext

from service.db.base import Instant
from service.db.metadata import complete_metadata, is_modelled
from service.db.migrate import CONNECTION


def render_item(kind: str, item: Any, autogen: AutogenContext) -> str | Literal[False]:
    """Migrations name SQLAlchemy's own types: they must outlive ours."""
    del autogen
    if kind == "type" and isinstance(item, Instant):
        return "sa.DateTime(timezone=True)"
    return False


context.configure(
    connection=context.config.attributes[CONNECTION],
    target_metadata=complete_metadata(),
    compare_type=True,
    include_name=is_modelled,
    render_item=render_item,
)
with context.begin_transaction():
    context.run_migrations()
