"""Run by Alembic, on the connection that `service.db.migrate` hands over."""

from __future__ import annotations

from alembic import context

from service.db.metadata import complete_metadata
from service.db.migrate import CONNECTION

connection = context.config.attributes[CONNECTION]
context.configure(
    connection=connection,
    target_metadata=complete_metadata(),
    compare_type=True,
    # SQLite changes a table by making it anew.
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
