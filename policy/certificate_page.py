"""A certificate of revocation as a page to print: one file, no script, nothing from elsewhere.

The page follows from the certificate alone, so that whoever has the certificate can make it again
and see that nobody edited it. Every text from outside is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape
from typing import Final

from policy.certificates import (
    CertificateInvalid,
    Erasure,
    Finality,
    SidecarStanding,
    Standing,
    Verified,
)
from policy.signing import decode_base64url
from strongroom.errors import Misuse

MAGIC: Final = "<!doctype html>\n<!-- strongroom certificate, page 1 -->"
"""How a page begins; the number is its layout's."""
_SIGNED: Final = re.compile(r'<pre id="signed">([A-Za-z0-9_.-]+)</pre>')
_STYLE: Final = """
@page { size: A4; margin: 18mm 16mm; }
* { box-sizing: border-box; }
body { font: 10.5pt/1.45 Georgia, "Times New Roman", serif; color: #111; background: #fff;
  max-width: 178mm; margin: 12mm auto; padding: 0 4mm; }
header { border-bottom: 2pt solid #111; padding-bottom: 4mm; margin-bottom: 6mm; }
h1 { font-size: 20pt; line-height: 1.2; margin: 0 0 1mm; font-weight: normal; }
h2 { font-size: 12pt; margin: 7mm 0 2mm; break-after: avoid; }
p { margin: 0 0 2mm; }
.said { font-size: 12pt; }
.number, code, td.exact, pre { font: 8.5pt/1.4 "DejaVu Sans Mono", Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 1.1mm 3mm 1.1mm 0;
  border-bottom: .4pt solid #bbb; }
th { font-weight: normal; color: #444; }
table.facts th { width: 42mm; }
tr { break-inside: avoid; }
td.count, th.count { text-align: right; }
table.sidecars td, table.sidecars th, table.sidecars code { font-size: 8pt; }
table.sidecars td.exact { white-space: nowrap; font-size: 7.5pt; }
table.sidecars code { font-size: 7pt; white-space: nowrap; }
.pending { border-left: 3pt solid #a65f00; padding-left: 3mm; }
.final, .none { border-left: 3pt solid #1d6b3a; padding-left: 3mm; }
pre { white-space: pre-wrap; margin: 0; color: #333; font-size: 6.5pt; }
@media print { body { margin: 0; padding: 0; max-width: none; } }
"""
_HOW: Final = (
    "<p>With this page, or the signed certificate below, and the public keys of the service (the "
    "answer of <code>GET /v1/keys</code>, kept when you got to know it); nobody is asked, and no "
    "network is needed:</p>"
)
_SIDECAR_HEADS: Final = (
    '<tr><th scope="col">Sidecar</th><th scope="col">Why it could not serve</th>'
    '<th scope="col">Since</th><th scope="col" class="count">Namespaces</th>'
    '<th scope="col" class="count">Loads and saves</th>'
    '<th scope="col" class="count">Bytes freed</th></tr>'
)
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY: Final = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'"
"""The page's content security policy: its own style, and nothing else."""


def signed_part(text: str) -> str:
    """The signed certificate in a page. Raises `CertificateInvalid`."""
    found = _SIGNED.findall(text)
    if len(found) != 1:
        raise CertificateInvalid("the page holds no signed certificate, or several")
    return str(found[0])


def page(certificate: str, verified: Verified) -> str:
    """The page of `certificate`, which is what `verified` was read from."""
    claims = verified.claims
    destroyed = claims.components_total > 0
    what = (
        "What depended on it can no longer be read anywhere: the keys cannot be derived any more."
        if destroyed
        else "No grant that was given before opens anything any more."
    )
    return "\n".join(
        (
            MAGIC,
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Certificate of revocation {escape(claims.id)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            "<header>",
            "<h1>Certificate of revocation</h1>",
            f'<p class="number">{escape(claims.id)}</p>',
            "</header>",
            "<main>",
            f'<p class="said">{escape(_said(verified))} {what}</p>',
            _erasure(verified),
            "<h2>What was asked</h2>",
            _facts(_asked(verified)),
            "<h2>When</h2>",
            _facts(
                (
                    ("Committed", claims.committed_at),
                    ("In force everywhere", claims.in_force_at),
                    ("Certificate issued", claims.issued_at),
                )
            ),
            f"<h2>Sidecars ({len(claims.sidecars)})</h2>",
            _sidecars(claims.sidecars),
            f"<h2>Components destroyed ({claims.components_total})</h2>",
            _components(verified),
            "<h2>Evidence</h2>",
            _facts(_evidence(certificate, verified)),
            "<h2>How to verify it</h2>",
            _HOW,
            "<p><code>strongroom verify certificate.html --keys keys.json</code></p>",
            "<h2>Signed certificate</h2>",
            f'<pre id="signed">{escape(certificate)}</pre>',
            "</main>",
            "</body>",
            "</html>",
            "",
        )
    )


def _said(verified: Verified) -> str:
    claims = verified.claims
    axis = claims.asked.axis.replace("_", " ")
    article = "an" if axis[0] in "aeiou" else "a"
    when = claims.in_force_at
    return f"{claims.issuer} revoked {article} {axis}; this was in force everywhere at {when}."


def _erasure(verified: Verified) -> str:
    final = verified.claims.final
    return f'<p class="{final.state.value}">{escape(_finality(final))}</p>'


def _finality(final: Erasure) -> str:
    match final.state:
        case Finality.NONE:
            return "No secret was destroyed: rights were withdrawn."
        case Finality.PENDING:
            return (
                "The erasure is pending: a backup of the key table, made before, could still bring "
                f"the secrets back until the keys that wrapped them are destroyed, by {final.at}."
            )
        case Finality.FINAL:
            return f"The erasure is final since {final.at}: no backup can bring the secrets back."


def _asked(verified: Verified) -> Iterable[tuple[str, str]]:
    asked = verified.claims.asked
    yield "Axis", asked.axis
    for name, value in sorted(asked.target.items()):
        yield f"Target: {name}", value
    yield "Tenant", asked.tenant or "none: shared by all"
    yield "Reason", asked.reason
    yield "Asked by", asked.by


def _evidence(certificate: str, verified: Verified) -> Iterable[tuple[str, str]]:
    claims = verified.claims
    yield "Log entry", f"epoch {claims.epoch}, seq {claims.seq}"
    yield "Its hash", claims.entry_hash
    yield "Audit event, commit", f"{claims.audit.index} of {verified.head.size} in the tree"
    yield "Audit event, in force", f"{claims.in_force.index} of {verified.head.size} in the tree"
    yield "Root of the tree", f"{verified.head.root}, signed {verified.head.at}"
    yield "Digest of components", claims.components_digest
    yield "Signed by key", _key(certificate)


def _key(certificate: str) -> str:
    try:
        header, _, _ = certificate.split(".")
        return str(json.loads(decode_base64url(header, "header"))["kid"])
    except (ValueError, KeyError, TypeError, Misuse) as error:
        raise CertificateInvalid("its header cannot be read") from error


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    lines = (
        f'<tr><th scope="row">{escape(name)}</th><td class="exact">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return '<table class="facts">\n' + "\n".join(lines) + "\n</table>"


def _sidecars(standings: tuple[SidecarStanding, ...]) -> str:
    if not standings:
        return "<p>No sidecar was enrolled for it.</p>"
    lines = (
        f"<tr><td>{escape(each.name)}<br><code>{escape(each.sidecar)}</code></td>"
        f"<td>{escape(_why(each.state))}</td>"
        f'<td class="exact">{escape(each.at)}</td>'
        f'<td class="count">{each.namespaces_dropped}</td>'
        f'<td class="count">{each.loads_fenced + each.saves_fenced}</td>'
        f'<td class="count">{each.bytes_reclaimed}</td></tr>'
        for each in standings
    )
    return "\n".join(('<table class="sidecars">', _SIDECAR_HEADS, *lines, "</table>"))


def _why(state: Standing) -> str:
    match state:
        case Standing.FENCED:
            return "fenced: it said so"
        case Standing.LEASE_EXPIRED:
            return "its lease had run out"


def _components(verified: Verified) -> str:
    claims = verified.claims
    if not claims.components_total:
        return "<p>None.</p>"
    if not claims.components:
        return "<p>Too many to list; the digest under Evidence stands for them.</p>"
    return '<p class="number">' + "<br>".join(escape(each) for each in claims.components) + "</p>"
