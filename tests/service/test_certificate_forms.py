"""A certificate in JSON and as a page: each verifies, and not one word of it can be edited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from policy.certificate_forms import CertificateForm, verify_any
from policy.certificate_page import POLICY
from policy.certificates import CertificateInvalid
from policy.signing import Verifier
from tests.service.evidence import new_signer
from tests.service.house import Service
from tests.service.sidecar_party import enrolled
from tests.service.test_sidecars import World

REASON = """<script>alert('x')</script> & "quotes" \u2028 \u00fc"""


async def forms_of(service: Service) -> dict[CertificateForm, str]:
    world = await World(service).build()
    await enrolled(service, world.tenant, name="node-1")
    answer = await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": REASON},
    )
    forms = {}
    for form in CertificateForm:
        response = await service.operator.ask("GET", answer["certificate"], params={"form": form})
        assert response.status_code == 200
        forms[form] = response.text
        if form is CertificateForm.HTML:
            assert response.headers["content-security-policy"] == POLICY
            assert response.headers["content-type"].startswith("text/html")
    return forms


async def test_each_form_verifies_with_the_public_key_and_with_no_other(service: Service) -> None:
    forms = await forms_of(service)
    signer, other = service.runtime.signer, new_signer("other")
    mine = Verifier({signer.kid: signer.public_key})
    theirs = Verifier({other.kid: other.public_key})
    for form, text in forms.items():
        verified = verify_any(text, mine)
        assert verified.claims.asked.reason == REASON, form
        with pytest.raises(CertificateInvalid, match="not signed"):
            verify_any(text, theirs)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that holds no others, and of every empty list."""
    members: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    if not members:
        yield path
    for name, member in members:
        yield from leaves(member, (*path, name))


def edited(document: Any, path: tuple[Any, ...]) -> Any:
    """A copy in which the value at `path` is another one."""
    copy = json.loads(json.dumps(document))
    place = copy
    for name in path[:-1]:
        place = place[name]
    was = place[path[-1]]
    match was:
        case bool():
            place[path[-1]] = not was
        case int():
            place[path[-1]] = was + 1
        case str():
            place[path[-1]] = was[:-1] + ("x" if was[-1:] != "x" else "y")
        case _:
            place[path[-1]] = ["more"]
    return copy


async def test_every_field_of_the_json_that_is_edited_is_refused(service: Service) -> None:
    text = (await forms_of(service))[CertificateForm.JSON]
    verifier = service.runtime.verifier
    document = json.loads(text)
    paths = list(leaves(document))
    assert len(paths) > 40
    for path in paths:
        with pytest.raises(CertificateInvalid):
            verify_any(json.dumps(edited(document, path)), verifier)
    # How it is laid out says nothing.
    verify_any(json.dumps(document, indent=None, sort_keys=True), verifier)


async def test_json_with_more_or_less_in_it_is_refused(service: Service) -> None:
    text = (await forms_of(service))[CertificateForm.JSON]
    verifier = service.runtime.verifier
    document = json.loads(text)
    added = document["certificate"] | {"court": "none"}
    without = {name: value for name, value in document["certificate"].items() if name != "final"}
    twice = text.replace('"reason":', '"reason": "none", "reason":', 1)
    for wrong in (
        json.dumps(document | {"certificate": added}),
        json.dumps(document | {"certificate": without}),
        json.dumps(document | {"note": "x"}),
        json.dumps(document | {"signature": [document["signature"]]}),
        json.dumps({"certificate": document["certificate"]}),
        json.dumps({"signature": document["signature"]}),
        twice,
        text[:-20],
        "{}",
        "{" * 5000,
    ):
        with pytest.raises(CertificateInvalid):
            verify_any(wrong, verifier)


class Page(HTMLParser):
    """What is on a page, as a browser would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_has_no_script_and_asks_for_nothing_from_elsewhere(
    service: Service,
) -> None:
    text = (await forms_of(service))[CertificateForm.HTML]
    page = Page()
    page.feed(text)
    loading = {"script", "link", "img", "iframe", "object", "embed", "audio", "video", "form", "a"}
    assert not loading & set(page.tags)
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not {"src", "href", "style", "action", "background"} & set(page.attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert REASON in page.text


async def test_the_page_says_what_the_certificate_says(service: Service) -> None:
    forms = await forms_of(service)
    verified = verify_any(forms[CertificateForm.HTML], service.runtime.verifier)
    page = Page()
    page.feed(forms[CertificateForm.HTML])
    claims = verified.claims
    for said in (
        claims.id,
        claims.committed_at,
        claims.in_force_at,
        claims.entry_hash,
        claims.final.at,
        claims.asked.by,
        *claims.components,
        *(each.name for each in claims.sidecars),
        verified.head.root,
    ):
        assert said in page.text
    assert "pending" in page.text


async def test_a_page_that_was_edited_anywhere_is_refused(service: Service) -> None:
    text = (await forms_of(service))[CertificateForm.HTML]
    verifier = service.runtime.verifier
    verify_any(text, verifier)
    for at in range(0, len(text), 7):
        flipped = "A" if text[at] != "A" else "B"
        with pytest.raises(CertificateInvalid):
            verify_any(text[:at] + flipped + text[at + 1 :], verifier)
    body = text.index("</body>")
    for wrong in (
        text + "<p>and more</p>",
        text[:body] + "<p>and more</p>" + text[body:],
        text[:body] + '<pre id="signed">a.b.c</pre>' + text[body:],
        text.replace("pending", "final", 1),
        text.replace('<pre id="signed">', "<pre>"),
    ):
        with pytest.raises(CertificateInvalid):
            verify_any(wrong, verifier)
