"""What the tests of the evidence rooms share: a started log, and changes that journal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.signing import Signer, Verifier
from service.auth.actor import SYSTEM
from service.changes import Changes
from service.db.session import Database
from service.journal.file import Journal
from service.journal.reconcile import reconcile
from service.keys.models import Purpose
from service.keys.uses import KeyUses
from service.log.kick import Kick


@dataclass(frozen=True, slots=True)
class Evidence:
    """The log, journal and signer of one running service."""

    database: Database
    signer: Signer
    verifier: Verifier
    journal: Journal
    kick: Kick
    changes: Changes


def new_signer(seed: str = "service") -> Signer:
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed.encode()).digest())
    return Signer(key)


def noted() -> KeyUses:
    """Uses of keys that a test makes and nobody records."""
    return KeyUses(SYSTEM, Purpose.CHECK, None)


async def start(database: Database, journal_path: Path, signer: Signer | None = None) -> Evidence:
    """As the service starts: journal opened, compared with the database, log begun."""
    signer = signer or new_signer()
    verifier = Verifier({signer.kid: signer.public_key})
    journal, kick = Journal(journal_path), Kick()
    changes = Changes(database, signer, journal, kick)
    await journal.open()
    try:
        await reconcile(database, journal, changes, verifier)
    except BaseException:
        await journal.close()
        raise
    return Evidence(database, signer, verifier, journal, kick, changes)


__all__ = ["SYSTEM", "Evidence", "new_signer", "noted", "start"]
