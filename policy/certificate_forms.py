"""The three forms in which a certificate is handed out, and reading any of them back.

- `jws`: the signed certificate itself, one line.
- `json`: `{"certificate": {...}, "signature": "<jws>"}`, for a program or an eye.
- `html`: a page to print (`policy.certificate_page`), with the signed certificate at its end.

Only the signed certificate proves anything, so what stands beside it must not say anything else:
`verify_any` takes a JSON document only if its readable part is what was signed, and a page only if
it is, byte for byte, the page of the certificate inside it.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Final

import msgspec

from policy.certificate_page import MAGIC, page, signed_part
from policy.certificates import CertificateInvalid, Verified, verify
from policy.signing import Verifier
from strongroom.canonical import canonical_json

_PARTS: Final = {"certificate", "signature"}


class CertificateForm(StrEnum):
    """How a certificate is written down."""

    JWS = "jws"
    JSON = "json"
    HTML = "html"


def written(certificate: str, verified: Verified, form: CertificateForm) -> str:
    """`certificate`, which is what `verified` was read from, in this form."""
    match form:
        case CertificateForm.JWS:
            return certificate
        case CertificateForm.JSON:
            document = {"certificate": _readable(verified), "signature": certificate}
            return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        case CertificateForm.HTML:
            return page(certificate, verified)


def verify_any(text: str, verifier: Verifier) -> Verified:
    """What a certificate in any form proves. Raises `CertificateInvalid`, saying what is wrong."""
    start = text.lstrip()
    if start.startswith("{"):
        return _verify_json(text, verifier)
    if start.startswith(MAGIC):
        certificate = signed_part(text)
        verified = verify(certificate, verifier)
        if page(certificate, verified) != text:
            raise CertificateInvalid(
                "the page says something else than the certificate at its end, which holds"
            )
        return verified
    return verify(text, verifier)


def _verify_json(text: str, verifier: Verifier) -> Verified:
    try:
        document: Any = json.loads(text, object_pairs_hook=_once)
        signature, readable = document["signature"], document["certificate"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CertificateInvalid("it is no certificate in JSON") from error
    if set(document) != _PARTS or not isinstance(signature, str) or not isinstance(readable, dict):
        raise CertificateInvalid("it is no certificate in JSON")
    verified = verify(signature, verifier)
    signed = _readable(verified)
    for name in sorted(signed.keys() | readable.keys()):
        # Compared as text: in Python `1 == True == 1.0`.
        if (
            name not in readable
            or name not in signed
            or _text(readable, name) != _text(signed, name)
        ):
            raise CertificateInvalid(f"its readable part says something else in {_shown(name)}")
    return verified


def _readable(verified: Verified) -> dict[str, Any]:
    readable: dict[str, Any] = json.loads(canonical_json(msgspec.to_builtins(verified.claims)))
    return readable


def _text(document: dict[str, Any], name: str) -> str:
    return json.dumps(document[name], sort_keys=True)


def _shown(name: str) -> str:
    return name if name.isidentifier() else "a field of another name"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Objects whose names are said once: of two, a reader sees one and a program the other."""
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name is said twice")
    return dict(pairs)
