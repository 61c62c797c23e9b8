"""Log entries: whoever holds a position and a hash sees any other past."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry, genesis

EPOCH = "0f" * 16
ENTRY = LogEntry(
    epoch=EPOCH,
    seq=7,
    prev="ab" * 32,
    at="2026-01-31T12:00:00.000000Z",
    kind=InvalidationKind.COMPONENTS,
    tenant="1" * 32,
    components=(ComponentId("2" * 32), ComponentId("3" * 32)),
    subject="",
    min_revision=0,
    sidecar="",
)

OTHER: dict[str, Any] = {
    "epoch": "1f" * 16,
    "seq": 8,
    "prev": "ac" * 32,
    "at": "2026-01-31T12:00:00.000001Z",
    "kind": InvalidationKind.SUBJECT,
    "tenant": "4" * 32,
    "components": (ComponentId("3" * 32), ComponentId("2" * 32)),
    "subject": "ann",
    "min_revision": 1,
    "sidecar": "s",
}


def test_every_field_has_a_changed_value_here() -> None:
    assert list(OTHER) == [field.name for field in msgspec.structs.fields(LogEntry)]


@pytest.mark.parametrize("name", OTHER)
def test_any_changed_field_is_another_hash(name: str) -> None:
    assert msgspec.structs.replace(ENTRY, **{name: OTHER[name]}).hash() != ENTRY.hash()


def test_the_hash_is_of_what_is_signed_and_that_reads_back_the_same() -> None:
    assert hashlib.sha256(ENTRY.payload()).hexdigest() == ENTRY.hash()
    again = msgspec.json.decode(ENTRY.payload(), type=LogEntry)
    assert again == ENTRY
    assert again.payload() == ENTRY.payload()


@given(st.text(max_size=20), st.text(max_size=20))
def test_epochs_share_their_first_hash_only_when_they_are_equal(one: str, other: str) -> None:
    assert (genesis(one) == genesis(other)) == (one == other)


def test_an_entry_of_an_unknown_kind_is_not_read() -> None:
    raw = ENTRY.payload().replace(b'"kind":"components"', b'"kind":"everything"')
    with pytest.raises(msgspec.ValidationError, match="everything"):
        msgspec.json.decode(raw, type=LogEntry)
