"""Enrolling with a one-time join token."""

from __future__ import annotations

import re
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from policy.signing import Verifier, decode_base64url, encode_base64url
from service.auth.actor import Actor, ActorKind
from service.changes import Changes
from service.log import store as log_store
from service.schemas import NAME_PATTERN
from service.sidecars import store
from strongroom.control import EnrolAnswer, EnrolRequest
from strongroom.errors import Misuse, Refused
from strongroom.limits import NAME_CHARS_MAX

ENROL_PATH: Final = "/v1/sidecars"
ENROL_BODY_BYTES_MAX: Final = 16 * 1024
"""A token, a name and two keys; nothing has been proven when it is read."""
_KEY_BYTES: Final = 32
_NAME = re.compile(NAME_PATTERN)


def check_request(request: EnrolRequest) -> None:
    """Raise `Misuse` for a name or keys that no sidecar can have."""
    if len(request.name) > NAME_CHARS_MAX or _NAME.match(request.name) is None:
        raise Misuse("a sidecar's name is plain", field="name", limit=NAME_CHARS_MAX)
    check_keys(request.signing_key, request.hpke_key)


def check_keys(signing_key: str, hpke_key: str) -> None:
    """Raise `Misuse` for keys that no sidecar can have."""
    for field, text in (("signing_key", signing_key), ("hpke_key", hpke_key)):
        raw = decode_base64url(text, field)
        if len(raw) != _KEY_BYTES:
            raise Misuse(f"{field} has 32 bytes", field=field, limit=_KEY_BYTES)
        try:
            if field == "signing_key":
                Ed25519PublicKey.from_public_bytes(raw)
            else:
                # A point of small order gives a secret that everybody knows: it is refused here.
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(raw))
        except ValueError as error:
            raise Misuse(f"{field} is not a usable key", field=field) from error


async def enrol(
    changes: Changes, verifier: Verifier, issuer: str, request: EnrolRequest
) -> EnrolAnswer:
    """A new sidecar. Raises `Refused` for a token that is unknown, spent or expired."""
    check_request(request)
    actor = Actor(ActorKind.SIDECAR, request.name)
    try:
        async with changes.begin(actor) as change:
            token = await store.take_join_token(change.session, request.join_token)
            sidecar = await store.enrol(change.session, request, token)
            tenants = await store.tenants_of(change.session, sidecar.id)
            head = await log_store.head(change.session)
            await change.audit(
                "sidecar.enrolled",
                target=sidecar.id,
                details={"name": sidecar.name, "every_tenant": sidecar.every_tenant},
                references=tenants,
            )
    except Refused:
        async with changes.begin(actor) as change:
            await change.audit("sidecar.enrolled", outcome="refused", reason="join_token")
        raise
    return EnrolAnswer(
        sidecar=sidecar.id,
        issuer=issuer,
        service_keys={kid: encode_base64url(key) for kid, key in verifier.public_keys.items()},
        epoch=head.epoch,
        tenants=tenants,
    )
