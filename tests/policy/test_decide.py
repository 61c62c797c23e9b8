"""Decisions: a deny wins, the default is deny, the index equals Casbin over everything."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.decide import DENIED_BY_RULE, NO_RULE, Allow, Decisions, Deny, decide, explain
from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

TENANT = ComponentId("a" * 32)
GROUPS = [f"group:{digit * 32}" for digit in "bcd"]
READ = Permission.GROUP_READ
ACTIONS = [Permission.GROUP_READ, Permission.GRANT_ACT_AS]

users = st.sampled_from([f"user:u{number}" for number in range(3)])
roles = st.sampled_from([f"role:r{number}" for number in range(3)])
groups = st.sampled_from(GROUPS)
group_resources = st.one_of(groups, st.just("group:*"))
rules = st.one_of(
    st.builds(
        Rule,
        st.one_of(users, roles, groups),
        st.just(READ),
        group_resources,
        st.sampled_from(Effect),
    ),
    st.builds(
        Rule,
        st.one_of(users, roles),
        st.just(Permission.GRANT_ACT_AS),
        st.sampled_from(["grant:*", "grant:x"]),
        st.sampled_from(Effect),
    ),
)
# Roles only point to higher numbers, so there is no cycle.
role_links = st.sampled_from(
    [Link(f"role:r{low}", f"role:r{high}") for low in range(3) for high in range(low + 1, 3)]
)
links = st.one_of(
    st.builds(Link, users, st.one_of(roles, groups)), st.builds(Link, groups, roles), role_links
)


@settings(max_examples=300)
@given(
    st.sets(rules, max_size=10),
    st.sets(links, max_size=8),
    users,
    st.sampled_from([(READ, GROUPS[0]), (READ, GROUPS[1]), (Permission.GRANT_ACT_AS, "grant:x")]),
)
def test_the_index_answers_as_casbin_over_every_rule(
    held: set[Rule], linked: set[Link], user: str, asked: tuple[Permission, str]
) -> None:
    enforcer = TenantEnforcer(TENANT, 1, held, linked)
    action, resource = asked
    allowed, _, _ = enforcer.enforce(user, action, resource)
    assert allowed == enforcer.enforce_all(user, action, resource)[0]
    assert allowed == by_hand(held, linked, user, action, resource)
    assert isinstance(decide(enforcer, user, action, resource), Allow if allowed else Deny)


def by_hand(
    held: set[Rule], linked: set[Link], user: str, action: Permission, resource: str
) -> bool:
    """The rule of the model, written without Casbin and without our index."""
    names = {user}
    while more := {link.parent for link in linked if link.member in names} - names:
        names |= more
    kind = resource.split(":", maxsplit=1)[0]
    effects = {
        rule.effect
        for rule in held
        if rule.subject in names
        and rule.action is action
        and rule.resource in {resource, f"{kind}:*"}
    }
    return Effect.ALLOW in effects and Effect.DENY not in effects


def test_a_deny_wins_over_every_allow_and_says_so() -> None:
    rules = [
        Rule(GROUPS[0], READ, GROUPS[0], Effect.ALLOW),
        Rule("role:all", READ, "group:*", Effect.ALLOW),
        Rule("user:eve", READ, GROUPS[0], Effect.DENY),
    ]
    members = [
        Link("user:eve", GROUPS[0]),
        Link("user:ann", GROUPS[0]),
        Link("user:eve", "role:all"),
    ]
    enforcer = TenantEnforcer(TENANT, 1, rules, members)
    eve = decide(enforcer, "user:eve", READ, GROUPS[0])
    assert eve == Deny(DENIED_BY_RULE, rules[2])
    assert "user:eve" in explain(eve)
    ann = decide(enforcer, "user:ann", READ, GROUPS[0])
    assert ann == Allow(rules[0])
    assert explain(ann).startswith("allowed by")


def test_without_a_rule_the_answer_is_deny() -> None:
    enforcer = TenantEnforcer(TENANT, 1, [], [])
    decision = decide(enforcer, "user:ann", READ, GROUPS[0])
    assert decision == Deny(NO_RULE)
    assert "no rule" in explain(decision)


def test_a_group_never_stands_for_another() -> None:
    rules = [Rule(group, READ, group, Effect.ALLOW) for group in GROUPS]
    enforcer = TenantEnforcer(TENANT, 1, rules, [Link("user:ann", GROUPS[0])])
    answers = [isinstance(decide(enforcer, "user:ann", READ, group), Allow) for group in GROUPS]
    assert answers == [True, False, False]


def test_a_subject_that_is_no_subject_is_misuse() -> None:
    enforcer = TenantEnforcer(TENANT, 1, [], [])
    with pytest.raises(Misuse):
        decide(enforcer, "ann", READ, GROUPS[0])


def test_a_new_revision_is_never_answered_from_an_old_one() -> None:
    allow = [Rule("user:ann", READ, GROUPS[0], Effect.ALLOW)]
    before = TenantEnforcer(TENANT, 1, allow, [])
    after = TenantEnforcer(TENANT, 2, [], [])
    cache = Decisions()
    assert isinstance(cache.decide(before, "user:ann", READ, GROUPS[0]), Allow)
    assert isinstance(cache.decide(before, "user:ann", READ, GROUPS[0]), Allow)
    assert isinstance(cache.decide(after, "user:ann", READ, GROUPS[0]), Deny)
    assert (cache.hits, cache.misses) == (1, 2)


def test_another_tenant_subject_action_or_resource_is_another_answer() -> None:
    cache = Decisions()
    allow = [Rule("user:ann", READ, GROUPS[0], Effect.ALLOW)]
    mine = TenantEnforcer(TENANT, 1, allow, [])
    theirs = TenantEnforcer(ComponentId("f" * 32), 1, [], [])
    assert isinstance(cache.decide(mine, "user:ann", READ, GROUPS[0]), Allow)
    for enforcer, subject, resource in (
        (theirs, "user:ann", GROUPS[0]),
        (mine, "user:bob", GROUPS[0]),
        (mine, "user:ann", GROUPS[1]),
    ):
        assert isinstance(cache.decide(enforcer, subject, READ, resource), Deny)


def test_the_cache_is_bounded() -> None:
    cache = Decisions(entries_max=3)
    enforcer = TenantEnforcer(TENANT, 1, [], [])
    for number in range(10):
        cache.decide(enforcer, f"user:u{number}", READ, GROUPS[0])
    assert len(cache._entries) == 3


@pytest.mark.timeout(30)
def test_a_tenant_with_many_members_loads_in_linear_time() -> None:
    """Casbin by itself compares every link with every name: minutes for these."""
    rules = [Rule(GROUPS[0], READ, GROUPS[0], Effect.ALLOW)]
    links = [Link(f"user:u{number}", GROUPS[0]) for number in range(30_000)]
    enforcer = TenantEnforcer(TENANT, 1, rules, links)
    assert isinstance(decide(enforcer, "user:u29999", READ, GROUPS[0]), Allow)
    assert isinstance(decide(enforcer, "user:u30000", READ, GROUPS[0]), Deny)


@pytest.mark.parametrize("resource", ["group:*", "group", "*", "grant:x", "group:a,b", ""])
def test_a_question_is_about_one_resource_of_the_actions_kind(resource: str) -> None:
    rules = [Rule("user:ann", READ, "group:*", Effect.ALLOW)]
    enforcer = TenantEnforcer(TENANT, 1, rules, [])
    assert isinstance(decide(enforcer, "user:ann", READ, GROUPS[0]), Allow)
    with pytest.raises(Misuse) as caught:
        decide(enforcer, "user:ann", READ, resource)
    assert caught.value.field == "resource"


def test_a_casbin_that_is_switched_off_allows_everything_and_we_do_not() -> None:
    rules = [Rule("user:ann", READ, GROUPS[0], Effect.ALLOW)]
    enforcer = TenantEnforcer(TENANT, 1, rules, [])
    enforcer._casbin.enable_enforce(False)
    asked = ("user:eve", TENANT, GROUPS[0], READ.value)
    assert enforcer._casbin.enforce(*asked)
    assert isinstance(decide(enforcer, "user:ann", READ, GROUPS[0]), Deny)
    assert isinstance(decide(enforcer, "user:eve", READ, GROUPS[0]), Deny)


def test_building_in_steps_makes_the_same_enforcer_and_each_step_is_short() -> None:
    held = [Rule(f"user:u{n}", READ, GROUPS[n % 3], Effect.ALLOW) for n in range(1000)]
    linked = [Link(f"user:u{n}", f"role:r{n % 7}") for n in range(1000)]
    done: list[TenantEnforcer] = []

    def stepping() -> Iterator[None]:
        done.append((yield from TenantEnforcer.building(TENANT, 3, held, linked)))

    assert len(list(stepping())) >= 5 * (1000 // 64)
    (built,) = done
    whole = TenantEnforcer(TENANT, 3, held, linked)
    assert (built.rules, built.links, built.revision) == (whole.rules, whole.links, 3)
    for number in range(0, 1000, 97):
        asked = (f"user:u{number}", READ, GROUPS[1])
        assert decide(built, *asked) == decide(whole, *asked)


def test_what_an_enforcer_takes_is_estimated_from_above_and_not_wildly() -> None:
    def taken(count: int) -> tuple[int, int]:
        tracemalloc.start()
        enforcer = TenantEnforcer(
            TENANT,
            1,
            [Rule(f"user:u{n}", READ, f"group:{n:032x}", Effect.ALLOW) for n in range(count)],
            [Link(f"user:u{n}", f"role:r{n}") for n in range(count)],
        )
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size, enforcer.size_bytes

    taken(10)  # what Python keeps for all of them
    for count in (10, 3000):
        measured, estimated = taken(count)
        assert measured <= estimated <= 4 * measured, (count, measured, estimated)
