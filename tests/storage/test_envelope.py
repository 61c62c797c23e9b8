"""The envelope: what is sealed opens for its owner, and for nothing and nobody else."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.block import BlockContext
from storage.envelope import Opener, Sealer, aad_prefix, nonce, segment_aad, shape
from storage.header import (
    HEADER_BYTES,
    TAIL_BYTES,
    BadRecord,
    Fault,
    Placement,
    check_tail,
    clear_placement,
    gone_block,
    read_facts,
    read_header,
    read_placement,
    record_bytes,
    segment_spans,
    write_frame,
    write_placement,
)
from storage.memory import aligned
from strongroom.derivation import NamespaceKeys, block_key
from strongroom.errors import Corrupt, Missing, Misuse
from tests.storage.support import (
    CANARY,
    KEYS,
    OTHER_KEYS,
    block,
    component,
    context,
    namespace,
    plaintext,
    sealed,
)

FIELDS = {
    "magic": 0,
    "version": 8,
    "flags": 10,
    "segment count": 12,
    "record bytes": 16,
    "plaintext bytes": 24,
    "sequence": 32,
    "tenant": 40,
    "namespace": 56,
    "block": 88,
    "parent": 120,
    "position": 152,
    "tokens": 160,
    "rank": 164,
    "format digest": 168,
    "layout digest": 200,
    "salt": 232,
    "commitment": 248,
    "segment table": 280,
    "reserved": 3000,
    "checksum": 3936,
}


def open_all(record: memoryview, wanted: BlockContext, keys: NamespaceKeys = KEYS) -> memoryview:
    out = memoryview(bytearray(b"\xaa" * wanted.plaintext_bytes))
    opener = Opener.begin(read_header(record), wanted, keys.data)
    try:
        opener.segments(range(len(wanted.segment_bytes)), record, out)
    except Corrupt:
        assert bytes(out).count(CANARY) == 0
        raise
    return out


@settings(deadline=None)  # the machine is shared
@given(
    segments=st.lists(st.integers(1, 9000), min_size=1, max_size=9).map(tuple),
    rank=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
)
def test_any_block_comes_back_as_it_went_in(
    segments: tuple[int, ...], rank: int, sequence: int
) -> None:
    wanted = context(segments=segments, rank=rank)
    header, record = sealed(wanted, sequence=sequence)
    assert read_header(record) == header
    assert open_all(record, wanted) == plaintext(wanted)
    check_tail(read_facts(record[:HEADER_BYTES]), record[-TAIL_BYTES:])


def test_the_record_holds_no_plaintext() -> None:
    _, record = sealed(context())
    assert CANARY not in bytes(record)


def test_a_segment_is_plain_aes_256_gcm_under_the_block_key_with_the_documented_aad() -> None:
    wanted = context()
    header, record = sealed(wanted)
    key = block_key(KEYS.data, wanted.block, header.salt)
    for index, (plain, at, size) in enumerate(segment_spans(wanted.segment_bytes)):
        opened = AESGCM(key.key).decrypt(
            nonce(index), bytes(record[at : at + size + 16]), segment_aad(wanted, index)
        )
        assert opened == plaintext(wanted)[plain : plain + size]


def test_the_header_and_aad_bytes_are_those_of_the_format_document() -> None:
    wanted = context(segments=(5,), rank=3)
    sealer = Sealer.begin(wanted, KEYS.data, 7)
    header = replace(sealer.header, salt=b"S" * 16, commitment=b"C" * 32)
    record = aligned(record_bytes((5,)))
    write_frame(record, header)
    fixed = (
        b"SRBLOCK\0" + bytes.fromhex("0100 0000 01000000")
        + (8192).to_bytes(8, "little") + (5).to_bytes(8, "little") + (7).to_bytes(8, "little")
        + bytes(15) + b"\1" + bytes(31) + b"\1" + bytes(31) + b"\1" + bytes(32)
        + bytes(8) + (32).to_bytes(4, "little") + (3).to_bytes(4, "little")
        + b"f" * 32 + b"l" * 32 + b"S" * 16 + b"C" * 32 + (5).to_bytes(4, "little")
    )  # fmt: skip
    body = fixed.ljust(3936, b"\0")
    assert bytes(record[:3936]) == body
    assert bytes(record[3936:3968]) == hashlib.sha256(body).digest()
    assert bytes(record[3968:4096]) == bytes(128)
    tail = b"SRTAIL\0\0" + (7).to_bytes(8, "little") + bytes(16) + hashlib.sha256(body).digest()
    assert bytes(record[-64:]) == tail
    fields = ((1, bytes(31) + b"\1"), (2, b"f" * 32), (3, b"l" * 32), (4, bytes(31) + b"\1"),
              (5, b"\3\0\0\0"), (6, bytes(4)), (7, b"\1\0\0\0"), (8, b"\5" + bytes(7)))  # fmt: skip
    parts = [bytes([tag]) + len(value).to_bytes(4, "little") + value for tag, value in fields]
    assert segment_aad(wanted, 0) == b"SRSG\1\0" + b"".join(parts)


def test_two_writings_of_one_block_share_no_key_and_no_ciphertext() -> None:
    first, one = sealed(context())
    second, two = sealed(context())
    assert first.salt != second.salt
    assert first.commitment != second.commitment
    assert one[HEADER_BYTES : HEADER_BYTES + 5000] != two[HEADER_BYTES : HEADER_BYTES + 5000]


@pytest.mark.parametrize("at", FIELDS.values(), ids=FIELDS.keys())
def test_a_flipped_byte_in_any_header_field_is_found(at: int) -> None:
    _, record = sealed(context())
    record[at] ^= 1
    with pytest.raises(BadRecord):
        read_header(record)


def test_a_newer_record_version_is_told_from_damage() -> None:
    _, record = sealed(context())
    record[8] = 2
    with pytest.raises(BadRecord) as caught:
        read_header(record)
    assert caught.value.fault is Fault.FUTURE


@settings(deadline=None)  # the machine is shared
@given(st.data())
def test_a_flipped_bit_anywhere_in_the_ciphertext_is_found_and_leaves_no_plaintext(
    data: st.DataObject,
) -> None:
    wanted = context(segments=(40, 60))
    _, record = sealed(wanted)
    at = data.draw(st.integers(HEADER_BYTES, HEADER_BYTES + 100 + 2 * 16 - 1))
    record[at] ^= 1 << data.draw(st.integers(0, 7))
    out = memoryview(bytearray(b"\xaa" * 100))
    opener = Opener.begin(read_header(record), wanted, KEYS.data)
    with pytest.raises(Corrupt):
        opener.segments((0, 1), record, out)
    touched = 40 if at < HEADER_BYTES + 56 else 100
    assert bytes(out[:touched]) == bytes(touched), "what was decrypted is wiped"


FOREIGN: dict[str, dict[str, Any]] = {
    "another tenant": {"tenant": component(2)},
    "another namespace": {"namespace": namespace(2)},
    "another block": {"block": block(9)},
    "another parent": {"parent": block(9)},
    "another position": {"position": 64},
    "another token count": {"tokens": 64},
    "another KV format": {"format_digest": b"F" * 32},
    "another rank": {"rank": 1},
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_record_of_something_else_is_corrupt_and_the_right_one_opens(
    change: dict[str, Any],
) -> None:
    wanted = context()
    _, right = sealed(wanted)
    _, wrong = sealed(replace(wanted, **change))
    assert open_all(right, wanted) == plaintext(wanted)
    with pytest.raises(Corrupt):
        open_all(wrong, wanted)


AAD_BOUND = {**FOREIGN, "another layout": {"layout_digest": b"L" * 32}}
for _name in ("another tenant", "another parent", "another position", "another token count"):
    del AAD_BOUND[_name]  # bound through the fingerprint and the block id


@pytest.mark.parametrize("change", AAD_BOUND.values(), ids=AAD_BOUND.keys())
def test_the_aad_itself_binds_what_the_header_says(change: dict[str, Any]) -> None:
    """A forger who rewrites the whole header, checksum and all, gets no further."""
    wanted = context()
    header, right = sealed(wanted)
    assert open_all(right, wanted) == plaintext(wanted)
    other = replace(wanted, **change)
    forged = aligned(len(right))
    forged[:] = right
    key = block_key(KEYS.data, other.block, header.salt)
    write_frame(forged, replace(header, context=other, commitment=key.commitment))
    with pytest.raises(Corrupt):
        open_all(forged, other)


def test_swapped_segments_do_not_open() -> None:
    wanted = context(segments=(500, 500))
    _, record = sealed(wanted)
    one = bytes(record[HEADER_BYTES : HEADER_BYTES + 516])
    record[HEADER_BYTES : HEADER_BYTES + 516] = record[HEADER_BYTES + 516 : HEADER_BYTES + 1032]
    record[HEADER_BYTES + 516 : HEADER_BYTES + 1032] = one
    with pytest.raises(Corrupt):
        open_all(record, wanted)


def test_another_namespace_key_fails_at_the_commitment_before_anything_is_opened() -> None:
    wanted = context()
    _, record = sealed(wanted)
    with pytest.raises(Corrupt, match="another key"):
        Opener.begin(read_header(record), wanted, OTHER_KEYS.data)
    assert open_all(record, wanted) == plaintext(wanted)


def test_a_forged_commitment_is_refused() -> None:
    wanted = context()
    header, record = sealed(wanted)
    write_frame(record, replace(header, commitment=bytes(32)))
    with pytest.raises(Corrupt, match="another key"):
        open_all(record, wanted)


def test_another_layout_is_a_miss_and_not_damage() -> None:
    wanted = context()
    _, record = sealed(wanted)
    with pytest.raises(Missing):
        open_all(record, replace(wanted, layout_digest=b"L" * 32, segment_bytes=(4000, 4000)))


def test_buffers_of_another_length_are_refused() -> None:
    wanted = context()
    header, record = sealed(wanted)
    opener = Opener.begin(header, wanted, KEYS.data)
    with pytest.raises(Misuse):
        opener.segments((0,), record, memoryview(bytearray(10)))
    with pytest.raises(Misuse):
        opener.segments((0,), record[:-4096], memoryview(bytearray(8000)))


@settings(deadline=None)  # the machine is shared
@given(
    st.builds(
        Placement,
        store=st.binary(min_size=16, max_size=16),
        region=st.integers(0, 2**32 - 1),
        generation=st.integers(0, 2**64 - 1),
        offset=st.integers(0, 2**64 - 1),
        order=st.integers(0, 2**64 - 1),
    )
)
def test_a_placement_comes_back_and_leaves_the_record_as_it_was(placement: Placement) -> None:
    _, record = sealed(context())
    before = bytes(record)
    write_placement(record[:HEADER_BYTES], placement)
    assert read_placement(record[:HEADER_BYTES]) == placement
    read_header(record)
    clear_placement(record)
    assert bytes(record) == before


def test_a_removed_record_still_tells_its_length() -> None:
    with pytest.raises(BadRecord) as caught:
        read_header(memoryview(gone_block(12288)))
    assert caught.value.fault is Fault.GONE
    assert caught.value.record_bytes == 12288


@given(st.lists(st.integers(1, 2**30), min_size=1, max_size=64), st.integers(0, 2**32 - 1))
def test_an_aad_that_is_written_anew_is_that_segments_own(sizes: list[int], rank: int) -> None:
    wanted = context(segments=tuple(sizes), rank=rank)
    for index in (*range(len(sizes)), *reversed(range(len(sizes)))):
        made = aad_prefix(wanted) + shape(wanted.segment_bytes)[index].aad_rest
        assert made == segment_aad(wanted, index)
