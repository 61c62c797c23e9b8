"""What a change would do: told by asking both policies, and complete or said not to be."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.conditions import NOWHERE, PURPOSES_MAX, Condition, Context
from policy.decide import Allow, Decision, decide
from policy.documents import finished
from policy.enforcer import TenantEnforcer
from policy.impact import CONTEXTS_MAX, Impact, Side, comparing
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule
from tests.policy.test_conditions import GROUPS, TENANT

READ = Permission.GROUP_READ
NOW = datetime(2026, 3, 4, 12, tzinfo=UTC)
USERS = ["user:u0", "user:u1"]

plain_rules = st.builds(
    Rule,
    st.sampled_from([*USERS, "role:r0"]),
    st.just(READ),
    st.sampled_from([*GROUPS, "group:*"]),
    st.sampled_from(Effect),
)
some_links = st.sets(st.sampled_from([Link(user, "role:r0") for user in USERS]))


def side(held: set[Rule], linked: set[Link]) -> Side:
    enforcer = TenantEnforcer(TENANT, 1, held, linked)

    def ask(subject: str, action: Permission, resource: str, context: Context) -> Decision:
        return decide(enforcer, subject, action, resource, context)

    return Side(enforcer, ask)


def compare(before: Side, after: Side, questions_max: int = 1000) -> Impact:
    return finished(comparing(before, after, USERS, GROUPS, NOW, questions_max))


def batched(names: list[str], most: int) -> list[list[str]]:
    return [names[start : start + most] for start in range(0, len(names), most)]


@settings(max_examples=200)
@given(st.sets(plain_rules, max_size=5), some_links, st.sets(plain_rules, max_size=5), some_links)
def test_gains_losses_and_what_nobody_has_any_more_are_those_of_asking_everything(
    held: set[Rule], linked: set[Link], later: set[Rule], later_linked: set[Link]
) -> None:
    before, after = side(held, linked), side(later, later_linked)
    impact = compare(before, after)

    def may(one: Side, user: str, group: str) -> bool:
        return isinstance(one.decide(user, READ, group, NOWHERE), Allow)

    every = [(user, group) for user in USERS for group in GROUPS]
    gained = {pair for pair in every if may(after, *pair) and not may(before, *pair)}
    lost = {pair for pair in every if may(before, *pair) and not may(after, *pair)}
    assert {(each.subject, each.resource) for each in impact.gains} == gained
    assert {(each.subject, each.resource) for each in impact.losses} == lost
    assert impact.abandoned == {
        group for _, group in lost if not any(may(after, user, group) for user in USERS)
    }
    assert impact.complete


def test_too_many_questions_are_said_to_be_too_many() -> None:
    before = side(
        {Rule(user, READ, group, Effect.ALLOW) for user in USERS for group in GROUPS}, set()
    )
    after = side(set(), set())
    assert compare(before, after).complete
    assert not compare(before, after, questions_max=2).complete


def test_conditions_that_make_too_many_contexts_are_said_to_be_too_many() -> None:
    def with_purposes(number: int) -> Side:
        names = sorted(f"p{each}" for each in range(number))
        return side(
            {
                Rule(USERS[0], READ, GROUPS[0], Effect.ALLOW, Condition(purposes=tuple(some)))
                for some in batched(names, PURPOSES_MAX)
            },
            set(),
        )

    nobody = side(set(), set())
    assert compare(nobody, with_purposes(CONTEXTS_MAX - 2)).complete
    assert not compare(nobody, with_purposes(CONTEXTS_MAX)).complete
    assert not compare(with_purposes(CONTEXTS_MAX), nobody).complete
