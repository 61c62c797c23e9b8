"""Policy documents: what is written reads back, and what is wrong is told line by line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.cases import CASES_MAX, Case
from policy.conditions import Condition, Context, Sensitivity, Window
from policy.documents import (
    ERRORS_MAX,
    Form,
    LineError,
    PolicyDocument,
    PolicyInvalid,
    read,
    write,
)
from policy.permissions import Permission
from policy.rules import LINK_DEPTH_MAX, Effect, Link, Rule
from policy.yaml_tree import BYTES_MAX
from tests.policy.test_conditions import conditions, contexts, links, rules

READ = Permission.GROUP_READ
GROUP = f"group:{'b' * 32}"

cases = st.builds(
    Case,
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9 ._:@/-]{0,30}\Z"),
    st.sampled_from(["user:u0", "role:r0"]),
    st.just(READ),
    st.just(GROUP),
    st.sampled_from(Effect),
    contexts,
)
policies = st.builds(
    PolicyDocument,
    st.frozensets(rules, max_size=5),
    st.frozensets(links.filter(lambda link: link.parent.startswith("role:")), max_size=3),
    st.lists(cases, max_size=4, unique_by=lambda case: case.name).map(frozenset),
)


@settings(max_examples=150)
@given(policies, st.sampled_from(Form))
def test_what_is_written_reads_back_as_the_same_policy(policy: PolicyDocument, form: Form) -> None:
    text = write(form, policy)
    assert read(form, text) == policy
    assert write(form, read(form, text)) == text


def errors_of(form: Form, text: str) -> list[tuple[int, str]]:
    with pytest.raises(PolicyInvalid) as refused:
        read(form, text)
    return [(error.line, error.field) for error in refused.value.errors]


def test_every_error_of_a_yaml_document_has_its_line() -> None:
    text = f"""\
strongroom_policy: 1
rules:
  - {{subject: user:ann, action: group:read, resource: "{GROUP}", effect: allow}}
  - {{subject: ann, action: group:read, resource: "{GROUP}", effect: allow}}
  - subject: user:bob
    action: group:read
    resource: group:*
    effect: maybe
  - {{subject: user:ann, action: group:read, resource: "{GROUP}", effect: allow}}
  - {{subject: user:eve, action: group:read, resource: group:*, effect: deny, when: now}}
  - {{subject: user:eve, action: group:read, resource: group:*, effect: deny, purposes: [A B]}}
roles:
  - {{subject: user:ann, role: group:{"c" * 32}}}
  - just text
tests:
  - {{name: one, subject: user:ann, action: group:read, resource: group:*, expect: allow}}
  - {{name: two, subject: user:ann, action: group:read, resource: "{GROUP}", expect: allow, at: soon}}
"""  # noqa: E501
    assert errors_of(Form.YAML, text) == [
        (4, "subject"),
        (5, "effect"),
        (9, "rules"),
        (10, "key"),
        (11, "purposes"),
        (13, "role"),
        (14, "roles"),
        (16, "resource"),
        (17, "at"),
    ]


def test_every_error_of_a_csv_document_has_its_line_and_nothing_is_repeated() -> None:
    header = write(Form.CSV, PolicyDocument()).strip()
    columns = header.split(",")

    def row(**values: str) -> str:
        return ",".join(values.get(name, "") for name in columns)

    good = {"kind": "rule", "subject": "user:ann", "action": "group:read", "resource": GROUP}
    text = "\n".join(
        [
            header,
            row(**good, effect="allow"),
            row(**good, effect="ALLOW"),
            row(**good, effect="deny", role="role:r"),
            row(**good, effect="deny", zone="Mars", start="09:00", end="10:00"),
            row(kind="policy"),
            "rule,too,short",
            row(**{**good, "subject": "user:s3cret,x"}, effect="deny"),
            row(**good, effect="allow"),
        ]
    )
    told = errors_of(Form.CSV, text)
    assert told == [
        (3, "effect"),
        (4, "role"),
        (5, "zone"),
        (6, "kind"),
        (7, "row"),
        (8, "row"),
        (9, "rules"),
    ]
    with pytest.raises(PolicyInvalid) as refused:
        read(Form.CSV, text)
    assert "s3cret" not in str([*refused.value.errors, refused.value.message])


def test_a_cycle_and_too_deep_a_chain_are_told_with_the_line_that_made_it() -> None:
    def roles(*pairs: tuple[str, str]) -> str:
        lines = [f"  - {{subject: role:{low}, role: role:{high}}}" for low, high in pairs]
        return "\n".join(["strongroom_policy: 1", "roles:", *lines])

    assert errors_of(Form.YAML, roles(("a", "b"), ("b", "c"), ("c", "a"), ("x", "y"))) == [
        (5, "links")
    ]
    chain = [(f"r{n}", f"r{n + 1}") for n in range(LINK_DEPTH_MAX + 1)]
    assert errors_of(Form.YAML, roles(*chain)) == [(LINK_DEPTH_MAX + 3, "links")]
    assert len(read(Form.YAML, roles(*chain[:-1])).links) == LINK_DEPTH_MAX


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("just text", 1),
        ("- a\n- list", 1),
        ("strongroom_policy: 2", 1),
        ("rules: []", 1),
        ("strongroom_policy: 1\nrules: [", 3),
        ("strongroom_policy: 1\nrules: []\nrules: []", 3),
        ("strongroom_policy: 1\nrules: {}", 2),
        ("strongroom_policy: 1\nrules: &a\n  - b\nroles: *a", 2),
        ("strongroom_policy: 1\nrules:\n  - !!python/object/apply:os.system ['true']", 3),
        ("strongroom_policy: 1\n---\nstrongroom_policy: 1", 2),
        ("strongroom_policy: 1\nrules: " + "[" * 20 + "]" * 20, 2),
        ("strongroom_policy: 1\n? [a]\n: b", 2),
        ("strongroom_policy: 1\n\0", 1),
    ],
)
def test_yaml_that_is_no_policy_is_refused_with_a_line(text: str, line: int) -> None:
    assert errors_of(Form.YAML, text)[0][0] == line


def test_a_billion_laughs_and_a_document_over_the_cap_are_refused() -> None:
    laughs = 'a: &a ["x","x"]\n' + "\n".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)},*{chr(97 + n)}]" for n in range(20)
    )
    assert errors_of(Form.YAML, laughs)[0] == (1, "document")
    for form in Form:
        assert errors_of(form, " " * (BYTES_MAX + 1)) == [(1, "document")]


def test_scalars_are_the_text_that_stands_there() -> None:
    text = f"""\
strongroom_policy: 1
rules:
  - subject: user:no
    action: group:read
    resource: "{GROUP}"
    effect: allow
    purposes: [on, 'yes']
    window: {{zone: Europe/Berlin, start: 09:00, end: 17:30, days: [fri, mon]}}
    sensitivity_max: internal
"""
    (rule,) = read(Form.YAML, text).rules
    assert rule.subject == "user:no"
    assert rule.condition.purposes == ("on", "yes")
    assert rule.condition.window is not None
    assert (rule.condition.window.start, rule.condition.window.days) == ("09:00", ("mon", "fri"))


def test_errors_are_bounded_and_counted() -> None:
    lines = ["strongroom_policy: 1", "rules:", *["  - nothing"] * (ERRORS_MAX + 5)]
    with pytest.raises(PolicyInvalid) as refused:
        read(Form.YAML, "\n".join(lines))
    assert (len(refused.value.errors), refused.value.count) == (ERRORS_MAX, ERRORS_MAX + 5)
    assert refused.value.errors[0] == LineError(3, "rules", "each of them is a mapping")


def test_no_cell_begins_as_a_formula_does() -> None:
    policy = PolicyDocument(
        frozenset([Rule("user:a", READ, "group:*", Effect.ALLOW, Condition(
            purposes=("p",), window=Window("UTC", "09:00", "10:00"),
            sensitivity_max=Sensitivity.PUBLIC))]),
        frozenset([Link("user:a", "role:r")]),
        frozenset([Case("n", "user:a", READ, GROUP, Effect.ALLOW, Context(purpose="p"))]),
    )  # fmt: skip
    cells = write(Form.CSV, policy).replace("\n", ",").split(",")
    assert not [cell for cell in cells if cell[:1] in set("=+-@\t\r")]


def test_too_many_cases_are_refused() -> None:
    entry = f"subject: user:a, action: group:read, resource: '{GROUP}', expect: deny"
    listed = [f"  - {{name: c{n}, {entry}}}" for n in range(CASES_MAX + 1)]
    text = "\n".join(["strongroom_policy: 1", "tests:", *listed])
    assert errors_of(Form.YAML, text) == [(1, "tests")]


@given(conditions)
def test_a_condition_in_words_names_what_it_depends_on(condition: Condition) -> None:
    told = str(condition)
    for part in (*condition.purposes, *condition.models):
        assert part in told
