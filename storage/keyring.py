"""Namespace secrets for as long as their key leases run, and not a moment longer.

Rules:
- A secret is held in a bytearray that is overwritten when it is dropped, replaced or found
  expired. What was derived from it once is kept beside it in the same way and goes with it, so
  that a lookup derives nothing anew. What is handed out are short-lived copies of whoever asked;
  what Python cannot promise about copies is said in docs/threat-model.md.
- Expiry is judged by the boot clock at the moment of the question: there is no timer to miss.
- A namespace goes when any one of its components does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from strongroom.derivation import SECRET_BYTES, NamespaceKeys, engine_salt, namespace_keys
from strongroom.errors import Misuse
from strongroom.identity import ComponentId, NamespaceId

FORMATS_MAX: Final = 8
"""Of so many KV formats the keys of one namespace are kept; of more they are derived each time."""


@dataclass(frozen=True, slots=True, repr=False)
class _Entry:
    secret: bytearray
    components: frozenset[ComponentId]
    expires_ns: int
    salt: bytearray = field(default_factory=bytearray)
    derived: dict[bytes, bytearray] = field(default_factory=dict)
    """Lookup and data key, back to back, by format digest."""

    def wipe(self) -> None:
        """Overwrite the secret and all that came of it."""
        for buffer in (self.secret, self.salt, *self.derived.values()):
            buffer[:] = bytes(len(buffer))


class KeyRing:
    """The leased namespaces of one sidecar.

    The lock guards the map and every buffer in it, so that no key is derived from a buffer
    that is being overwritten. It is a leaf: nothing else is locked while it is held.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[NamespaceId, _Entry] = {}

    def put(
        self,
        namespace: NamespaceId,
        secret: bytes,
        components: tuple[ComponentId, ...],
        expires_ns: int,
    ) -> None:
        """Hold `secret` (32 bytes) until `expires_ns` of the boot clock, replacing an older one."""
        if len(secret) != SECRET_BYTES:
            raise Misuse("a namespace secret has 32 bytes", field="secret", limit=SECRET_BYTES)
        if not components:
            raise Misuse("a namespace has at least one component", field="components")
        entry = _Entry(bytearray(secret), frozenset(components), expires_ns)
        with self._lock:
            self._drop(namespace)
            self._entries[namespace] = entry

    def keys(self, namespace: NamespaceId, format_digest: bytes) -> NamespaceKeys | None:
        """Lookup and data key of `namespace` for one KV format; None when absent or expired."""
        with self._lock:
            entry = self._alive(namespace)
            return None if entry is None else _keys(entry, format_digest)

    def salt(self, namespace: NamespaceId) -> str | None:
        """The engine salt of `namespace`; None when absent or expired."""
        with self._lock:
            entry = self._alive(namespace)
            if entry is None:
                return None
            if not entry.salt:
                entry.salt[:] = engine_salt(bytes(entry.secret)).encode()
            return entry.salt.decode()

    def holds(self, namespace: NamespaceId) -> bool:
        """Whether `namespace` is leased at this instant."""
        with self._lock:
            return self._alive(namespace) is not None

    def drop_components(self, ids: Collection[ComponentId]) -> frozenset[NamespaceId]:
        """Drop every namespace that contains one of `ids`, and say which."""
        gone = frozenset(ids)
        with self._lock:
            dropped = frozenset(
                namespace
                for namespace, entry in self._entries.items()
                if not gone.isdisjoint(entry.components)
            )
            for namespace in dropped:
                self._drop(namespace)
        return dropped

    def drop_all(self) -> None:
        """Drop every namespace."""
        with self._lock:
            for namespace in tuple(self._entries):
                self._drop(namespace)

    def namespaces(self) -> frozenset[NamespaceId]:
        """The namespaces whose lease still runs."""
        with self._lock:
            return frozenset(name for name in tuple(self._entries) if self._alive(name))

    def _alive(self, namespace: NamespaceId) -> _Entry | None:
        entry = self._entries.get(namespace)
        if entry is not None and self._clock() >= entry.expires_ns:
            self._drop(namespace)
            return None
        return entry

    def _drop(self, namespace: NamespaceId) -> None:
        entry = self._entries.pop(namespace, None)
        if entry is not None:
            entry.wipe()


def _keys(entry: _Entry, format_digest: bytes) -> NamespaceKeys:
    kept = entry.derived.get(format_digest)
    if kept is None:
        keys = namespace_keys(bytes(entry.secret), format_digest)
        if len(entry.derived) < FORMATS_MAX:
            entry.derived[format_digest] = bytearray(keys.lookup + keys.data)
        return keys
    return NamespaceKeys(bytes(kept[:SECRET_BYTES]), bytes(kept[SECRET_BYTES:]))
