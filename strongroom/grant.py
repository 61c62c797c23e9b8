"""What a grant says. Minting and verifying are in `policy.grants`; this is the vocabulary.

A grant is a signed statement of the service: subject S of tenant T may do `ops` with these
namespaces for the prompt with this digest, if the engine runs exactly these artefacts. Every
span names its namespace, and the components that this span adds to those of the one before.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from strongroom.identity import ComponentId, NamespaceId

GRANT_AUDIENCE = "strongroom-sidecar"


class Operation(StrEnum):
    """What a grant allows on the data plane."""

    READ = "read"
    WRITE = "write"


class GrantedSpan(msgspec.Struct, frozen=True):
    """Tokens up to `end` belong to `namespace`; `adds` are the label components new here."""

    end: int
    namespace: NamespaceId
    adds: tuple[ComponentId, ...]


class EngineDigests(msgspec.Struct, frozen=True):
    """What the engine must have measured (hexadecimal SHA-256); `adapter` may be `none`."""

    model: str
    adapter: str
    tokenizer: str
    template: str


class GrantClaims(msgspec.Struct, frozen=True):
    """The payload of a grant. Times are whole seconds since the Unix epoch."""

    iss: str
    aud: str
    jti: str
    tenant: ComponentId
    sub: str
    iat: int
    exp: int
    ops: tuple[Operation, ...]
    base: tuple[ComponentId, ...]
    """Tenant, model, adapter if any, tokenizer, template, policy: in every namespace."""
    spans: tuple[GrantedSpan, ...]
    """Ends early, or is empty, where a span was denied or is not registered."""
    prompt_tokens: int
    prompt_digest: str
    engine: EngineDigests
    salt_digest: str
    revision: int
    epoch: str
    seq: int

    def components(self, span: int) -> tuple[ComponentId, ...]:
        """Every component that the namespace of span number `span` depends on."""
        added: list[ComponentId] = list(self.base)
        for earlier in self.spans[: span + 1]:
            added.extend(earlier.adds)
        return tuple(dict.fromkeys(added))
