"""What `POST /v1/grants` takes and gives."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from service.policies.schemas import Purpose
from service.schemas import Answer, Body, ComponentIdText, DigestText, Name, Revision
from strongroom.grant import Operation
from strongroom.limits import PROMPT_TOKENS_MAX, SPANS_MAX

_ID = "0123456789abcdef0123456789abcdef"
_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

EVERYONE = "everyone"
PRIVATE = "private"

Tokens = Annotated[int, Field(ge=1, le=PROMPT_TOKENS_MAX, strict=True)]


class SpanBody(Body):
    """Tokens up to `end` come from one source: a document version, or a group."""

    end: Tokens
    document: ComponentIdText | None = None
    """A document version's id."""
    group: ComponentIdText | Literal["everyone", "private"] | None = None
    """For text that is no document. `private` is the subject's own group."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.document is None) == (self.group is None):
            raise ValueError("a span has a document or a group, and not both")
        return self


class GrantBody(Body):
    """One prompt, cut into spans, and what is to be done with it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": _ID,
                    "adapter": "none",
                    "tokenizer": _ID,
                    "template": _ID,
                    "policy": _ID,
                    "spans": [
                        {"end": 96, "group": "everyone"},
                        {"end": 1792, "document": _ID},
                        {"end": 1810, "group": "private"},
                    ],
                    "prompt_tokens": 1810,
                    "prompt_digest": _DIGEST,
                    "operations": ["read", "write"],
                    "purpose": "support",
                }
            ]
        }
    )

    model: ComponentIdText
    adapter: ComponentIdText | Literal["none"]
    tokenizer: ComponentIdText
    template: ComponentIdText
    policy: ComponentIdText
    spans: Annotated[list[SpanBody], Field(max_length=SPANS_MAX)]
    prompt_tokens: Tokens
    prompt_digest: DigestText
    """SHA-256 over the packed token ids, as `strongroom.blocks.prompt_digest` computes it."""
    operations: Annotated[list[Operation], Field(min_length=1, max_length=2)]
    min_revision: Revision | None = None
    """Never answer from an older state of the tenant's authorization."""
    purpose: Purpose | None = None
    """What it is for; rules may be about it. Left out: no rule that names purposes allows it."""
    tenant: ComponentIdText | None = None
    subject: Name | None = None
    """With `tenant`: on whose behalf, without that subject's token. Needs `grant:act_as`."""

    @model_validator(mode="after")
    def _named_whole(self) -> Self:
        if (self.tenant is None) != (self.subject is None):
            raise ValueError("tenant and subject are named together or not at all")
        return self


class GrantAnswer(Answer):
    """A grant, and the salt for the engine's own prefix cache; both secret to clients."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "grant": "eyJhbGciOiJFZDI1NTE5Iiwi...",
                    "salt": "3q2-7w...",
                    "granted_tokens": 1810,
                    "expires_at": "2026-01-31T12:05:00Z",
                    "revision": 7,
                }
            ]
        }
    )

    grant: str
    salt: str
    granted_tokens: int
    """Fewer than were asked for where a span is denied or not registered."""
    expires_at: datetime
    revision: int
