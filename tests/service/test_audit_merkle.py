"""The tree and its proofs against RFC 9162, a naive tree, and the published test tree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.transparency import (
    EMPTY_ROOT,
    leaf_hash,
    node_hash,
    verify_consistency,
    verify_inclusion,
)
from service.audit import merkle
from strongroom.errors import Misuse, Refused

# The eight inputs and roots of the certificate transparency reference tests (RFC 6962 and 9162
# define the same tree).
INPUTS = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def naive_root(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 9162 section 2.1.1, as it stands there."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return node_hash(naive_root(leaves[:k]), naive_root(leaves[k:]))


def grow(leaves: Sequence[bytes]) -> tuple[list[bytes], dict[merkle.Node, bytes]]:
    """Peaks, and every complete subtree, made the slow way."""
    peaks: list[bytes] = []
    for size, leaf in enumerate(leaves):
        peaks = merkle.extend(size, peaks, [leaf])
    nodes = {merkle.Node(0, index): leaf for index, leaf in enumerate(leaves)}
    level, row = 0, list(leaves)
    while len(row) > 1:
        level += 1
        row = [node_hash(row[at], row[at + 1]) for at in range(0, len(row) - 1, 2)]
        nodes |= {merkle.Node(level, index): value for index, value in enumerate(row)}
    return peaks, nodes


def leaves_of(count: int) -> list[bytes]:
    return [leaf_hash(str(number).encode()) for number in range(count)]


def test_roots_are_those_of_the_published_test_tree() -> None:
    leaves = [leaf_hash(data) for data in INPUTS]
    for size, root in enumerate(ROOTS, start=1):
        assert merkle.fold(grow(leaves[:size])[0]).hex() == root


def test_an_empty_tree_has_the_hash_of_nothing() -> None:
    assert merkle.fold(()) == EMPTY_ROOT


def test_an_inclusion_path_of_the_published_tree_is_the_published_one() -> None:
    leaves = [leaf_hash(data) for data in INPUTS]
    _, nodes = grow(leaves)
    proof = merkle.hashes_of(merkle.inclusion_ranges(5, 8), nodes)
    assert [step.hex() for step in proof] == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


def test_a_consistency_path_of_the_published_tree_is_the_published_one() -> None:
    _, nodes = grow([leaf_hash(data) for data in INPUTS])
    proof = merkle.hashes_of(merkle.consistency_ranges(6, 8), nodes)
    assert [step.hex() for step in proof] == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


@given(st.integers(1, 70), st.data())
def test_every_leaf_of_every_tree_is_proved_and_no_other_leaf_is(
    size: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, size - 1))
    leaves = leaves_of(size)
    peaks, nodes = grow(leaves)
    root = merkle.fold(peaks)
    assert root == naive_root(leaves)
    proof = merkle.hashes_of(merkle.inclusion_ranges(index, size), nodes)
    verify_inclusion(leaves[index], index, size, proof, root)
    with pytest.raises(Refused):
        verify_inclusion(leaf_hash(b"another"), index, size, proof, root)
    with pytest.raises(Refused):
        verify_inclusion(leaves[index], index, size, [*proof, bytes(32)], root)
    if proof:
        with pytest.raises(Refused):
            verify_inclusion(leaves[index], index, size, proof[:-1], root)


@given(st.integers(0, 70), st.integers(0, 70))
def test_a_longer_tree_continues_a_shorter_and_a_changed_one_does_not(one: int, two: int) -> None:
    old_size, size = sorted((one, two))
    leaves = leaves_of(size)
    peaks, nodes = grow(leaves)
    root, old_root = merkle.fold(peaks), naive_root(leaves[:old_size])
    proof = merkle.hashes_of(merkle.consistency_ranges(old_size, size), nodes)
    verify_consistency(old_size, old_root, size, root, proof)
    if old_size:
        changed = [*leaves[: old_size - 1], leaf_hash(b"changed")]
        with pytest.raises(Refused):
            verify_consistency(old_size, naive_root(changed), size, root, proof)


def test_a_leaf_outside_the_tree_is_refused() -> None:
    with pytest.raises(Misuse):
        merkle.inclusion_ranges(3, 3)
    with pytest.raises(Refused):
        verify_inclusion(bytes(32), 3, 3, [], bytes(32))
    with pytest.raises(Refused):
        verify_consistency(4, bytes(32), 3, bytes(32), [])
