"""A block's states, as types: the wrong order does not type-check.

    Reserved ─seal─▶ Sealed ─publish─▶ Resident ⇄ WeakReference
        └─ abandon      └─ abandon        └─ evict / invalidate ─▶ gone

- `Reserved` has room and no content; `Sealed` has ciphertext and is not visible; `Resident` is
  visible. Only a `Resident` can be pinned.
- A `Pin` (strong reference) blocks eviction until it is released or its deadline is over. A
  `WeakReference` blocks nothing and is upgraded at a transfer's commit point, or is found gone.
- Objects of these types exist only for blocks in transition; what is resident is columns in
  `storage.index`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from storage.block import BlockAddress
from storage.header import Header
from strongroom.identity import ComponentId, NamespaceId


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a tier: where they begin and how many they are."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room for a block, charged to its tenant; not visible."""

    address: BlockAddress
    tenant: ComponentId
    namespace: NamespaceId
    place: Place


@dataclass(frozen=True, slots=True)
class Sealed:
    """The block's ciphertext is complete in its place; not visible yet."""

    reserved: Reserved
    header: Header


@dataclass(frozen=True, slots=True)
class Resident:
    """A visible block. `stamp` tells this writing from a later one at the same address."""

    address: BlockAddress
    tenant: ComponentId
    namespace: NamespaceId
    nbytes: int
    stamp: int


@dataclass(frozen=True, slots=True)
class WeakReference:
    """Names a writing of a block without keeping it."""

    address: BlockAddress
    stamp: int


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Keeps a writing of a block until `deadline_ns` on the boot clock. Each is its own."""

    address: BlockAddress
    stamp: int
    deadline_ns: int


def seal(reserved: Reserved, header: Header) -> Sealed:
    """The ciphertext is in place."""
    return Sealed(reserved, header)


def weaken(resident: Resident) -> WeakReference:
    """A reference that may outlive the block."""
    return WeakReference(resident.address, resident.stamp)


Admit = Callable[[], None]
"""Called right before a block becomes visible, with nothing in between; raises to refuse."""
