"""Bounds, and what Casbin makes of nothing at all."""

from __future__ import annotations

from typing import Any

import casbin
import msgspec
import pytest
from casbin.model import Model
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import grants, rules
from policy.decide import Allow, Decisions, Deny, decide
from policy.enforcer import TenantEnforcer
from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule, check_rules
from policy.signing import Signer, Verifier
from strongroom.control import Typ
from strongroom.errors import Misuse, Refused
from strongroom.identity import ComponentId

TENANT = ComponentId("a" * 32)
OTHER_TENANT = ComponentId("f" * 32)
GROUP = f"group:{'b' * 32}"
READ = Permission.GROUP_READ
NOW = 1_800_000_000


def bare() -> Any:
    model = Model()
    model.load_model_from_text(MODEL)
    enforcer = casbin.Enforcer(model)
    enforcer.add_function("p_any", any_of_kind)
    return enforcer


def test_a_request_of_nothing_against_no_rules_is_allowed_by_casbin_and_not_by_us() -> None:
    # With no rule Casbin runs the matcher once against empty values, and equal is equal.
    assert bare().enforce("", "", "", "")
    empty = TenantEnforcer(TENANT, 1, [], [])
    assert isinstance(decide(empty, "user:eve", READ, GROUP), Deny)
    for subject, resource in (("", ""), ("", GROUP), ("user:eve", "")):
        with pytest.raises(Misuse):
            decide(empty, subject, READ, resource)


def test_the_matcher_keeps_domains_apart_when_one_casbin_holds_both() -> None:
    # Ours holds one tenant only; the model must not depend on that.
    raw = bare()
    raw.add_policy("user:eve", TENANT, GROUP, READ.value, "allow")
    raw.add_grouping_policy("user:ann", "role:reader", TENANT)
    raw.add_policy("role:reader", OTHER_TENANT, GROUP, READ.value, "allow")
    assert raw.enforce("user:eve", TENANT, GROUP, READ.value)
    assert not raw.enforce("user:eve", OTHER_TENANT, GROUP, READ.value)
    assert not raw.enforce("user:ann", OTHER_TENANT, GROUP, READ.value)


def test_too_many_rules_are_refused_naming_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES_MAX", 2)
    held = [Rule(f"user:u{number}", READ, GROUP, Effect.ALLOW) for number in range(3)]
    check_rules(held[:2], [])
    with pytest.raises(Misuse) as caught:
        check_rules(held, [])
    assert (caught.value.field, caught.value.limit) == ("rules", 2)


def test_too_many_memberships_are_refused_naming_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "LINKS_MAX", 2)
    linked = [Link(f"user:u{number}", GROUP) for number in range(3)]
    check_rules([], linked[:2])
    with pytest.raises(Misuse) as caught:
        check_rules([], linked)
    assert (caught.value.field, caught.value.limit) == ("links", 2)


def test_the_decision_that_was_used_least_recently_goes_first() -> None:
    enforcer = TenantEnforcer(TENANT, 1, [Rule("user:a", READ, GROUP, Effect.ALLOW)], [])
    cache = Decisions(entries_max=2)
    for subject in ("user:a", "user:b", "user:a", "user:c", "user:a"):
        cache.decide(enforcer, subject, READ, GROUP)
    assert (cache.hits, cache.misses) == (2, 3)
    assert isinstance(cache.decide(enforcer, "user:a", READ, GROUP), Allow)
    assert cache.hits == 3


@pytest.mark.parametrize("opening", ["[", '{"a":'], ids=["lists", "objects"])
def test_a_signed_payload_nested_deep_in_an_ignored_field_is_refused(opening: str) -> None:
    # It is skipped by recursion, whose limit is an error of another kind than a wrong type.
    signer = Signer(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
    payload = f'{{"added":{opening * 5_000}'.encode()
    with pytest.raises(RecursionError):
        msgspec.json.decode(payload, type=dict[str, Any])
    with pytest.raises(Refused):
        grants.verify(
            signer.sign(Typ.GRANT, payload),
            Verifier({signer.kid: signer.public_key}),
            now_s=NOW,
            issuer="strongroom",
        )
