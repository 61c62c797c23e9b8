"""What a grant may hold, read in one snapshot: no writes, no signatures.

The log's head, the tenant's revision, the subject's standing, artefacts, labels and component
states are all of one moment. Spans are taken in order up to the first that is denied or not
registered, or whose secret is gone or damaged; they look alike outside, by the clock too, and
`Denial.reason` tells them apart for the audit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from policy.conditions import Context
from policy.decide import Decision, Deny
from policy.permissions import Permission
from service.auth.errors import Forbidden
from service.grants.schemas import EVERYONE, PRIVATE, GrantBody, SpanBody
from service.grants.subject import OnBehalf
from service.keys import components
from service.keys.uses import KeyUses
from service.log import store as log
from service.policies.enforcers import Enforcers, TenantPolicy
from service.policies.source import group_resource
from service.registry import store as registry
from service.registry.models import ArtefactKind, DocumentVersion
from service.tenancy import store as tenancy
from service.tenancy.models import Principal, Tenant
from strongroom.derivation import engine_salt, namespace_secret
from strongroom.errors import Conflict, Corrupt, Missing
from strongroom.grant import EngineDigests
from strongroom.identity import NO_ADAPTER, NO_LABELS, CacheIdentity, ComponentId, LabelSet
from strongroom.log import LogHead
from strongroom.spans import DocumentSource, GroupSource, Source, propagate

_log = logging.getLogger("strongroom.service")
_ARTEFACTS: Final = ("model", "adapter", "tokenizer", "template", "policy")


@dataclass(frozen=True, slots=True)
class Denial:
    """Why span number `span` and all after it are not granted; for the audit alone."""

    span: int
    label: str
    reason: str
    rule: str


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """What may be granted. `salt` is None where the whole prompt is not."""

    head: LogHead
    revision: int
    engine: EngineDigests
    identities: tuple[CacheIdentity, ...]
    """One for each granted span."""
    base: tuple[ComponentId, ...]
    denial: Denial | None
    salt: str | None
    until: datetime | None
    """When a time window of the policy may end what is granted; None: no window has a part."""


async def judge(
    session: AsyncSession,
    enforcers: Enforcers,
    request: GrantBody,
    who: OnBehalf,
    at: datetime,
    uses: KeyUses,
) -> Verdict:
    """Decide `request` for `who` at `at`; what is unwrapped for it is noted in `uses`.

    Raises `Missing` for a subject or artefact that is not there.
    """
    head = await log.head(session)
    context = Context(request.purpose, ComponentId(request.model), None, at)
    tenant, named_until = await _tenant(session, enforcers, who, context)
    if request.min_revision is not None and tenant.revision < request.min_revision:
        raise Conflict(
            "this state of the tenant's authorization is not here",
            field="min_revision",
            limit=tenant.revision,
        )
    principal = await _standing(session, tenant, who)
    base, engine = await _artefacts(session, request, tenant)
    policy = await enforcers.at(session, tenant)
    if tenant.review_required:
        labelled = _Labelled([], _under_review(request), None)
    else:
        asked = _Asked(f"user:{principal.name}", policy, context)
        labelled = await _sources(session, request.spans, tenant, principal, asked)
    sources, denial = labelled.sources, labelled.denial
    identities = tuple(_identity(request, tenant.id, labels) for labels in (*propagate(sources),))
    whole = denial is None and bool(identities) and request.spans[-1].end == request.prompt_tokens
    salt: str | None = None
    if whole:
        try:
            salt = await _salt(session, identities[-1], uses)
        except Corrupt:
            denial = await _damaged(session, request, base, identities, uses)
            identities = identities[: denial.span]
    return Verdict(
        head=head,
        revision=tenant.revision,
        engine=engine,
        identities=identities,
        base=base,
        denial=denial,
        salt=salt,
        until=_earliest(named_until, labelled.until),
    )


async def _tenant(
    session: AsyncSession, enforcers: Enforcers, who: OnBehalf, context: Context
) -> tuple[Tenant, datetime | None]:
    """The tenant; where the caller may only name subjects if it says so, that it says so."""
    if who.act_as is None:
        return await tenancy.get_tenant(session, who.tenant), None
    refusal = Forbidden("naming a subject needs grant:act_as in its tenant", field="subject")
    try:
        tenant = await tenancy.get_tenant(session, who.tenant)
    except Missing as error:
        raise refusal from error
    policy = await enforcers.at(session, tenant)
    named = f"grant:{who.subject}"
    decision = policy.decide(who.act_as, Permission.GRANT_ACT_AS, named, context)
    if isinstance(decision, Deny):
        raise refusal
    return tenant, decision.until


async def _standing(session: AsyncSession, tenant: Tenant, who: OnBehalf) -> Principal:
    principal = await tenancy.get_principal(session, tenant.id, who.subject)
    if who.proven_s is not None and who.proven_s < int(principal.created_at.timestamp()):
        raise Missing("there is no such principal", field="principal")
    return principal


async def _artefacts(
    session: AsyncSession, request: GrantBody, tenant: Tenant
) -> tuple[tuple[ComponentId, ...], EngineDigests]:
    digests = {"adapter": NO_ADAPTER}
    for name in _ARTEFACTS:
        wanted: str = getattr(request, name)
        if wanted == NO_ADAPTER:
            continue
        try:
            artefact = await registry.get_artefact(session, wanted, tenant.id)
        except Missing as error:
            raise Missing("there is no such artefact", field=name) from error
        if artefact.kind is not ArtefactKind(name):
            raise Missing("there is no such artefact", field=name)
        digests[name] = artefact.digest
    engine = EngineDigests(
        model=digests["model"],
        adapter=digests["adapter"],
        tokenizer=digests["tokenizer"],
        template=digests["template"],
    )
    base = _identity(request, tenant.id, NO_LABELS).components()
    if not await components.alive(session, base):
        raise Missing("there is no such artefact", field="model")
    return base, engine


def _identity(request: GrantBody, tenant: ComponentId, labels: LabelSet) -> CacheIdentity:
    return CacheIdentity(
        tenant=tenant,
        model=ComponentId(request.model),
        adapter=NO_ADAPTER if request.adapter == NO_ADAPTER else ComponentId(request.adapter),
        tokenizer=ComponentId(request.tokenizer),
        template=ComponentId(request.template),
        policy=ComponentId(request.policy),
        labels=labels,
    )


def _under_review(request: GrantBody) -> Denial:
    """A restored database may have forgotten who lost what: nothing of the prompt is granted."""
    first = request.spans[0] if request.spans else None
    return Denial(0, str(first.document or first.group) if first is not None else "", "review", "")


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asks which policy, in which context but for the document."""

    subject: str
    policy: TenantPolicy
    context: Context

    def may_read(self, group: ComponentId, version: DocumentVersion | None) -> Decision:
        """Whether the group may be read, for this document or for text that is none."""
        sensitivity = None if version is None else version.sensitivity
        return self.policy.decide(
            self.subject,
            Permission.GROUP_READ,
            group_resource(group),
            replace(self.context, sensitivity=sensitivity),
            remember_denials=False,
        )


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The sources of the spans before the first denied one, and until when they are right."""

    sources: list[Source]
    denial: Denial | None
    until: datetime | None


async def _sources(
    session: AsyncSession,
    spans: Sequence[SpanBody],
    tenant: Tenant,
    principal: Principal,
    asked: _Asked,
) -> _Labelled:
    everyone = await tenancy.everyone_group(session, tenant.id)
    versions = await registry.find_versions(
        session, tenant.id, {span.document for span in spans if span.document is not None}
    )
    named = {EVERYONE: everyone, PRIVATE: principal.private_group}
    sources: list[Source] = []
    until: datetime | None = None
    groups = await tenancy.find_groups(
        session,
        tenant.id,
        {span.group for span in spans if span.group is not None}
        | {version.group for version in versions.values()}
        | set(named.values()),
    )
    alive = await components.living(session, groups | set(versions))
    for number, span in enumerate(spans):
        source = _source(span, versions, named)
        label = span.document or str(span.group)
        # One decision a span, whatever there is: of what is not registered, about its own name,
        # which no rule can be about. The clock tells the two apart as little as the answer.
        known = source is not None and source.group in groups
        group = source.group if source is not None and known else ComponentId(label)
        decision = asked.may_read(group, versions.get(span.document or ""))
        if source is None or not known:
            return _Labelled(sources, Denial(number, label, "unregistered", ""), until)
        if isinstance(decision, Deny):
            denial = Denial(number, label, decision.reason, str(decision.rule or ""))
            return _Labelled(sources, denial, until)
        if not source.labels.documents | source.labels.groups <= alive:
            return _Labelled(sources, Denial(number, label, "revoked", ""), until)
        sources.append(source)
        until = _earliest(until, decision.until)
    return _Labelled(sources, None, until)


def _earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _source(
    span: SpanBody, versions: Mapping[str, DocumentVersion], named: Mapping[str, ComponentId]
) -> Source | None:
    if span.document is None:
        assert span.group is not None
        return GroupSource(named.get(span.group, ComponentId(span.group)))
    version = versions.get(span.document)
    return None if version is None else DocumentSource(version.id, version.group)


async def _damaged(
    session: AsyncSession,
    request: GrantBody,
    base: Sequence[ComponentId],
    identities: Sequence[CacheIdentity],
    uses: KeyUses,
) -> Denial:
    """A wrapped secret does not open: what needs it is as if it were not registered.

    Raises `Missing` where an artefact or the tenant is what is damaged.
    """
    _log.error("a component's wrapped secret does not open; the audit names whose")
    try:
        components.overwrite(await components.secrets(session, base, uses))
    except Corrupt as error:
        raise Missing("there is no such artefact", field="model") from error
    sound = 0
    with suppress(Corrupt):
        for identity in identities[:-1]:
            components.overwrite(await components.secrets(session, identity.components(), uses))
            sound += 1
    span = request.spans[sound]
    return Denial(sound, span.document or str(span.group), "corrupt", "")


async def _salt(session: AsyncSession, identity: CacheIdentity, uses: KeyUses) -> str:
    opened = await components.secrets(session, identity.components(), uses)
    try:
        return engine_salt(namespace_secret(opened, identity.fingerprint()))
    finally:
        components.overwrite(opened)
