"""The Casbin model: RBAC with domains (a domain is a tenant), a deny wins, denied by default."""

from __future__ import annotations

from typing import Final

_MATCHER: Final = (
    "r.dom == p.dom && r.act == p.act && (r.obj == p.obj || p.obj == p_any(r.obj))"
    " && g(r.sub, p.sub, r.dom)"
)
"""`g()` comes last: it is the dear part, and the comparisons before it rule most rules out."""

MODEL: Final = f"""\
[request_definition]
r = sub, dom, obj, act

[policy_definition]
p = sub, dom, obj, act, eft

[role_definition]
g = _, _, _

[policy_effect]
e = some(where (p.eft == allow)) && !some(where (p.eft == deny))

[matchers]
m = {_MATCHER}
"""


def any_of_kind(resource: str) -> str:
    """The wildcard that covers `resource`: `<kind>:*`."""
    return resource.partition(":")[0] + ":*"
