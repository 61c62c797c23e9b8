"""Alembic's migrations of the service's database, for SQLite and PostgreSQL."""
