"""YAML as a tree of mappings, lists and text with line numbers; nothing is constructed.

Rules:
- Only events are read, by LibYAML's safe scanner: no tags, no objects, no implicit types. A
  scalar is the text that stands there, so `09:00`, `no` and `1e3` are what they look like.
- Anchors and aliases are refused, so that nothing grows when it is read; so are tags, second
  documents and merge keys, and a key that is there twice.
- Size, depth and number of nodes are bounded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

import yaml

from strongroom.errors import Misuse

BYTES_MAX: Final = 4 * 1024 * 1024
DEPTH_MAX: Final = 8
NODES_MAX: Final = 2_000_000
_STEP: Final = 32
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class BadYaml(Misuse):
    """It is not YAML, or more than is read here; `line` says where."""

    code = "bad_yaml"

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message, field="document")
        self.line = line


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar, as it is written."""

    line: int
    value: str


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence."""

    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping with text for keys."""

    line: int
    fields: dict[str, tuple[int, Node]] = field(default_factory=dict)
    """Keys to the line of the key, and the value."""


Node = Text | Items | Fields


def reading_yaml(text: str) -> Generator[None, None, Node]:
    """The tree of one document, in steps. Raises `BadYaml`."""
    if len(text.encode()) > BYTES_MAX:
        raise BadYaml(1, f"a document holds at most {BYTES_MAX} bytes")
    try:
        events = iter(yaml.parse(text, Loader=_Loader))
        return (yield from _document(events))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BadYaml(1 if mark is None else mark.line + 1, "this is not YAML") from error
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise BadYaml(1, "this is not YAML") from error


def _document(events: Iterator[yaml.Event]) -> Generator[None, None, Node]:
    """Build the tree with a stack of its own."""
    stack: list[Items | Fields] = []
    keys: list[Text | None] = []
    root: Node | None = None
    for count, event in enumerate(events):
        line = _line(event)
        if count % _STEP == _STEP - 1:
            yield
        _refuse(event, line, count, more=root is not None)
        match event:
            case yaml.ScalarEvent():
                node: Node = Text(line, event.value)
            case yaml.SequenceStartEvent():
                node = Items(line)
            case yaml.MappingStartEvent():
                node = Fields(line)
            case yaml.CollectionEndEvent():
                stack.pop()
                keys.pop()
                continue
            case _:
                continue
        if stack:
            keys[-1] = _put(stack[-1], keys[-1], node)
        elif root is None:
            root = node
        if not isinstance(node, Text):
            if len(stack) >= DEPTH_MAX:
                raise BadYaml(line, f"nested deeper than {DEPTH_MAX}")
            stack.append(node)
            keys.append(None)
    if root is None:
        raise BadYaml(1, "the document is empty")
    return root


def _refuse(event: yaml.Event, line: int, count: int, *, more: bool) -> None:
    """What YAML may hold and is not read here."""
    if count > NODES_MAX:
        raise BadYaml(line, "too many values")
    if isinstance(event, yaml.AliasEvent):
        raise BadYaml(line, "aliases are not read here")
    if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
        raise BadYaml(line, "anchors are not read here")
    if getattr(event, "tag", None) is not None:
        raise BadYaml(line, "tags are not read here")
    if isinstance(event, yaml.DocumentStartEvent) and more:
        raise BadYaml(line, "one document is read, and there are more")


def _put(parent: Items | Fields, key: Text | None, node: Node) -> Text | None:
    """Put `node` into `parent`; returns the key that waits for its value."""
    if isinstance(parent, Items):
        parent.items.append(node)
        return None
    if key is None:
        if not isinstance(node, Text):
            raise BadYaml(node.line, "a key must be a word")
        if node.value in parent.fields:
            raise BadYaml(node.line, "this key is there twice")
        return node
    parent.fields[key.value] = (key.line, node)
    return None


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 1 if mark is None else mark.line + 1
