"""The database: engine, sessions, types, and the metadata that migrations compare with."""
