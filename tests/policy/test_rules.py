"""What does not get through the door: everything that Casbin is known to misread."""

from __future__ import annotations

import itertools
from typing import Any

import casbin
import pytest
from casbin.model import Model
from hypothesis import given
from hypothesis import strategies as st

from policy.decide import Allow, Deny, decide
from policy.enforcer import TenantEnforcer
from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import LINK_DEPTH_MAX, Effect, Link, Rule, check_rules, parse_rule
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

TENANT = ComponentId("a" * 32)
GROUP = f"group:{'b' * 32}"
OTHER_GROUP = f"group:{'c' * 32}"
READ = Permission.GROUP_READ


def raw_casbin() -> Any:
    """Casbin with our model and none of our doors: what a careless loader would do."""
    model = Model()
    model.load_model_from_text(MODEL)
    enforcer = casbin.Enforcer(model)
    enforcer.add_function("p_any", any_of_kind)
    return enforcer


def chain(length: int) -> list[Link]:
    names = ["user:deep", *(f"role:r{number}" for number in range(length))]
    return [Link(*pair) for pair in itertools.pairwise(names)]


class TestKnownFailuresOfCasbin:
    """Each first shows Casbin failing open or losing a rule, then our door or answer."""

    def test_a_misspelt_deny_is_no_deny_and_leaves_the_allow(self) -> None:
        raw = raw_casbin()
        raw.add_policy("user:eve", TENANT, GROUP, READ.value, "allow")
        raw.add_policy("user:eve", TENANT, GROUP, READ.value, "denied")
        assert raw.enforce("user:eve", TENANT, GROUP, READ.value)
        with pytest.raises(Misuse) as caught:
            parse_rule("user:eve", READ, GROUP, "denied")
        assert caught.value.field == "effect"
        with pytest.raises(Misuse):
            Rule("user:eve", READ, GROUP, "denied")  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", ["a,b", "a(b", "a]b", "a\nb", " a", "a ", "a#b", 'a"b', ""])
    def test_special_characters_corrupt_a_load(self, bad: str) -> None:
        for subject in (f"user:{bad}", f"role:{bad}"):
            with pytest.raises(Misuse) as caught:
                parse_rule(subject, READ, GROUP, "allow")
            assert caught.value.field == "subject"
        with pytest.raises(Misuse) as caught:
            parse_rule("user:a", READ, f"group:{bad}", "allow")
        assert caught.value.field == "resource"

    def test_a_comma_in_a_line_of_text_breaks_every_decision_of_the_tenant(self) -> None:
        from casbin.persist.adapter import load_policy_line

        raw = raw_casbin()
        load_policy_line(f"p, user:eve,x, {TENANT}, {GROUP}, {READ.value}, deny", raw.get_model())
        with pytest.raises(RuntimeError, match="invalid policy size"):
            raw.enforce("user:ann", TENANT, GROUP, READ.value)
        with pytest.raises(Misuse):
            parse_rule("user:eve,x", READ, GROUP, "deny")

    def test_a_subject_named_like_a_role_gains_it(self) -> None:
        raw = raw_casbin()
        raw.add_policy("admin", TENANT, GROUP, READ.value, "allow")
        assert raw.enforce("admin", TENANT, GROUP, READ.value)
        enforcer = TenantEnforcer(TENANT, 1, [Rule("role:admin", READ, GROUP, Effect.ALLOW)], [])
        assert isinstance(decide(enforcer, "user:admin", READ, GROUP), Deny)
        with pytest.raises(Misuse):
            decide(enforcer, "admin", READ, GROUP)

    def test_roles_deeper_than_ten_are_not_followed_so_that_a_deny_is_lost(self) -> None:
        raw = raw_casbin()
        links = chain(12)
        for link in links:
            raw.add_grouping_policy(link.member, link.parent, TENANT)
        raw.add_policy("user:deep", TENANT, GROUP, READ.value, "allow")
        raw.add_policy("role:r11", TENANT, GROUP, READ.value, "deny")
        assert raw.enforce("user:deep", TENANT, GROUP, READ.value)
        with pytest.raises(Misuse) as caught:
            check_rules([], links)
        assert caught.value.limit == LINK_DEPTH_MAX

    def test_the_deepest_chain_that_is_accepted_is_followed(self) -> None:
        links = chain(LINK_DEPTH_MAX)
        rules = [
            Rule("user:deep", READ, GROUP, Effect.ALLOW),
            Rule(links[-1].parent, READ, GROUP, Effect.DENY),
        ]
        enforcer = TenantEnforcer(TENANT, 1, rules, links)
        assert isinstance(decide(enforcer, "user:deep", READ, GROUP), Deny)
        assert enforcer.enforce_all("user:deep", READ, GROUP)[0] is False

    def test_batch_removal_takes_others_rules_so_there_is_none(self) -> None:
        used = {"add_policy", "remove_policies", "remove_filtered_policy", "load_filtered_policy"}
        source = open_source(TenantEnforcer)
        assert not any(name in source for name in used)

    def test_a_rule_of_another_tenant_never_counts(self) -> None:
        rules = [Rule("user:alice", READ, GROUP, Effect.ALLOW)]
        mine = TenantEnforcer(TENANT, 1, rules, [])
        theirs = TenantEnforcer(ComponentId("f" * 32), 1, [], [])
        assert isinstance(decide(mine, "user:alice", READ, GROUP), Allow)
        assert isinstance(decide(theirs, "user:alice", READ, GROUP), Deny)


def open_source(kind: type) -> str:
    import inspect

    return inspect.getsource(kind)


@pytest.mark.parametrize(
    ("member", "parent"),
    [
        (GROUP, GROUP),
        (GROUP, "user:alice"),
        ("role:a", "user:alice"),
        ("role:a", GROUP),
        ("user:alice", "user:bob"),
    ],
)
def test_links_go_from_users_to_groups_to_roles_only(member: str, parent: str) -> None:
    with pytest.raises(Misuse):
        Link(member, parent)


def test_cycles_and_duplicates_are_refused() -> None:
    ring = [Link("role:a", "role:b"), Link("role:b", "role:c"), Link("role:c", "role:a")]
    with pytest.raises(Misuse, match="cycle"):
        check_rules([], ring)
    check_rules([], ring[:2])
    with pytest.raises(Misuse, match="cycle"):
        check_rules([], [Link("role:a", "role:a")])
    rule = Rule("user:a", READ, GROUP, Effect.ALLOW)
    with pytest.raises(Misuse):
        check_rules([rule, rule], [])
    with pytest.raises(Misuse):
        check_rules([], [ring[0], ring[0]])


def test_a_diamond_is_no_cycle() -> None:
    check_rules(
        [],
        [
            Link("user:a", "role:left"),
            Link("user:a", "role:right"),
            Link("role:left", "role:top"),
            Link("role:right", "role:top"),
        ],
    )


@pytest.mark.parametrize("resource", ["model:x", "*", "group", "group:", "group:**", ":x"])
def test_a_resource_of_another_kind_or_shape_is_refused(resource: str) -> None:
    with pytest.raises(Misuse) as caught:
        parse_rule("user:a", READ, resource, "allow")
    assert caught.value.field == "resource"


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20), st.text(max_size=8))
def test_the_door_raises_nothing_but_misuse(
    subject: str, action: str, resource: str, effect: str
) -> None:
    with pytest.raises(Misuse):
        parse_rule(subject, action, resource, effect)
