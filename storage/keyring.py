"""Namespace secrets for as long as their key leases run, and not a moment longer.

Rules:
- A secret is held in a bytearray that is overwritten when it is dropped, replaced or found
  expired. Keys derived from it are short-lived values of the transfer that asked for them;
  what Python cannot promise about their copies is said in docs/threat-model.md.
- Expiry is judged by the boot clock at the moment of the question: there is no timer to miss.
- A namespace goes when any one of its components does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from strongroom.derivation import SECRET_BYTES, NamespaceKeys, engine_salt, namespace_keys
from strongroom.errors import Misuse
from strongroom.identity import ComponentId, NamespaceId


@dataclass(frozen=True, slots=True, repr=False)
class _Entry:
    secret: bytearray
    components: frozenset[ComponentId]
    expires_ns: int


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
            return None if entry is None else namespace_keys(bytes(entry.secret), format_digest)

    def salt(self, namespace: NamespaceId) -> str | None:
        """The engine salt of `namespace`; None when absent or expired."""
        with self._lock:
            entry = self._alive(namespace)
            return None if entry is None else engine_salt(bytes(entry.secret))

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
            entry.secret[:] = bytes(len(entry.secret))
