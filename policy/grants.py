"""Minting and verifying grants: pure functions over `strongroom.grant.GrantClaims`.

Rules:
- A grant lives at most `GRANT_LIFE_S_MAX` seconds and is as large as `GRANT_BYTES_MAX` at most.
- Its spans rise strictly and end inside the prompt; an empty list grants nothing.
- `verify` answers claims or `Refused`, with one message for every reason. Whether the grant's
  log position, subject and components are still alive is the caller's to check.
"""

from __future__ import annotations

from typing import Final

import msgspec

from policy.signing import Signer, Verifier
from strongroom.control import Typ
from strongroom.errors import Misuse, Refused, StrongroomError
from strongroom.grant import GRANT_AUDIENCE, GrantClaims
from strongroom.identity import NO_ADAPTER, parse_component_id, parse_namespace_id
from strongroom.limits import GRANT_BYTES_MAX, GRANT_LIFE_S_MAX, LABELS_MAX, SPANS_MAX
from strongroom.spans import check_span_ends

CLOCK_SKEW_S: Final = 30
"""How far in the future a grant may have been minted by the sidecar's wall clock."""

_decoder = msgspec.json.Decoder(GrantClaims, strict=True)
_encoder = msgspec.json.Encoder(order="deterministic")
_HEX_DIGEST_CHARS: Final = 64
_BASE_COMPONENTS: Final = (5, 6)


def mint(claims: GrantClaims, signer: Signer) -> str:
    """Sign `claims`. Raises `Misuse` for claims that `verify` would not accept."""
    check(claims)
    token = signer.sign(Typ.GRANT, _encoder.encode(claims))
    if len(token) > GRANT_BYTES_MAX:
        raise Misuse("the grant is too large", field="spans", limit=GRANT_BYTES_MAX)
    return token


def verify(token: str, verifier: Verifier, *, now_s: int, issuer: str) -> GrantClaims:
    """The claims of a grant that this issuer signed and that is in its time.

    `now_s` is seconds since the Unix epoch. Raises `Refused` whatever is wrong.
    """
    try:
        if len(token) > GRANT_BYTES_MAX:
            raise Refused("too large")
        claims = _decoder.decode(verifier.verify(Typ.GRANT, token))
        check(claims)
        if claims.iss != issuer or claims.aud != GRANT_AUDIENCE:
            raise Refused("another issuer or audience")
        check_time(claims, now_s=now_s)
    except (StrongroomError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused("the grant is not valid") from error
    return claims


def check_time(claims: GrantClaims, *, now_s: int) -> None:
    """Refuse claims that are out of their time (`Refused`)."""
    if not claims.iat - CLOCK_SKEW_S <= now_s < claims.exp:
        raise Refused("the grant is not valid")


def check(claims: GrantClaims) -> None:
    """Refuse claims whose parts do not fit together (`Misuse`)."""
    if not 0 < claims.exp - claims.iat <= GRANT_LIFE_S_MAX:
        raise Misuse("a grant's life is too long or negative", field="exp", limit=GRANT_LIFE_S_MAX)
    if len(claims.spans) > SPANS_MAX:
        raise Misuse("too many spans", field="spans", limit=SPANS_MAX)
    check_span_ends([span.end for span in claims.spans], claims.prompt_tokens)
    parse_component_id(claims.tenant, "tenant")
    if len(claims.base) not in _BASE_COMPONENTS or claims.base[0] != claims.tenant:
        raise Misuse("the base components start with the tenant and are 5 or 6", field="base")
    if (claims.engine.adapter == NO_ADAPTER) != (len(claims.base) == _BASE_COMPONENTS[0]):
        raise Misuse("adapter digest and components disagree", field="engine.adapter")
    for component in claims.base:
        parse_component_id(component, "base")
    added = 0
    for span in claims.spans:
        parse_namespace_id(span.namespace, "spans.namespace")
        for component in span.adds:
            parse_component_id(component, "spans.adds")
        added += len(span.adds)
    if added > LABELS_MAX:
        raise Misuse("too many labels", field="spans.adds", limit=LABELS_MAX)
    for name in ("prompt_digest", "salt_digest"):
        _check_digest(getattr(claims, name), name)
    for name in ("model", "tokenizer", "template"):
        _check_digest(getattr(claims.engine, name), f"engine.{name}")
    if claims.engine.adapter != NO_ADAPTER:
        _check_digest(claims.engine.adapter, "engine.adapter")
    if min(claims.seq, claims.revision, claims.iat) < 0 or not claims.jti or not claims.sub:
        raise Misuse("a position, revision or name is missing", field="seq")


def _check_digest(text: str, field: str) -> None:
    if len(text) != _HEX_DIGEST_CHARS or not set(text) <= set("0123456789abcdef"):
        raise Misuse(f"{field} is not a SHA-256 in hexadecimal", field=field)
