"""The one place where the service is built.

`create_app` reads keys and opens nothing else; the application's lifespan checks the database's
migration, opens the journal and brings it and the database to one state before the first
request is served. It stops in the reverse order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from service import health, http_errors, versions
from service.audit import hold_routes as audit_holds
from service.audit import proof_routes as audit_proofs
from service.audit import routes as audit
from service.audit.keeping import Folder, HeadKeeper, open_bucket
from service.audit.upkeep import Upkeep
from service.auth import routes as tokens
from service.auth.identities import open_identities
from service.auth.issuer import open_issuer
from service.auth.providers import read_providers
from service.auth.scope import current_claims
from service.auth.signing_keys import SERVICE_KEY, load_cursor_key, load_signer, own_verifier
from service.certificates import routes as certificates
from service.changes import Changes
from service.db.migrate import check_revision
from service.db.session import POSTGRESQL, open_database
from service.grants import routes as grants
from service.http_headers import AnswerHeaders
from service.journal.file import Journal
from service.journal.reconcile import reconcile
from service.keys import routes as keys
from service.keys.chosen import open_provider
from service.keys.openable import KeyCheck
from service.keys.provider import session_info
from service.keys.schedule import KeySchedule
from service.log import routes as log
from service.log.kick import Kick
from service.log.tail import Tail
from service.log.wakes import Wakes
from service.policies import routes as policies
from service.policies import version_routes as policy_versions
from service.policies.enforcers import Enforcers
from service.rates import RateRules, Rates
from service.registry import routes as registry
from service.residency import routes as residency
from service.revocation import routes as revocation
from service.revocation import schedule_routes as scheduled
from service.revocation.desk import RevocationDesk
from service.revocation.rounds import RevocationRounds
from service.revocation.settle import settle
from service.runtime import Runtime
from service.settings import ServiceSettings
from service.sidecars import routes as sidecars
from service.sidecars.ack_batches import AckBatches
from service.sidecars.desk import open_desk
from service.sidecars.enrolment import ENROL_BODY_BYTES_MAX, ENROL_PATH
from service.sidecars.roster import Roster
from service.tenancy import routes as tenancy
from strongroom.clock import Clock, boot_ns


def create_app(settings: ServiceSettings, *, clock: Clock = boot_ns) -> FastAPI:
    """The application. Raises `Misuse` when the key directory is open to others."""
    provider = open_provider(settings)
    signer = load_signer(settings.keys, SERVICE_KEY)
    issuer = open_issuer(settings)
    identity_providers = read_providers(settings.identity_providers_file, settings.issuer)
    token_verifier = own_verifier(issuer.signer)
    database = open_database(settings.database, session_info(provider))
    # Replicas of one PostgreSQL keep one journal between them.
    journal = Journal(settings.journal / "log.jws", shared=database.dialect == POSTGRESQL)
    kick = Kick()
    changes = Changes(database, signer, journal, kick)
    desk = open_desk(settings.serving_lease_s, clock, settle)
    wakes = Wakes(database, kick, desk.acks)
    runtime = Runtime(
        settings=settings,
        database=database,
        key_provider=provider,
        key_check=KeyCheck(database),
        key_schedule=KeySchedule(
            database,
            changes,
            provider,
            erasure_final_s=settings.erasure_final_s,
            check_s=settings.rotation_check_s,
            uses_kept_s=settings.key_uses_kept_s,
        ),
        signer=signer,
        verifier=own_verifier(signer),
        issuer=issuer,
        token_verifier=token_verifier,
        identities=open_identities(token_verifier, issuer.rules, identity_providers, clock),
        cursor_key=load_cursor_key(settings.keys),
        changes=changes,
        journal=journal,
        kick=kick,
        wakes=wakes,
        tail=Tail(database.readers, kick),
        roster=Roster(database.readers),
        ack_batches=AckBatches(database, desk.settle, wakes.acknowledged),
        enforcers=Enforcers(
            tenants_max=settings.policies_max, bytes_max=settings.policies_bytes_max
        ),
        rates=Rates(_rate_rules(settings), clock),
        desk=desk,
        revocations=RevocationRounds(
            RevocationDesk(database, changes, desk, settings.erasure_final_s),
            provider,
            check_s=settings.revocation_check_s,
        ),
        clock=clock,
    )
    upkeep = Upkeep(
        database,
        runtime.changes,
        signer,
        runtime.verifier,
        _head_keepers(settings),
        settings.audit_retention_days,
    )
    app = FastAPI(
        title="Strongroom",
        version=_version(),
        summary="A multi-tenant, encrypted KV cache with a policy engine.",
        lifespan=_lifespan(runtime, upkeep),
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A redirect would carry no problem, and have clients send their tokens twice.
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        responses=http_errors.PROBLEMS,
    )
    app.state.runtime = runtime
    app.state.upkeep = upkeep
    http_errors.install(app)
    versions.install(app, versions.DEPRECATED)
    app.add_middleware(
        http_errors.BodyDoor,
        bytes_max=settings.body_bytes_max,
        smaller={ENROL_PATH: ENROL_BODY_BYTES_MAX},
    )
    app.add_middleware(AnswerHeaders)
    app.include_router(health.router)
    for router in (
        tenancy.router,
        registry.artefacts,
        registry.documents,
        policies.router,
        policy_versions.router,
        grants.router,
        tokens.router,
        keys.router,
        revocation.router,
        scheduled.router,
        certificates.router,
        audit.router,
        audit_proofs.router,
        audit_holds.router,
        log.router,
        sidecars.admin,
        residency.router,
    ):
        app.include_router(router, dependencies=[Depends(current_claims)])
    # A sidecar proves itself by its own key (or a join token), which its routes check.
    app.include_router(sidecars.router)
    app.include_router(residency.intake_router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _head_keepers(settings: ServiceSettings) -> list[HeadKeeper]:
    keepers: list[HeadKeeper] = [Folder(settings.audit_heads)]
    if settings.audit_heads_url:
        keepers.append(open_bucket(settings.audit_heads_url, settings.audit_heads_endpoint))
    return keepers


def _lifespan(
    runtime: Runtime, upkeep: Upkeep
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        try:
            await runtime.database.ping()
            await check_revision(runtime.database)
            await runtime.key_provider.prepare()
            await runtime.journal.open()
            async with runtime.wakes.starting(await runtime.journal.identity()):
                await reconcile(
                    runtime.database,
                    runtime.journal,
                    runtime.changes,
                    runtime.verifier,
                    accept_lost_journal=runtime.settings.accept_lost_journal,
                )
            await runtime.changes.cut_wal()
            await runtime.key_check.look()
            await upkeep.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(runtime.revocations.run(), name="revocations")
                rounds = (
                    tasks.create_task(runtime.wakes.run(), name="wakes"),
                    tasks.create_task(runtime.key_schedule.run(), name="kek-rotation"),
                    tasks.create_task(
                        upkeep.keep_heads(runtime.settings.audit_head_every_s), name="audit-heads"
                    ),
                    tasks.create_task(
                        upkeep.keep_up(runtime.settings.audit_upkeep_s), name="audit-upkeep"
                    ),
                )
                try:
                    yield
                finally:
                    runtime.revocations.stop()
                    for each in rounds:
                        each.cancel()
        finally:
            await runtime.identities.close()
            await runtime.wakes.close()
            await runtime.journal.close()
            await runtime.database.close()
            runtime.enforcers.close()
            runtime.key_provider.close()

    return lifespan


def _rate_rules(settings: ServiceSettings) -> RateRules:
    return RateRules(
        principal=settings.principal_requests_per_min,
        tenant=settings.tenant_requests_per_min,
        sidecar=settings.sidecar_requests_per_min,
        address=settings.enrolments_per_min,
        subjects_max=settings.rate_windows_max,
    )


def _operation_id(route: APIRoute) -> str:
    return route.name


def _version() -> str:
    try:
        return version("strongroom")
    except PackageNotFoundError:  # pragma: no cover - run from a checkout without an install
        return "0"


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The document, with the problem schema that every error answer refers to."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = http_errors.Problem.model_json_schema()
        versions.mark(document, versions.DEPRECATED)
        app.openapi_schema = document
    return app.openapi_schema
