"""Backups of the database: made while it serves, verified, and restored into an empty one."""
