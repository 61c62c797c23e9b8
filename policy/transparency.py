"""Merkle tree hashes and proofs as RFC 9162 section 2.1 has them; pure, for both ends.

A leaf is hashed under a 0x00 byte and an inner node under 0x01, so that one never passes for
the other. A proof that does not verify raises `Refused`; it is never repaired.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from strongroom.errors import Refused

HASH_BYTES: Final = 32
EMPTY_ROOT: Final = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """The hash of a tree's leaf; RFC 9162 section 2.1.1."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node; RFC 9162 section 2.1.1."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def verify_inclusion(
    leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes
) -> None:
    """Refuse unless `proof` shows `leaf` at `index` in the tree of `size` leaves with `root`.

    RFC 9162 section 2.1.3.2.
    """
    if not 0 <= index < size:
        raise Refused("the proof is for a leaf outside the tree")
    first, second, running = index, size - 1, leaf
    for step in proof:
        if second == 0:
            raise Refused("the inclusion proof is too long")
        if first & 1 or first == second:
            running = node_hash(step, running)
            while first and not first & 1:
                first >>= 1
                second >>= 1
        else:
            running = node_hash(running, step)
        first >>= 1
        second >>= 1
    if second != 0 or not hmac.compare_digest(running, root):
        raise Refused("the inclusion proof does not lead to the signed root")


def verify_consistency(
    old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """Refuse unless the tree of `size` leaves continues the one of `old_size` leaves.

    RFC 9162 section 2.1.4.2. An empty tree is continued by every tree.
    """
    if not 0 <= old_size <= size:
        raise Refused("the newer tree is smaller than the older one")
    if old_size in (0, size):
        expected = EMPTY_ROOT if old_size == 0 else root
        if proof or not hmac.compare_digest(old_root, expected):
            raise Refused("the consistency proof does not fit")
        return
    steps = list(proof)
    if old_size & (old_size - 1) == 0:
        steps.insert(0, old_root)
    if not steps:
        raise Refused("the consistency proof is too short")
    first, second = old_size - 1, size - 1
    while first & 1:
        first >>= 1
        second >>= 1
    old_running = running = steps[0]
    for step in steps[1:]:
        if second == 0:
            raise Refused("the consistency proof is too long")
        if first & 1 or first == second:
            old_running = node_hash(step, old_running)
            running = node_hash(step, running)
            while first and not first & 1:
                first >>= 1
                second >>= 1
        else:
            running = node_hash(running, step)
        first >>= 1
        second >>= 1
    agrees = hmac.compare_digest(old_running, old_root) and hmac.compare_digest(running, root)
    if second != 0 or not agrees:
        raise Refused("the newer tree does not continue the older one")
