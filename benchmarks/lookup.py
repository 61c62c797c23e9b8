"""Hashing a chain of block ids, against BLAKE2b over the same bytes in one call."""

from __future__ import annotations

import hashlib
import secrets
import time

from strongroom.blocks import ROOT_PARENT, Grid, block_id, pack_tokens

TOKENS = 32 * 1024
Pairs = list[tuple[float, float]]


def measure(rounds: int) -> dict[str, tuple[str, Pairs]]:
    """Microseconds for the ids of a 32k-token prompt."""
    packed = pack_tokens(list(range(TOKENS)))
    key = secrets.token_bytes(32)
    grid = Grid(256, 32)
    pairs: Pairs = []
    for _ in range(rounds):
        started = time.perf_counter()
        parent = ROOT_PARENT
        for extent in grid.plan([TOKENS], TOKENS):
            parent = block_id(key, parent, extent.start, packed[extent.start * 4 : extent.end * 4])
        ours = time.perf_counter() - started
        started = time.perf_counter()
        hashlib.blake2b(packed, digest_size=32, key=key).digest()
        bare = time.perf_counter() - started
        pairs.append((ours * 1e6, bare * 1e6))
    return {"chain_of_32k_tokens_vs_one_hash": ("us", pairs)}
