"""Conditions: typed, three-valued, with windows that say until when they are right."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import casbin
import pytest
from casbin.model import Model
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.conditions import (
    ALWAYS,
    CONDITION_CHARS_MAX,
    MODELS_MAX,
    NOWHERE,
    PURPOSES_MAX,
    Condition,
    Context,
    Day,
    Sensitivity,
    Window,
    decode_condition,
    encode_condition,
    fields_of,
    parse_condition,
)
from policy.decide import Allow, Decisions, Deny, decide
from policy.enforcer import TenantEnforcer
from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

TENANT = ComponentId("a" * 32)
GROUPS = [f"group:{digit * 32}" for digit in "bc"]
READ = Permission.GROUP_READ
MODELS = [ComponentId(digit * 32) for digit in "de"]
ZONES = ["Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "UTC"]
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)  # a Wednesday

clocks = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.sampled_from([0, 15, 30, 59]))
days = st.lists(st.sampled_from(Day), unique=True, max_size=3).map(tuple)
times = st.tuples(clocks, clocks).filter(lambda pair: pair[0] != pair[1])
windows = st.builds(
    lambda zone, pair, on: Window(zone, pair[0], pair[1], on), st.sampled_from(ZONES), times, days
)
levels = st.none() | st.sampled_from(Sensitivity)
conditions = st.builds(
    Condition,
    purposes=st.sampled_from([(), ("support",), ("support", "training")]),
    models=st.sampled_from([(), (MODELS[0],), tuple(MODELS)]),
    window=st.none() | windows,
    sensitivity_max=levels,
)
instants = st.integers(0, 365 * 24 * 3600).map(
    lambda ahead: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=ahead)
)
contexts = st.builds(
    Context,
    purpose=st.sampled_from([None, "support", "training", "other"]),
    model=st.sampled_from([None, *MODELS]),
    sensitivity=levels,
    at=st.none() | instants,
)
users = st.sampled_from(["user:u0", "user:u1"])
rules = st.builds(
    Rule,
    st.sampled_from(["user:u0", "role:r0", "role:r1", GROUPS[0]]),
    st.just(READ),
    st.sampled_from([*GROUPS, "group:*"]),
    st.sampled_from(Effect),
    conditions,
)
links = st.sampled_from(
    [
        Link("user:u0", "role:r0"),
        Link("user:u1", GROUPS[0]),
        Link("role:r0", "role:r1"),
        Link(GROUPS[0], "role:r1"),
    ]
)


def plain(held: set[Rule], linked: set[Link]) -> Any:
    """Plain Casbin with the conditions in its own matcher: the whole set, no index of ours."""
    model = Model()
    text = MODEL.replace("r = sub, dom, obj, act", "r = sub, dom, obj, act, ctx")
    text = text.replace("p = sub, dom, obj, act, eft", "p = sub, dom, obj, act, eft, cond")
    text = text.replace("m = ", "m = p_applies(p.cond, p.eft, r.ctx) && ")
    model.load_model_from_text(text)
    enforcer = casbin.Enforcer(model)
    enforcer.add_function("p_any", any_of_kind)
    enforcer.add_function("p_applies", applies)
    for rule in held:
        enforcer.add_policy(
            rule.subject, TENANT, rule.resource, rule.action.value, rule.effect.value,
            encode_condition(rule.condition) or "-",
        )  # fmt: skip
    for link in linked:
        enforcer.add_grouping_policy(link.member, link.parent, TENANT)
    return enforcer


def applies(text: str, effect: str, context: Context) -> bool:
    """What the rules of `policy.conditions` say, field by field."""
    condition = decode_condition("" if text == "-" else text)
    unknown = effect == "deny"
    verdicts = [
        unknown if context.purpose is None else context.purpose in condition.purposes
        for _ in condition.purposes[:1]
    ]
    verdicts += [
        unknown if context.model is None else context.model in condition.models
        for _ in condition.models[:1]
    ]
    order = list(Sensitivity)
    if condition.sensitivity_max is not None:
        level = context.sensitivity
        verdicts.append(
            unknown
            if level is None
            else order.index(level) <= order.index(condition.sensitivity_max)
        )
    if condition.window is not None:
        verdicts.append(unknown if context.at is None else condition.window.holds(context.at))
    return all(verdicts)


@settings(max_examples=300)
@given(
    st.sets(rules, max_size=8),
    st.sets(links, max_size=4),
    users,
    st.sampled_from(GROUPS),
    contexts,
)
def test_index_and_conditions_decide_as_plain_casbin_with_conditions_in_its_matcher(
    held: set[Rule], linked: set[Link], user: str, resource: str, context: Context
) -> None:
    enforcer = TenantEnforcer(TENANT, 1, held, linked)
    decision = decide(enforcer, user, READ, resource, context)
    asked = (user, TENANT, resource, READ.value, context)
    expected = bool(held) and bool(plain(held, linked).enforce(*asked))
    assert isinstance(decision, Allow) == expected
    assert enforcer.enforce_all(user, READ, resource, context)[0] == expected


@settings(max_examples=300)
@given(st.sets(rules, max_size=6), contexts, contexts)
def test_a_cached_decision_is_the_one_that_would_be_taken_now(
    held: set[Rule], first: Context, second: Context
) -> None:
    enforcer = TenantEnforcer(TENANT, 1, held, [Link("user:u0", "role:r0")])
    cache = Decisions()
    for context in (first, second, first):
        cached = cache.decide(enforcer, "user:u0", READ, GROUPS[0], context)
        fresh = decide(enforcer, "user:u0", READ, GROUPS[0], context)
        assert (type(cached), cached.rule) == (type(fresh), fresh.rule)


@settings(max_examples=200)
@given(windows, instants, st.floats(0, 0.999))
def test_a_window_neither_opens_nor_closes_before_it_said(
    window: Window, at: datetime, share: float
) -> None:
    until = window.until(at)
    assert at < until <= at + timedelta(days=7)
    assert window.holds(at + (until - at) * share) == window.holds(at)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_a_window_across_the_change_of_clocks_says_when_it_changes(zone: str) -> None:
    # 02:15 to 02:45 is not there in the night of spring, and is there twice in that of autumn.
    window = Window(zone, "02:15", "02:45")
    for start in (datetime(2026, 3, 7, tzinfo=UTC), datetime(2026, 10, 24, tzinfo=UTC)):
        at, end = start, start + timedelta(days=24)
        while at < end:
            until = window.until(at)
            held = {window.holds(at + step * (until - at) / 50) for step in range(50)}
            assert len(held) == 1, (at, until)
            at = until


def test_a_window_over_midnight_belongs_to_the_day_it_began_on() -> None:
    window = Window("Europe/Berlin", "22:00", "06:00", (Day.FRI,))
    assert window.holds(datetime(2026, 3, 6, 21, 30, tzinfo=UTC))  # Friday 22:30
    assert window.holds(datetime(2026, 3, 7, 4, 59, tzinfo=UTC))  # Saturday 05:59
    assert not window.holds(datetime(2026, 3, 7, 5, 0, tzinfo=UTC))
    assert not window.holds(datetime(2026, 3, 7, 21, 30, tzinfo=UTC))
    assert not window.holds(datetime(2026, 3, 6, 4, 0, tzinfo=UTC))  # Friday 05:00


def test_what_is_not_known_lets_a_deny_apply_and_no_allow() -> None:
    narrow = Condition(purposes=("support",), sensitivity_max=Sensitivity.INTERNAL)
    known = Context(purpose="support", sensitivity=Sensitivity.PUBLIC)
    outside = Context(purpose="support", sensitivity=Sensitivity.RESTRICTED)
    allow = TenantEnforcer(TENANT, 1, [Rule("user:u0", READ, "group:*", Effect.ALLOW, narrow)], [])
    assert isinstance(decide(allow, "user:u0", READ, GROUPS[0], known), Allow)
    for context in (outside, NOWHERE, Context(purpose="support")):
        assert isinstance(decide(allow, "user:u0", READ, GROUPS[0], context), Deny)
    both = [
        Rule("user:u0", READ, "group:*", Effect.ALLOW),
        Rule("user:u0", READ, "group:*", Effect.DENY, narrow),
    ]
    deny = TenantEnforcer(TENANT, 1, both, [])
    assert isinstance(decide(deny, "user:u0", READ, GROUPS[0], outside), Allow)
    for context in (known, NOWHERE, Context(purpose="support")):
        assert isinstance(decide(deny, "user:u0", READ, GROUPS[0], context), Deny)


def test_a_deny_above_a_sensitivity_keeps_the_rest_readable() -> None:
    above = Condition(sensitivity_above=Sensitivity.INTERNAL)
    held = [
        Rule(GROUPS[0], READ, GROUPS[0], Effect.ALLOW),
        Rule("user:u0", READ, "group:*", Effect.DENY, above),
    ]
    enforcer = TenantEnforcer(TENANT, 1, held, [Link("user:u0", GROUPS[0])])
    answers = [
        isinstance(decide(enforcer, "user:u0", READ, GROUPS[0], Context(sensitivity=level)), Allow)
        for level in Sensitivity
    ]
    assert answers == [True, True, False, False]


def test_a_decision_says_until_when_and_the_cache_keeps_to_it() -> None:
    office = Condition(window=Window("UTC", "09:00", "17:00"))
    enforcer = TenantEnforcer(
        TENANT, 1, [Rule("user:u0", READ, "group:*", Effect.ALLOW, office)], []
    )
    cache = Decisions()
    inside = cache.decide(enforcer, "user:u0", READ, GROUPS[0], Context(at=NOON))
    assert isinstance(inside, Allow)
    assert inside.until == NOON.replace(hour=17)
    for at, allowed in (
        (NOON.replace(hour=16, minute=59), True),
        (NOON.replace(hour=17), False),
        (NOON.replace(hour=8), False),
        (NOON, True),
    ):
        again = cache.decide(enforcer, "user:u0", READ, GROUPS[0], Context(at=at))
        assert isinstance(again, Allow) == allowed, at
    assert isinstance(cache.decide(enforcer, "user:u0", READ, GROUPS[0]), Deny)
    assert cache.hits == 1


@given(conditions)
def test_a_condition_is_stored_as_one_text_and_comes_back(condition: Condition) -> None:
    text = encode_condition(condition)
    assert decode_condition(text) == condition
    assert parse_condition(fields_of(condition)) == condition
    assert (text == "") == (condition == ALWAYS)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"purposes": ["Support"]}, "purposes"),
        ({"purposes": ["a" * 33]}, "purposes"),
        ({"purposes": [f"p{n}" for n in range(PURPOSES_MAX + 1)]}, "purposes"),
        ({"models": ["gpt"]}, "models"),
        ({"models": [f"{n:032x}" for n in range(MODELS_MAX + 1)]}, "models"),
        ({"window": {"zone": "Mars/Base", "start": "09:00", "end": "10:00"}}, "zone"),
        ({"window": {"zone": "../etc/passwd", "start": "09:00", "end": "10:00"}}, "zone"),
        ({"window": {"zone": "UTC", "start": "9:00", "end": "10:00"}}, "start"),
        ({"window": {"zone": "UTC", "start": "09:00", "end": "24:00"}}, "end"),
        ({"window": {"zone": "UTC", "start": "09:00", "end": "09:00"}}, "end"),
        (
            {"window": {"zone": "UTC", "start": "09:00", "end": "10:00", "days": ["mon", "mon"]}},
            "days",
        ),
        ({"window": {"zone": "UTC", "start": "09:00"}}, "condition"),
        ({"sensitivity_max": "secret"}, "condition"),
        ({"sensitivity_max": "public", "sensitivity_above": "internal"}, "sensitivity_above"),
        ({"expression": "r.sub == 'root'"}, "condition"),
        ({"purposes": "support"}, "condition"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_naming_the_field(
    fields: dict[str, object], field: str
) -> None:
    with pytest.raises(Misuse) as refused:
        parse_condition(fields)
    assert refused.value.field == field


def test_the_largest_condition_fits_into_what_is_stored() -> None:
    largest = Condition(
        purposes=tuple(f"{'p' * 30}{n:02}" for n in range(PURPOSES_MAX)),
        models=tuple(ComponentId(f"{n:032x}") for n in range(MODELS_MAX)),
    )
    assert len(encode_condition(largest)) <= CONDITION_CHARS_MAX
    with pytest.raises(Misuse):
        decode_condition('{"purposes":["x"],"else":1}')
