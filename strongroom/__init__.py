"""Domain types, canonical bytes, wire frames, errors and limits.

This is the only package that enters an engine's process, so it needs the standard library
and msgspec alone. `strongroom.connectors` holds the engine adapters.
"""
