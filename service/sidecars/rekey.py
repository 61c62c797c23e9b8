"""A sidecar exchanges its keys while it serves.

Rules:
- The call is proven by the key in force, and the new key signs that it is meant to follow that
  one (`KeyChangeClaims`): nobody can have somebody else's key put in force, nor replay a change.
- With the commit the old key is nobody's. What was proven by it before and is carried out after
  is refused in its own transaction (`store.require_current`); streams that it opened end.
- A key that was ever a sidecar's is taken for no other sidecar, nor again.
- Said again by the new key it changes nothing: a sidecar that did not hear the answer asks so
  whether the change was made.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import update

from policy.signing import Verifier, decode_base64url, key_id
from service.auth.actor import Actor, ActorKind
from service.changes import Changes
from service.db.base import now
from service.sidecars import store
from service.sidecars.enrolment import check_keys
from service.sidecars.models import FormerKey, Sidecar
from service.sidecars.store import Enrolled
from strongroom.control import KeyChangeAnswer, KeyChangeClaims, KeyChangeRequest, Typ
from strongroom.errors import Conflict, Misuse, Refused

_decoder = msgspec.json.Decoder(KeyChangeClaims, strict=True)


async def change_keys(
    changes: Changes, caller: Enrolled, request: KeyChangeRequest
) -> KeyChangeAnswer:
    """Put the keys of `request` in force for `caller`, and no other any more."""
    check_keys(request.signing_key, request.hpke_key)
    new_key = decode_base64url(request.signing_key, "signing_key")
    claims = _claims(request.possession, new_key)
    if (claims.sidecar, claims.signing_key, claims.hpke_key) != (
        caller.id,
        request.signing_key,
        request.hpke_key,
    ):
        raise Misuse("the new key signed something else", field="possession")
    async with changes.begin(Actor(ActorKind.SIDECAR, caller.id)) as change:
        await store.require_current(change.session, caller)
        row = await store.get(change.session, caller.id)
        if (row.signing_key, row.hpke_key) == (request.signing_key, request.hpke_key):
            return KeyChangeAnswer(key_id(new_key))
        if claims.replaces != row.signing_key:
            raise Conflict("this change follows another key", field="possession")
        if await store.was_ever_used(change.session, request.signing_key):
            raise Conflict("this key was a sidecar's before", field="signing_key")
        if row.hpke_key == request.hpke_key:
            raise Conflict("both keys are exchanged together", field="hpke_key")
        change.session.add(
            FormerKey(signing_key=row.signing_key, sidecar=row.id, replaced_at=change.at)
        )
        await change.session.execute(
            update(Sidecar)
            .where(Sidecar.id == row.id)
            .values(
                signing_key=request.signing_key, hpke_key=request.hpke_key, keys_changed_at=now()
            )
            .execution_options(synchronize_session=False)
        )
        await change.audit(
            "sidecar.keys_changed",
            target=caller.id,
            details={"from": key_id(caller.signing_key), "to": key_id(new_key)},
            references=await store.tenants_of(change.session, caller.id),
        )
    return KeyChangeAnswer(key_id(new_key))


def _claims(possession: str, new_key: bytes) -> KeyChangeClaims:
    try:
        payload = Verifier({key_id(new_key): new_key}).verify(Typ.KEY_CHANGE, possession)
        return _decoder.decode(payload)
    except (Refused, msgspec.DecodeError, UnicodeError) as error:
        raise Misuse("the new key did not sign this", field="possession") from error
