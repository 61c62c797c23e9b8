"""What is remembered of a verified grant, and what is judged anew at every use."""

from __future__ import annotations

from typing import Any

import pytest

from policy.grants import CLOCK_SKEW_S
from policy.signing import Signer, Verifier
from sidecar.lookup.seen_grants import SeenGrants
from strongroom.errors import Refused
from strongroom.log import LogHead
from tests.sidecar.control_plane import FakeControlPlane, Granted

HEAD = LogHead("epoch", 7, "a" * 64)
PROMPT = range(64)


class Counting(Verifier):
    """Counts signatures that were looked at."""

    def __init__(self, signer: Signer) -> None:
        super().__init__({signer.kid: signer.public_key})
        self.looked_at = 0

    def verify(self, typ: str, token: str) -> bytes:
        self.looked_at += 1
        return super().verify(typ, token)


class Door:
    """A control plane's grants, and who remembers them."""

    def __init__(self, **settings: Any) -> None:
        self.control = FakeControlPlane()
        self.tenant = self.control.tenant()
        self.verifier = Counting(self.control.signer)
        granted = self.grant()
        self.seen = SeenGrants(self.verifier, granted.claims.iss, **settings)

    def grant(self) -> Granted:
        return self.control.grant(self.tenant, PROMPT)


@pytest.fixture
def door() -> Door:
    return Door()


def test_a_grant_is_verified_once_and_says_the_same_every_time(door: Door) -> None:
    granted = door.grant()
    now_s = granted.claims.iat
    for _ in range(3):
        claims = door.seen.verify(granted.token, now_s=now_s, head=HEAD)
        assert claims == granted.claims
    assert door.verifier.looked_at == 1
    door.seen.verify(door.grant().token, now_s=now_s, head=HEAD)
    assert door.verifier.looked_at == 2


def test_a_remembered_grant_still_ends_on_time_and_begins_no_earlier(door: Door) -> None:
    granted = door.grant()
    claims = granted.claims
    door.seen.verify(granted.token, now_s=claims.exp - 1, head=HEAD)
    for now_s in (claims.exp, claims.exp + 1000, claims.iat - CLOCK_SKEW_S - 1):
        with pytest.raises(Refused):
            door.seen.verify(granted.token, now_s=now_s, head=HEAD)
    assert door.seen.verify(granted.token, now_s=claims.iat, head=HEAD) == claims


def test_other_bytes_are_another_grant(door: Door) -> None:
    granted = door.grant()
    now_s = granted.claims.iat
    door.seen.verify(granted.token, now_s=now_s, head=HEAD)
    head, payload, signature = granted.token.split(".")
    other = door.grant().token.split(".")
    for forged in (
        ".".join((head, other[1], signature)),
        ".".join((head, payload, other[2])),
        granted.token + "=",
        " " + granted.token,
    ):
        with pytest.raises(Refused):
            door.seen.verify(forged, now_s=now_s, head=HEAD)


def test_nothing_is_remembered_of_a_grant_by_another_key(door: Door) -> None:
    stranger = FakeControlPlane()
    assert stranger.signer.kid != door.control.signer.kid
    token = stranger.grant(stranger.tenant(), PROMPT).token
    for _ in range(2):
        with pytest.raises(Refused):
            door.seen.verify(token, now_s=door.grant().claims.iat, head=HEAD)
    assert len(door.seen) == 0


def test_a_move_of_the_log_and_another_epoch_forget_everything(door: Door) -> None:
    granted = door.grant()
    for head in (HEAD, LogHead("epoch", 8, "b" * 64), LogHead("another", 8, "b" * 64), None):
        door.seen.verify(granted.token, now_s=granted.claims.iat, head=head)
        assert len(door.seen) == 1
    assert door.verifier.looked_at == 4


def test_what_is_remembered_is_bounded() -> None:
    door = Door(seen_max=3)
    grants = [door.grant() for _ in range(5)]
    for granted in grants:
        door.seen.verify(granted.token, now_s=granted.claims.iat, head=HEAD)
    assert len(door.seen) == 3
