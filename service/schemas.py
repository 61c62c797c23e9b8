"""Types that several rooms' requests and answers share."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from strongroom.limits import NAME_CHARS_MAX

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]*$"
PATH_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@/+-]*$"

Name = Annotated[
    str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=NAME_CHARS_MAX)
]
"""A tenant, principal or group: it becomes part of policy rules, so its characters are few."""

PathName = Annotated[
    str, StringConstraints(pattern=PATH_PATTERN, min_length=1, max_length=NAME_CHARS_MAX)
]
"""An artefact or document, which may be named like a path."""

ComponentIdText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
DigestText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Revision = Annotated[int, Field(ge=0, le=2**53, strict=True)]


class Body(BaseModel):
    """A request's body: frozen, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    """A response's body."""

    model_config = ConfigDict(frozen=True, from_attributes=True)
