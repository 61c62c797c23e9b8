"""Every permission there is: one enumeration, `<resource>:<action>`.

Those of the first part are decided by a tenant's rules, for its subjects and groups. The rest
are about the service's own routes and come with the role in a caller's token.
"""

from __future__ import annotations

from enum import StrEnum


class Permission(StrEnum):
    """What a party may be allowed to do."""

    # Decided by a tenant's rules.
    GROUP_READ = "group:read"
    """Read what carries this access group: documents, prompts, their KV."""
    GRANT_ACT_AS = "grant:act_as"
    """Name a subject without bringing its token."""

    # Come with a role.
    TENANT_CREATE = "tenant:create"
    TENANT_READ = "tenant:read"
    TENANT_WRITE = "tenant:write"
    RULE_READ = "rule:read"
    RULE_WRITE = "rule:write"
    DECISION_READ = "decision:read"
    ARTEFACT_READ = "artefact:read"
    ARTEFACT_WRITE = "artefact:write"
    DOCUMENT_READ = "document:read"
    DOCUMENT_WRITE = "document:write"
    GRANT_CREATE = "grant:create"
    TOKEN_ISSUE = "token:issue"  # noqa: S105 - a permission, no secret
    REVOCATION_CREATE = "revocation:create"
    REVOCATION_READ = "revocation:read"
    SIDECAR_READ = "sidecar:read"
    SIDECAR_WRITE = "sidecar:write"
    KEY_READ = "key:read"
    """Rotations and the key-use log: names and numbers, never a key."""
    KEY_ROTATE = "key:rotate"
    LOG_READ = "log:read"
    AUDIT_READ = "audit:read"
    AUDIT_HOLD = "audit:hold"
    """Place and release legal holds."""
