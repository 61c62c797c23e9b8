"""Decisions: from the cache, and by Casbin over the index's candidates, against plain pycasbin.

A tenant's rules are about its groups: each rule lets a user, a group or a role read one group,
every tenth denies, and users hold roles. The reference is one plain `casbin.Enforcer` that holds
the same rules with the same model, as its documentation sets one up; both have to give the same
answers, or there is no row.
"""

from __future__ import annotations

import hashlib
import time
from random import Random  # noqa: TID251 - seeded questions, no secret
from typing import Any, Final

import casbin
from casbin.model import Model

from benchmarks.control.group import GROUP
from benchmarks.rows import Row, absolute, ratio
from benchmarks.suite import Bench, Suite
from policy.decide import Allow, Decisions, decide
from policy.enforcer import TenantEnforcer
from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule
from strongroom.identity import ComponentId

_US: Final = 1e6
_MS: Final = 1e3
_READ: Final = Permission.GROUP_READ
_PLAIN_QUESTIONS: Final = 5
"""Of each round to plain pycasbin, which needs some 0.2 s for one."""

Question = tuple[str, str]
"""Subject and resource."""


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    return [*_of_many_tenants(bench), _against_pycasbin(bench)]


def _of_many_tenants(bench: Bench) -> list[Row]:
    """Uncached and cached decisions of random tenants, all of them in memory."""
    scale = bench.scale
    bench.say(f"decisions: {scale.tenants} tenants of {scale.tenant_rules} rules")
    enforcers = [house(tenant, scale.tenant_rules) for tenant in range(scale.tenants)]
    uncached_p50, uncached_p99, cached = [], [], []
    for number in bench.rounds("decisions"):
        random = Random(number)
        tenants = [random.randrange(scale.tenants) for _ in range(scale.decisions)]
        asked = [(tenant, question(random, tenant, scale.tenant_rules)) for tenant in tenants]
        decisions = Decisions()
        first, again = (
            [_seconds_of(decisions, enforcers[tenant], *each) for tenant, each in asked]
            for _ in range(2)
        )
        uncached_p50.append((_quantile(first, 0.50) * _MS, _quantile(again, 0.50) * _MS))
        uncached_p99.append((_quantile(first, 0.99) * _MS, _quantile(again, 0.99) * _MS))
        cached.append((_quantile(again, 0.50) * _US, _quantile(first, 0.50) * _US))
    note = f"{scale.tenants} tenants x {scale.tenant_rules} rules; reference: "
    return [
        absolute("decide_cached_us_p50", "us", cached, note + "the same decisions uncached"),
        absolute("decide_uncached_ms_p50", "ms", uncached_p50, note + "the same from the cache"),
        absolute("decide_uncached_ms_p99", "ms", uncached_p99, note + "the same from the cache"),
    ]


def _against_pycasbin(bench: Bench) -> Row:
    """Decisions a second: ours against one plain enforcer that holds the same rules."""
    rules = bench.scale.house_rules
    bench.say(f"decisions: plain pycasbin with {rules} rules")
    ours, plain = house(0, rules), plain_house(0, rules)
    pairs = []
    for number in bench.rounds("against pycasbin"):
        random = Random(number)
        mine_s = plain_s = 0.0
        for _ in range(_PLAIN_QUESTIONS):
            subject, resource = question(random, 0, rules)
            begun = time.perf_counter()
            answer = isinstance(decide(ours, subject, _READ, resource), Allow)
            between = time.perf_counter()
            plainly = plain.enforce(subject, ours.tenant, resource, _READ.value)
            plain_s += time.perf_counter() - between
            mine_s += between - begun
            if answer != plainly:
                raise AssertionError(f"pycasbin answers {plainly} for {subject}, {resource}")
        pairs.append((_PLAIN_QUESTIONS / mine_s, _PLAIN_QUESTIONS / plain_s))
    return ratio("decide_vs_pycasbin", "decisions/s", pairs, note=f"{rules} rules in each")


def _seconds_of(
    decisions: Decisions, enforcer: TenantEnforcer, subject: str, resource: str
) -> float:
    begun = time.perf_counter()
    decisions.decide(enforcer, subject, _READ, resource)
    return time.perf_counter() - begun


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def component(*parts: object) -> ComponentId:
    """An id that is the same in every run."""
    return ComponentId(hashlib.sha256(repr(parts).encode()).hexdigest()[:32])


def tenant_id(tenant: int) -> ComponentId:
    """The id of tenant number `tenant`."""
    return component("tenant", tenant)


def rules_of(tenant: int, count: int) -> list[Rule]:
    """`count` different rules: a third each for users, groups and roles."""
    names = ["user:u{}", f"group:{component('member', tenant)}", "role:r{}"]
    return [
        Rule(
            names[number % 3].format(number // 3 % _users(count)),
            _READ,
            f"group:{component(tenant, number)}",
            Effect.DENY if number % 10 == 9 else Effect.ALLOW,
        )
        for number in range(count)
    ]


def links_of(tenant: int, count: int) -> list[Link]:
    """Each user has a group and a role; each role is in the next of its ten."""
    group = f"group:{component('member', tenant)}"
    held = [Link(f"user:u{user}", f"role:r{user}") for user in range(_users(count))]
    held += [Link(f"user:u{user}", group) for user in range(0, _users(count), 2)]
    return held + [Link(f"role:r{n}", f"role:r{n + 1}") for n in range(_users(count)) if n % 4 != 3]


def _users(count: int) -> int:
    return max(4, count // 10)


def house(tenant: int, count: int) -> TenantEnforcer:
    """Our enforcer with `count` rules."""
    return TenantEnforcer(tenant_id(tenant), 1, rules_of(tenant, count), links_of(tenant, count))


def plain_house(tenant: int, count: int) -> Any:
    """Plain pycasbin with the same."""
    model = Model()
    model.load_model_from_text(MODEL)
    enforcer = casbin.Enforcer(model)
    enforcer.add_function("p_any", any_of_kind)
    domain = tenant_id(tenant)
    # Added one by one they are held against each other, which takes minutes.
    enforcer.get_model().model["p"]["p"].policy = [
        [rule.subject, domain, rule.resource, rule.action.value, rule.effect.value]
        for rule in rules_of(tenant, count)
    ]
    # Its default matching function makes its first decision quadratic in the memberships, which
    # is not what is compared here.
    enforcer.get_role_manager().add_matching_func(None)
    enforcer.add_grouping_policies(
        [[link.member, link.parent, domain] for link in links_of(tenant, count)]
    )
    return enforcer


def question(random: Random, tenant: int, count: int) -> Question:
    """A group that a rule is about and, three times of four, a user whom that rule concerns."""
    number = random.randrange(count)
    user = number // 3 % _users(count)
    if number % 3 == 1:
        user -= user % 2  # a member of the group
    if random.randrange(4) == 0:
        user = random.randrange(_users(count))
    return f"user:u{user}", f"group:{component(tenant, number)}"


SUITE = Suite(
    name="control-policy",
    summary="decisions from the cache and by Casbin over candidates, against plain pycasbin",
    rows=(
        "decide_cached_us_p50",
        "decide_uncached_ms_p50",
        "decide_uncached_ms_p99",
        "decide_vs_pycasbin",
    ),
    measure=measure,
    group=GROUP,
)
