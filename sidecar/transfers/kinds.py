"""What a block of a prompt probably is, told from the grant's spans: for its retention alone.

A grant names components, never what they stand for, so this is a rule and no knowledge:

- The first of several spans is the shared system prefix: the text that prompts have in common
  comes first, or nobody could share it.
- The last span is the conversation, and so is one that adds no component: text of groups that
  the prompt depends on already.
- Any other span brings a component that the text before it did not have: a document.
- A prompt of a single span tells nothing: history, the kind in the middle.

A wrong guess keeps a block somewhat longer or shorter; it never widens who may read it. That a
block belonged to a preempted request is for the engine to say; no frame carries it yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from storage.retention import BlockKind
from strongroom.grant import GrantedSpan


def block_kind(spans: Sequence[GrantedSpan], span: int) -> BlockKind:
    """The kind of a block in span number `span`."""
    if len(spans) == 1:
        return BlockKind.HISTORY
    if span == 0:
        return BlockKind.SYSTEM
    if span == len(spans) - 1 or not spans[span].adds:
        return BlockKind.HISTORY
    return BlockKind.DOCUMENT
