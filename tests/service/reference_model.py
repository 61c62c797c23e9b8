"""A small model of who may read what and which grants are dead: no database, no keys, no Casbin.

It says in a page what the service promises. `Standing` is what a backup holds: it is copied with
`copy.deepcopy`. What a model cannot know is None and nothing is concluded from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PREFIX, WHOLE = 10, 30
"""Tokens of what everybody may read, and of the prompt with a document and private text."""


@dataclass(slots=True)
class Tenant:
    """One tenant: subjects and groups by name, documents by version id."""

    id: str
    subjects: dict[str, set[str]] = field(default_factory=dict)
    """The groups, by id, that each living subject is a member of."""
    groups: set[str] = field(default_factory=set)
    documents: dict[str, str] = field(default_factory=dict)
    """The group of each living version."""
    rules: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Subject, group and effect, by the rule's id."""
    changes: int = 0
    """How often rules, roles, members or groups changed: what a review is about."""
    under_review: bool = False

    def may_read(self, subject: str, group: str) -> bool:
        """A deny wins; a member or an allow reads; nobody else does."""
        effects = {
            effect for who, what, effect in self.rules.values() if (who, what) == (subject, group)
        }
        return "deny" not in effects and (
            group in self.subjects.get(subject, ()) or "allow" in effects
        )

    def tokens(self, subject: str, version: str) -> int:
        """What is granted of the prompt that has `version` in its middle."""
        if self.under_review:
            return 0
        group = self.documents.get(version)
        if group is None or group not in self.groups or not self.may_read(subject, group):
            return PREFIX
        return WHOLE


@dataclass(slots=True)
class Grant:
    """A grant that was minted. `dead` None: it may be either."""

    token: str
    tenant: str
    subject: str
    components: frozenset[str]
    dead: bool | None = False


@dataclass(slots=True)
class Standing:
    """Everything that a backup brings back."""

    tenants: dict[str, Tenant] = field(default_factory=dict)
    artefacts: list[dict[str, str]] = field(default_factory=list)
    """Sets of which every member lives."""


@dataclass(slots=True)
class Model:
    """What stands, and what is over for ever."""

    standing: Standing = field(default_factory=Standing)
    grants: list[Grant] = field(default_factory=list)
    destroyed: set[str] = field(default_factory=set)
    """Components whose secret is gone; no backup brings one back."""

    def tenant(self, tenant: str) -> Tenant:
        """A living tenant."""
        return self.standing.tenants[tenant]

    def authorization_changed(self, tenant: str) -> None:
        """Every grant of the tenant that was minted before is dead."""
        self.standing.tenants[tenant].changes += 1
        for grant in self.grants:
            if grant.tenant == tenant:
                grant.dead = True

    def subject_removed(self, tenant: str, subject: str) -> None:
        """Its grants are dead. Rules about it go too, which may kill all others of the tenant."""
        living = self.tenant(tenant)
        living.changes += 1
        del living.subjects[subject]
        theirs = {rule for rule, (who, *_) in living.rules.items() if who == subject}
        for rule in theirs:
            del living.rules[rule]
        for grant in self.grants:
            if grant.tenant == tenant and grant.subject == subject:
                grant.dead = True
            elif grant.tenant == tenant and theirs and not grant.dead:
                grant.dead = None

    def group_removed(self, tenant: str, group: str) -> None:
        """With it go memberships and rules; the documents in it are out of everybody's reach."""
        living = self.tenant(tenant)
        living.groups.discard(group)
        for groups in living.subjects.values():
            groups.discard(group)
        for rule in [rule for rule, (_, what, _) in living.rules.items() if what == group]:
            del living.rules[rule]
        self.authorization_changed(tenant)
        self.secrets_destroyed([group])

    def secrets_destroyed(self, components: list[str]) -> None:
        """Nothing that depends on one of these is granted, leased or derived again."""
        self.destroyed |= set(components)
        for grant in self.grants:
            if grant.components & self.destroyed:
                grant.dead = True
        self.standing.artefacts = [
            each for each in self.standing.artefacts if not self.destroyed & set(each.values())
        ]
        for tenant in self.standing.tenants.values():
            for version in self.destroyed & set(tenant.documents):
                del tenant.documents[version]

    def restored(self, backup: Standing) -> None:
        """The database is as it was, but what was destroyed since is destroyed again, and where
        authorization changed since nothing is granted until somebody has looked. Every grant is
        of an epoch that is over."""
        later = self.standing
        self.standing = backup
        for name in [name for name in backup.tenants if name not in later.tenants]:
            del backup.tenants[name]
        for name, tenant in backup.tenants.items():
            tenant.under_review |= later.tenants[name].changes != tenant.changes
            tenant.changes = later.tenants[name].changes
        self.secrets_destroyed([])
        for grant in self.grants:
            grant.dead = True
