"""Conditional requests (RFC 9110, section 13): who changes something says what it had seen.

    tag = etag_of("policy", tenant.id, tenant.revision)
    response.headers["ETag"] = tag             # on every answer that shows the thing
    expected.check(tag)                        # in the change's own transaction, before it

Rules:
- A tag is strong: the same tag means the same state. `W/"..."` never matches an `If-Match`.
- `IfMatch` is for changes that must not be made blindly: without the header they are refused
  with 428. `MaybeIfMatch` holds only those to it who sent one.
- The check belongs into the transaction of the change. Before it, it would prove nothing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Header

from policy.signing import encode_base64url
from strongroom.canonical import canonical_json
from strongroom.errors import Conflict, Misuse

_HEADER_CHARS_MAX: Final = 1024
_TAG: Final = re.compile(r'(W/)?"[\x21\x23-\x7e]*"')
_ANY: Final = "*"


class Stale(Conflict):
    """What is to be changed is not any more what the caller had seen."""

    code = "precondition_failed"


class Unconditional(Misuse):
    """This change has to say what it is based on."""

    code = "precondition_required"


def etag_of(*state: str | int) -> str:
    """The strong tag of what `state` names: kind, id and revision, or whatever is shown."""
    digest = hashlib.sha256(canonical_json({"state": list(state)})).digest()
    return f'"{encode_base64url(digest[:16])}"'


@dataclass(frozen=True, slots=True)
class Expected:
    """What a caller says that it had seen: any of `tags`; None: it said nothing."""

    tags: tuple[str, ...] | None

    def check(self, current: str | None) -> None:
        """Raise `Stale` unless `current` is one of them. `current` None: it is not there."""
        if self.tags is None:
            return
        if current is None or not (_ANY in self.tags or current in self.tags):
            raise Stale("this was changed since: read it again", field="If-Match")

    def shown(self, current: str) -> bool:
        """Whether an `If-None-Match` names `current`, so that 304 is the answer."""
        strong = {tag.removeprefix("W/") for tag in self.tags or ()}
        return _ANY in strong or current in strong


def parse_tags(header: str | None, field: str) -> Expected:
    """The tags of an `If-Match` or `If-None-Match`. Raises `Misuse`."""
    if header is None:
        return Expected(None)
    tags = tuple(tag.strip() for tag in header.split(","))
    if tags != (_ANY,) and not all(_TAG.fullmatch(tag) for tag in tags):
        raise Misuse(f"{field} is a list of entity tags, or *", field=field)
    return Expected(tags)


_IfMatchHeader = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=_HEADER_CHARS_MAX,
        description="The `ETag` that was read before.",
        examples=['"dGhlIHN0YXRlIHRoYXQ"'],
    ),
]


async def _maybe_if_match(if_match: _IfMatchHeader = None) -> Expected:
    return parse_tags(if_match, "If-Match")


async def _if_match(if_match: _IfMatchHeader = None) -> Expected:
    if if_match is None:
        raise Unconditional("say in If-Match which state this changes", field="If-Match")
    return parse_tags(if_match, "If-Match")


async def _if_none_match(
    if_none_match: Annotated[
        str | None,
        Header(
            alias="If-None-Match",
            max_length=_HEADER_CHARS_MAX,
            description="Tags that the caller has: 304 if one of them is still right.",
        ),
    ] = None,
) -> Expected:
    return parse_tags(if_none_match, "If-None-Match")


IfMatch = Annotated[Expected, Depends(_if_match)]
MaybeIfMatch = Annotated[Expected, Depends(_maybe_if_match)]
IfNoneMatch = Annotated[Expected, Depends(_if_none_match)]
