"""Identities: injective encoding, no optional field, no alias between fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.canonical import canonical_json, encode_fields
from strongroom.errors import Misuse
from strongroom.identity import (
    NO_ADAPTER,
    CacheIdentity,
    ComponentId,
    LabelSet,
    new_component_id,
    parse_component_id,
    parse_namespace_id,
)
from strongroom.limits import LABELS_MAX

# Few distinct ids, so that hypothesis finds identities that differ in one place only.
components = st.sampled_from([ComponentId(f"{number:032x}") for number in range(1, 9)])
labels = st.builds(
    lambda documents, groups: LabelSet(documents, groups - documents),
    st.frozensets(components, max_size=4),
    st.frozensets(components, max_size=4),
)
identities = st.builds(
    CacheIdentity,
    tenant=components,
    model=components,
    adapter=st.one_of(st.just(NO_ADAPTER), components),
    tokenizer=components,
    template=components,
    policy=components,
    labels=labels,
)


@given(identities, identities)
def test_two_identities_share_bytes_only_when_they_are_equal(
    one: CacheIdentity, other: CacheIdentity
) -> None:
    assert (one.encode() == other.encode()) == (one == other)
    assert (one.namespace == other.namespace) == (one == other)


@given(identities, components)
def test_changing_any_one_field_changes_the_namespace(
    identity: CacheIdentity, value: ComponentId
) -> None:
    for name in ("tenant", "model", "adapter", "tokenizer", "template", "policy"):
        fields: dict[str, Any] = {name: value}
        changed = dataclasses.replace(identity, **fields)
        assert (changed.namespace == identity.namespace) == (getattr(identity, name) == value)


@given(identities)
def test_components_are_in_canonical_order_without_the_missing_adapter(
    identity: CacheIdentity,
) -> None:
    listed = identity.components()
    documents, groups = sorted(identity.labels.documents), sorted(identity.labels.groups)
    assert list(listed[len(listed) - len(documents) - len(groups) :]) == documents + groups
    assert len(listed) == 5 + (identity.adapter != NO_ADAPTER) + len(documents) + len(groups)
    assert NO_ADAPTER not in listed


def test_a_document_and_a_group_with_one_id_are_refused() -> None:
    same = frozenset((new_component_id(),))
    with pytest.raises(Misuse) as caught:
        LabelSet(same, same)
    assert caught.value.field == "labels"


def test_moving_a_label_from_documents_to_groups_is_another_namespace() -> None:
    label = new_component_id()
    base = {name: new_component_id() for name in ("tenant", "model", "tokenizer", "template")}
    rest: dict[str, Any] = {**base, "policy": new_component_id(), "adapter": NO_ADAPTER}
    as_document = CacheIdentity(**rest, labels=LabelSet(frozenset((label,)), frozenset()))
    as_group = CacheIdentity(**rest, labels=LabelSet(frozenset(), frozenset((label,))))
    assert as_document.namespace != as_group.namespace


def test_too_many_labels_are_refused_naming_the_limit() -> None:
    many = frozenset(new_component_id() for _ in range(LABELS_MAX + 1))
    with pytest.raises(Misuse) as caught:
        LabelSet(many, frozenset())
    assert caught.value.limit == LABELS_MAX


@pytest.mark.parametrize("field", ["tenant", "model", "tokenizer", "template", "policy"])
def test_no_field_is_optional(field: str) -> None:
    values: dict[str, Any] = {
        name: new_component_id() for name in ("tenant", "model", "tokenizer", "template", "policy")
    }
    values |= {"adapter": NO_ADAPTER, "labels": LabelSet(frozenset(), frozenset())}
    CacheIdentity(**values)
    with pytest.raises(Misuse) as caught:
        CacheIdentity(**(values | {field: ""}))
    assert caught.value.field == field
    with pytest.raises(Misuse):
        CacheIdentity(**(values | {field: NO_ADAPTER}))
    del values[field]
    with pytest.raises(TypeError):
        CacheIdentity(**values)


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, " " + "0" * 31, None, 7, b"0" * 32]
)
def test_what_is_no_component_id_is_refused(text: object) -> None:
    with pytest.raises(Misuse):
        parse_component_id(text)
    with pytest.raises(Misuse):
        parse_namespace_id(text)


def test_component_ids_do_not_repeat() -> None:
    drawn = {new_component_id() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(parse_component_id(each) == each for each in drawn)


fields = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=6)), max_size=5)


@given(fields, fields)
def test_field_lists_share_bytes_only_when_they_are_equal(
    one: list[tuple[int, bytes]], other: list[tuple[int, bytes]]
) -> None:
    encoded = [encode_fields(b"TEST", 1, each) for each in (one, other)]
    assert (encoded[0] == encoded[1]) == (one == other)


def test_a_split_moved_between_fields_is_seen() -> None:
    left = encode_fields(b"TEST", 1, [(1, b"a"), (2, b"bc")])
    right = encode_fields(b"TEST", 1, [(1, b"ab"), (2, b"c")])
    assert left != right


def test_canonical_json_orders_keys_and_refuses_floats() -> None:
    assert canonical_json({"b": 1, "a": ["ä", None]}) == '{"a":["ä",null],"b":1}'.encode()
    with pytest.raises(Misuse):
        canonical_json({"a": [{"b": 0.5}]})
