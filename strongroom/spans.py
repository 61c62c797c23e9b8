"""Spans and how labels propagate along a prompt.

A span is a run of prompt tokens from one source. Under causal attention a token's KV depends
on every token before it, so labels only grow: span k carries the union of the labels of spans
0..k. A document version brings its access group along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strongroom.errors import Misuse
from strongroom.identity import NO_LABELS, ComponentId, LabelSet
from strongroom.limits import PROMPT_TOKENS_MAX, SPANS_MAX


@dataclass(frozen=True, slots=True)
class DocumentSource:
    """Text of a registered document version, readable by that version's one group."""

    document: ComponentId
    group: ComponentId

    @property
    def labels(self) -> LabelSet:
        return LabelSet(frozenset((self.document,)), frozenset((self.group,)))


@dataclass(frozen=True, slots=True)
class GroupSource:
    """Text that is no document: a system prompt or conversation, readable by one group."""

    group: ComponentId

    @property
    def labels(self) -> LabelSet:
        return LabelSet(frozenset(), frozenset((self.group,)))


Source = DocumentSource | GroupSource


def check_span_ends(ends_tokens: Sequence[int], prompt_tokens: int) -> None:
    """Refuse ends that are not strictly rising, or that lie beyond the prompt."""
    if not 0 < prompt_tokens <= PROMPT_TOKENS_MAX:
        raise Misuse(
            "the prompt has no tokens or too many", field="prompt_tokens", limit=PROMPT_TOKENS_MAX
        )
    if len(ends_tokens) > SPANS_MAX:
        raise Misuse("too many spans", field="spans", limit=SPANS_MAX)
    previous = 0
    for index, end in enumerate(ends_tokens):
        if end <= previous:
            raise Misuse(
                f"span {index} ends at {end}, not after {previous}", field=f"spans[{index}].end"
            )
        if end > prompt_tokens:
            raise Misuse(
                f"span {index} ends at {end}, beyond the prompt",
                field=f"spans[{index}].end",
                limit=prompt_tokens,
            )
        previous = end


def propagate(sources: Iterable[Source]) -> tuple[LabelSet, ...]:
    """The label set in force in each span: the running union along the prefix."""
    running = NO_LABELS
    labels = []
    for source in sources:
        running = running | source.labels
        labels.append(running)
    return tuple(labels)
