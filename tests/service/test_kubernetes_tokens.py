"""Projected service-account tokens, of the shape that a cluster's API server signs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.auth.identities import Identities, open_identities
from service.auth.issuer import open_issuer
from service.auth.providers import read_providers
from service.auth.signing_keys import own_verifier
from service.auth.tokens import Role
from service.settings import ServiceSettings
from strongroom.clock import boot_ns
from strongroom.errors import Misuse
from tests.service.house import Party, running
from tests.service.identity_provider import Provider, listening
from tests.service.test_oidc import now_s, refused

TENANT = "a" * 32


def settings_file(path: Path, cluster: Provider, token_file: Path) -> Path:
    path.write_text(
        f"""
[[kubernetes]]
issuer = "{cluster.url}"
audience = "strongroom"
bearer_token_file = "{token_file}"

[[kubernetes.bindings]]
namespace = "inference"
service_account = "gateway"
roles = ["gateway"]

[[kubernetes.bindings]]
namespace = "acme"
service_account = "admin"
roles = ["tenant_admin"]
tenant = "{TENANT}"
"""
    )
    return path


def projected(
    cluster: Provider,
    namespace: str = "inference",
    account: str = "gateway",
    **changed: Any,
) -> str:
    """A token as `TokenRequest` gives it for a pod: no `typ`, RS256, nested private claims."""
    moment = now_s()
    claims = {
        "aud": ["strongroom"],
        "exp": moment + 3600,
        "iat": moment,
        "iss": cluster.url,
        "jti": "c8a4a4a5-7a2c-4d0e-9e43-2d0d3f1a9f70",
        "kubernetes.io": {
            "namespace": namespace,
            "node": {"name": "node-1", "uid": "0b9a4d6e-6a2a-4ef4-8b62-3f8f0e3c7d11"},
            "pod": {"name": "gateway-6d9f", "uid": "5f6e2c7a-1b8d-4a3c-9a61-7c1f7d0f2b33"},
            "serviceaccount": {"name": account, "uid": "9d2b1f0e-3c4d-4e5f-8a9b-0c1d2e3f4a55"},
        },
        "nbf": moment,
        "sub": f"system:serviceaccount:{namespace}:{account}",
        **changed,
    }
    return cluster.sign(claims, typ=None)


@pytest.fixture
async def cluster() -> AsyncIterator[Provider]:
    async with listening(Provider("RS256")) as started:
        yield started


@pytest.fixture
def providers_file(tmp_path: Path, cluster: Provider) -> Path:
    token_file = tmp_path / "own-token"
    token_file.write_text("our own\n")
    return settings_file(tmp_path / "providers.toml", cluster, token_file)


@pytest.fixture
async def identities(providers_file: Path, settings: ServiceSettings) -> AsyncIterator[Identities]:
    issuer = open_issuer(settings)
    opened = open_identities(
        own_verifier(issuer.signer),
        issuer.rules,
        read_providers(providers_file, "strongroom"),
        boot_ns,
    )
    yield opened
    await opened.close()


pytestmark = pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)


async def test_a_service_account_gets_what_its_binding_says(
    identities: Identities, cluster: Provider
) -> None:
    gateway = await identities.read(projected(cluster), now_s=now_s())
    assert (gateway.roles, gateway.tenant) == ((Role.GATEWAY,), "")
    assert gateway.sub == "system:serviceaccount:inference:gateway"
    admin = await identities.read(projected(cluster, "acme", "admin"), now_s=now_s())
    assert (admin.roles, admin.tenant) == ((Role.TENANT_ADMIN,), TENANT)
    # The API server gives its keys to authenticated callers: ours is shown, read anew.
    assert {shown for _, shown in cluster.asked} == {"Bearer our own"}


async def test_the_same_name_in_another_namespace_is_nobody(
    identities: Identities, cluster: Provider
) -> None:
    await identities.read(projected(cluster), now_s=now_s())
    for namespace, account in (("default", "gateway"), ("inference", "admin"), ("acme", "gateway")):
        await refused(identities, projected(cluster, namespace, account))


async def test_an_account_that_is_told_twice_and_differently_is_refused(
    identities: Identities, cluster: Provider
) -> None:
    for wrong in (
        {"sub": "system:serviceaccount:acme:admin"},
        {"sub": "inference:gateway"},
        {"kubernetes.io": {"namespace": "inference"}},
        {"kubernetes.io": {"namespace": "acme", "serviceaccount": {"name": "admin"}}},
        {"kubernetes.io": "inference"},
        {"aud": ["https://kubernetes.default.svc"]},
        {"iss": "kubernetes/serviceaccount"},
    ):
        await refused(identities, projected(cluster, **wrong))
    # The old kind, from a Secret: it has no audience and never ends.
    legacy = {
        "iss": "kubernetes/serviceaccount",
        "kubernetes.io/serviceaccount/namespace": "inference",
        "kubernetes.io/serviceaccount/service-account.name": "gateway",
        "sub": "system:serviceaccount:inference:gateway",
    }
    await refused(identities, cluster.sign(legacy, typ=None))


async def test_a_gateways_pod_asks_for_grants_and_nothing_else(
    settings: ServiceSettings, providers_file: Path, cluster: Provider
) -> None:
    trusting = settings.model_copy(update={"identity_providers_file": providers_file})
    async with running(trusting) as service:
        pod = Party(service.http, projected(cluster))
        assert (await pod.ask("GET", "/v1/artefacts")).status_code == 200
        assert (await pod.ask("GET", "/v1/tenants")).status_code == 403
        stranger = Party(service.http, projected(cluster, "default", "default"))
        assert (await stranger.ask("GET", "/v1/artefacts")).status_code == 401


def test_a_binding_names_a_namespace_and_an_account(tmp_path: Path, dialect: str) -> None:
    del dialect
    cluster = Provider()
    cluster.url = "https://kubernetes.default.svc"
    path = settings_file(tmp_path / "a.toml", cluster, tmp_path / "t")
    assert len(read_providers(path, "strongroom")) == 1
    text = path.read_text()
    for wrong in (
        text.replace('namespace = "inference"', 'namespace = "*"'),
        text.replace('service_account = "gateway"', 'service_account = "a:b"'),
        text.replace('service_account = "gateway"\n', ""),
        text.replace('roles = ["gateway"]', 'roles = ["subject"]'),
    ):
        assert wrong != text
        path.write_text(wrong)
        with pytest.raises(Misuse):
            read_providers(path, "strongroom")
