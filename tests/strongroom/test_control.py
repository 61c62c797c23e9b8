"""Messages between sidecar and service come back from JSON as they were sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import control
from strongroom.control import AckRequest, SpoolEvent, Typ

MESSAGES = [
    value
    for value in vars(control).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]


def within_json(message: Any) -> bool:
    """msgspec writes integers of 64 bits."""
    try:
        msgspec.json.encode(message)
    except OverflowError:
        return False
    return True


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind).filter(within_json))
    assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message


def test_a_number_for_a_text_and_a_missing_field_are_refused() -> None:
    whole = {"epoch": "e", "seq": 1, "state": "fenced"}
    assert msgspec.json.decode(msgspec.json.encode(whole), type=AckRequest).seq == 1
    for bad in ({**whole, "seq": "1"}, {**whole, "state": 1}, {"epoch": "e", "seq": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode(bad), type=AckRequest)


def test_an_event_holds_neither_tokens_nor_text_nor_keys() -> None:
    names = {field.name for field in dataclasses.fields(SpoolEvent)}
    assert not names & {"token_ids", "prompt", "text", "salt", "secret", "key", "token"}
    assert {field.type for field in dataclasses.fields(SpoolEvent)} == {"int", "str", "list[str]"}


def test_kinds_of_signed_messages_are_unique() -> None:
    kinds = [value for name, value in vars(Typ).items() if name.isupper()]
    assert len(set(kinds)) == len(kinds)
    assert all(kind.startswith("strongroom-") for kind in kinds)
