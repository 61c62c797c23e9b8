"""Casbin loading and removing by itself: each failing open once, and what we do in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import casbin
import pytest
from casbin.model import Model

from policy.decide import Allow, Deny, decide
from policy.enforcer import TenantEnforcer
from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule, parse_rule
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

TENANT = ComponentId("a" * 32)
GROUP = f"group:{'b' * 32}"
READ = Permission.GROUP_READ
ALLOW_EVE = Rule("user:eve", READ, GROUP, Effect.ALLOW)
DENY_EVE = Rule("user:eve", READ, GROUP, Effect.DENY)
ALLOW_ANN = Rule("user:ann", READ, GROUP, Effect.ALLOW)


def line(subject: str, effect: str = "allow") -> str:
    return f"p, {subject}, {TENANT}, {GROUP}, {READ.value}, {effect}"


def values(rule: Rule) -> list[str]:
    return [rule.subject, TENANT, rule.resource, rule.action.value, rule.effect.value]


def asked(subject: str) -> tuple[str, ...]:
    return (subject, TENANT, GROUP, READ.value)


def loaded_from_text(folder: Path, text: str) -> Any:
    """Casbin with its own file loader, as its documentation has it."""
    (folder / "model.conf").write_text(MODEL)
    (folder / "policy.csv").write_text(text)
    enforcer = casbin.Enforcer(str(folder / "model.conf"), str(folder / "policy.csv"))
    enforcer.add_function("p_any", any_of_kind)
    return enforcer


def bare() -> Any:
    model = Model()
    model.load_model_from_text(MODEL)
    enforcer = casbin.Enforcer(model)
    enforcer.add_function("p_any", any_of_kind)
    return enforcer


def refused_at_the_door(subject: str) -> None:
    with pytest.raises(Misuse) as caught:
        parse_rule(subject, READ, GROUP, "allow")
    assert caught.value.field == "subject"


def test_a_line_break_in_a_name_brings_a_rule_of_its_own(tmp_path: Path) -> None:
    name = f"user:bob, {TENANT}, {GROUP}, {READ.value}, allow\np, user:eve"
    raw = loaded_from_text(tmp_path, line(name))
    assert raw.enforce(*asked("user:eve"))
    refused_at_the_door(name)


def test_white_space_around_a_name_makes_it_another_partys(tmp_path: Path) -> None:
    raw = loaded_from_text(tmp_path, line(" user:eve "))
    assert raw.enforce(*asked("user:eve"))
    refused_at_the_door(" user:eve ")


@pytest.mark.parametrize("mark", [",x", "(", "["])
def test_a_mark_in_one_name_stops_every_decision(tmp_path: Path, mark: str) -> None:
    raw = loaded_from_text(tmp_path, f"{line('user:eve' + mark)}\n{line('user:ann')}")
    with pytest.raises(RuntimeError, match="invalid policy size"):
        raw.enforce(*asked("user:ann"))
    refused_at_the_door("user:eve" + mark)


@pytest.mark.parametrize("mark", [")", "]"])
def test_a_closing_bracket_in_one_name_stops_the_load(tmp_path: Path, mark: str) -> None:
    with pytest.raises(IndexError):
        loaded_from_text(tmp_path, f"{line('user:eve' + mark)}\n{line('user:ann')}")
    refused_at_the_door("user:eve" + mark)


def test_a_line_that_begins_otherwise_is_lost_without_a_word(tmp_path: Path) -> None:
    text = f"{line('user:eve')}\n#{line('user:eve', 'deny')}\nP{line('user:eve', 'deny')[1:]}"
    assert loaded_from_text(tmp_path, text).enforce(*asked("user:eve"))
    enforcer = TenantEnforcer(TENANT, 1, [ALLOW_EVE, DENY_EVE], [])
    assert isinstance(decide(enforcer, "user:eve", READ, GROUP), Deny)


@pytest.mark.parametrize("effect", ["Deny", "DENY", "deny ", "denied", "", "block", "\tdeny"])
def test_an_effect_that_is_not_exactly_deny_leaves_the_allow(effect: str) -> None:
    raw = bare()
    raw.add_policy(*values(ALLOW_EVE))
    raw.add_policy(*values(DENY_EVE)[:4], effect)
    assert raw.enforce(*asked("user:eve"))
    with pytest.raises(Misuse) as caught:
        parse_rule("user:eve", READ, GROUP, effect)
    assert caught.value.field == "effect"


def test_in_a_removal_by_filter_nothing_means_anybodys() -> None:
    raw = bare()
    raw.add_policy(*values(ALLOW_EVE))
    raw.add_policy(*values(DENY_EVE))
    raw.add_policy(*values(ALLOW_ANN))
    # Meant: remove the denies of the subject whose name was left empty by mistake.
    raw.remove_filtered_policy(0, "", TENANT, "", "", "deny")
    assert raw.enforce(*asked("user:eve"))
    before = TenantEnforcer(TENANT, 1, [ALLOW_EVE, DENY_EVE, ALLOW_ANN], [])
    after = TenantEnforcer(TENANT, 2, [ALLOW_EVE, DENY_EVE], [])
    assert isinstance(decide(before, "user:ann", READ, GROUP), Allow)
    assert isinstance(decide(after, "user:ann", READ, GROUP), Deny)
    assert isinstance(decide(after, "user:eve", READ, GROUP), Deny)


def test_a_batch_removal_that_fails_has_removed_what_came_first() -> None:
    raw = bare()
    raw.add_policy(*values(ALLOW_EVE))
    raw.add_policy(*values(DENY_EVE))
    section = raw.get_model()
    assert not section.remove_policies("p", "p", [values(DENY_EVE), values(ALLOW_ANN)])
    assert raw.enforce(*asked("user:eve"))


def test_a_load_under_way_is_asked_before_its_denies_are_there() -> None:
    answers: list[bool] = []

    class SlowAdapter:
        def is_filtered(self) -> bool:
            return True

        def load_filtered_policy(self, model: Any, _: object) -> None:
            for rule in (ALLOW_EVE, DENY_EVE):
                model.model["p"]["p"].policy.append(values(rule))
                answers.append(raw.enforce(*asked("user:eve")))

    raw = bare()
    raw.set_adapter(SlowAdapter())
    raw.load_filtered_policy(None)
    assert answers == [True, False]


def test_an_enforcer_being_built_changes_no_answer_of_the_one_in_force() -> None:
    links = [Link("user:eve", "role:reader")]
    allow = Rule("role:reader", READ, GROUP, Effect.ALLOW)
    now = TenantEnforcer(TENANT, 1, [allow, DENY_EVE], links)
    answers: list[object] = []

    def rules() -> Iterator[Rule]:
        for rule in (allow, ALLOW_ANN):
            yield rule
            answers.append(decide(now, "user:eve", READ, GROUP))

    following = TenantEnforcer(TENANT, 2, rules(), links)
    assert all(isinstance(answer, Deny) for answer in answers)
    assert len(answers) == 2
    assert isinstance(decide(now, "user:eve", READ, GROUP), Deny)
    assert isinstance(decide(following, "user:eve", READ, GROUP), Allow)


def test_a_set_with_one_bad_link_builds_no_enforcer_and_the_old_one_goes_on() -> None:
    now = TenantEnforcer(TENANT, 1, [ALLOW_ANN, DENY_EVE], [])
    ring = [Link("role:a", "role:b"), Link("role:b", "role:a")]
    with pytest.raises(Misuse):
        TenantEnforcer(TENANT, 2, [ALLOW_EVE], ring)
    assert isinstance(decide(now, "user:eve", READ, GROUP), Deny)
    assert isinstance(decide(now, "user:ann", READ, GROUP), Allow)
