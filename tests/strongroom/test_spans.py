"""Labels only grow along a prompt, and spans that make no sense are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import Misuse
from strongroom.identity import ComponentId
from strongroom.limits import PROMPT_TOKENS_MAX, SPANS_MAX
from strongroom.spans import DocumentSource, GroupSource, Source, check_span_ends, propagate

groups = st.sampled_from([ComponentId(f"{number:032x}") for number in range(1, 6)])
documents = st.sampled_from([ComponentId(f"{number:032x}") for number in range(11, 16)])
sources: st.SearchStrategy[Source] = st.one_of(
    st.builds(DocumentSource, documents, groups), st.builds(GroupSource, groups)
)


@given(st.lists(sources, max_size=8))
def test_labels_are_the_running_union_and_never_shrink(listed: list[Source]) -> None:
    labels = propagate(listed)
    assert len(labels) == len(listed)
    for index, label_set in enumerate(labels):
        for earlier in listed[: index + 1]:
            assert earlier.labels <= label_set
        if index:
            assert labels[index - 1] <= label_set
        brought = {d for s in listed[: index + 1] for d in s.labels.documents}
        assert label_set.documents == brought


def test_a_document_brings_its_group_along() -> None:
    document, group = ComponentId("d" * 32), ComponentId("e" * 32)
    (labels,) = propagate([DocumentSource(document, group)])
    assert labels.documents == {document}
    assert labels.groups == {group}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8, unique=True).map(sorted))
def test_rising_ends_inside_the_prompt_are_accepted(ends: list[int]) -> None:
    check_span_ends(ends, ends[-1])


@pytest.mark.parametrize(
    ("ends", "tokens", "field"),
    [
        ([5, 5], 10, "spans[1].end"),
        ([5, 4], 10, "spans[1].end"),
        ([0], 10, "spans[0].end"),
        ([-1], 10, "spans[0].end"),
        ([5, 11], 10, "spans[1].end"),
        ([1], 0, "prompt_tokens"),
        ([1], -3, "prompt_tokens"),
        ([1], PROMPT_TOKENS_MAX + 1, "prompt_tokens"),
        (list(range(1, SPANS_MAX + 2)), SPANS_MAX + 2, "spans"),
    ],
)
def test_spans_that_make_no_sense_are_refused_naming_the_field(
    ends: list[int], tokens: int, field: str
) -> None:
    with pytest.raises(Misuse) as caught:
        check_span_ends(ends, tokens)
    assert caught.value.field == field
