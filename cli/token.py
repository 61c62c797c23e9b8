"""`strongroom token`: bearer tokens from the embedded issuer, for whoever may read its key."""

from __future__ import annotations

from collections.abc import Sequence

from service.auth.issuer import open_issuer
from service.auth.tokens import Role
from service.settings import ServiceSettings
from strongroom.errors import Misuse


def mint(
    settings: ServiceSettings, subject: str, tenant: str, roles: Sequence[str], life_s: int
) -> str:
    """A token for `subject`. `tenant` is a component id, or empty for the installation."""
    try:
        parsed = [Role(role) for role in roles]
    except ValueError as error:
        known = ", ".join(Role)
        raise Misuse(f"{error}; roles are {known}", field="role") from error
    return open_issuer(settings).issue(subject, tenant, parsed, life_s)
