"""Tokens of an identity provider, which runs here and is asked over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from policy.signing import encode_base64url
from service.auth.errors import Unauthenticated
from service.auth.identities import Identities, open_identities
from service.auth.providers import read_providers
from service.auth.tokens import Role, TokenRules
from service.settings import ServiceSettings
from strongroom.control import Typ
from strongroom.errors import Misuse, Unavailable
from tests.service.evidence import new_signer
from tests.service.house import Party, running
from tests.service.identity_provider import (
    OPERATORS,
    Provider,
    listening,
    new_key,
    provider_file,
)

NS = 1_000_000_000
TENANT = "a" * 32
OTHER = "b" * 32


class HandClock:
    def __init__(self) -> None:
        self.now_ns = NS

    def __call__(self) -> int:
        return self.now_ns

    def forward(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with listening(Provider()) as started:
        yield started


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def now_s() -> int:
    import time

    return int(time.time())


@asynccontextmanager
async def believing(
    path: Path, provider: Provider, clock: HandClock, bindings: str = OPERATORS, **more: Any
) -> AsyncIterator[Identities]:
    signer = new_signer("tokens")
    from service.auth.signing_keys import own_verifier

    providers = read_providers(provider_file(path, provider, bindings, **more), "strongroom")
    identities = open_identities(
        own_verifier(signer), TokenRules("strongroom", 3600, 30), providers, clock
    )
    try:
        yield identities
    finally:
        await identities.close()


@pytest.fixture
async def identities(
    tmp_path: Path, provider: Provider, clock: HandClock
) -> AsyncIterator[Identities]:
    async with believing(tmp_path / "providers.toml", provider, clock) as opened:
        yield opened


async def refused(identities: Identities, token: str, at_s: int | None = None) -> None:
    with pytest.raises(Unauthenticated) as refusal:
        await identities.read(token, now_s=at_s or now_s())
    assert refusal.value.message == "the token is not valid"


# The service as a whole


@pytest.fixture
def trusting(settings: ServiceSettings, provider: Provider, tmp_path: Path) -> ServiceSettings:
    path = provider_file(tmp_path / "providers.toml", provider, OPERATORS)
    return settings.model_copy(update={"identity_providers_file": path})


async def test_a_providers_token_opens_the_api_and_a_strangers_does_not(
    trusting: ServiceSettings, provider: Provider
) -> None:
    async with running(trusting) as service:
        right = Party(service.http, provider.token())
        assert (await right.ask("POST", "/v1/tenants", {"name": "acme"})).status_code == 201
        # The embedded issuer is believed as before.
        assert (await service.operator.get("/v1/tenants"))["items"][0]["name"] == "acme"
        stranger = Party(service.http, provider.sign(provider.claims(), key=new_key("ES256", "k")))
        unbound = Party(service.http, provider.token(groups=["staff"]))
        answers = [await party.ask("GET", "/v1/tenants") for party in (stranger, unbound)]
        assert {answer.status_code for answer in answers} == {401}
        assert len({answer.text for answer in answers}) == 1


async def test_a_providers_subject_is_the_tenants_principal(
    settings: ServiceSettings, provider: Provider, tmp_path: Path
) -> None:
    bindings = """
[[oidc.bindings]]
claim = "groups"
value = "kv-users"
roles = ["subject"]
tenant_claim = "org"
"""
    path = provider_file(tmp_path / "p.toml", provider, bindings, subject_claim="login")
    async with running(settings.model_copy(update={"identity_providers_file": path})) as service:
        tenants = [await service.tenant(name) for name in ("acme", "globex")]
        for tenant in tenants:
            party = Party(
                service.http, provider.token(groups=["kv-users"], login="alice", org=tenant)
            )
            # Their roles end before anything of their tenant; of the other it is the same.
            for other in tenants:
                answer = await party.ask("GET", f"/v1/tenants/{other}")
                assert answer.status_code == 403
        gone = Party(service.http, provider.token(groups=["kv-users"], login="alice", org="acme"))
        assert (await gone.ask("GET", f"/v1/tenants/{tenants[0]}")).status_code == 401


# Algorithms and keys


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256", "RS256"])
async def test_each_algorithm_verifies_where_it_is_pinned_and_nowhere_else(
    tmp_path: Path, clock: HandClock, algorithm: str
) -> None:
    async with listening(Provider(algorithm)) as provider:
        async with believing(tmp_path / "a.toml", provider, clock) as identities:
            claims = await identities.read(provider.token(), now_s=now_s())
            assert (claims.sub, claims.roles, claims.tenant) == ("alice", (Role.OPERATOR,), "")
        others = sorted({"EdDSA", "ES256", "RS256"} - {algorithm})
        async with believing(tmp_path / "b.toml", provider, clock, algorithms=others) as identities:
            await refused(identities, provider.token())


async def test_ed25519_under_its_new_name_is_the_same_algorithm(
    tmp_path: Path, clock: HandClock
) -> None:
    async with (
        listening(Provider("EdDSA")) as provider,
        believing(tmp_path / "a.toml", provider, clock) as identities,
    ):
        token = provider.sign(provider.claims(), algorithm="Ed25519")
        assert (await identities.read(token, now_s=now_s())).sub == "alice"


def forged(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None) -> str:
    parts = [encode_base64url(json.dumps(part).encode()) for part in (header, claims)]
    signed = ".".join(parts)
    tag = b"" if secret is None else hmac.digest(secret, signed.encode(), hashlib.sha256)
    return f"{signed}.{encode_base64url(tag)}"


async def test_no_algorithm_and_hmac_over_a_public_key_are_refused(
    tmp_path: Path, clock: HandClock
) -> None:
    async with (
        listening(Provider("RS256")) as provider,
        believing(tmp_path / "a.toml", provider, clock) as identities,
    ):
        await identities.read(provider.token(), now_s=now_s())
        public = provider.key.as_pem(private=False)
        for name, secret in (("none", None), ("HS256", public), ("HS256", public.strip())):
            for kid in ({"kid": "key-1"}, {}):
                header = {"alg": name, "typ": "at+jwt", **kid}
                await refused(identities, forged(header, provider.claims(), secret))
        for name in ("none", "HS256", "PS256"):
            with pytest.raises(Misuse):
                read_providers(
                    provider_file(tmp_path / "b.toml", provider, OPERATORS, algorithms=[name]), ""
                )


async def test_a_key_that_the_token_brings_or_points_to_is_not_looked_at(
    identities: Identities, provider: Provider
) -> None:
    thief = Provider()
    async with listening(thief):
        own = thief.key.as_dict(private=False)
        stolen_name = new_key("ES256", "key-1")
        for header in (
            {"jku": f"{thief.url}/keys"},
            {"x5u": f"{thief.url}/keys"},
            {"jwk": own},
            {"x5c": [base64.b64encode(b"no certificate").decode()]},
        ):
            await refused(identities, provider.sign(provider.claims(), key=thief.key, **header))
            await refused(identities, provider.sign(provider.claims(), key=stolen_name, **header))
            # On a good token they change nothing.
            good = provider.sign(provider.claims(), **header)
            assert (await identities.read(good, now_s=now_s())).sub == "alice"
        assert not thief.asked


async def test_key_ids_choose_one_key_of_the_right_type_or_none(
    tmp_path: Path, provider: Provider, clock: HandClock
) -> None:
    public = provider.key.as_dict(private=False)
    rsa = new_key("RS256", "key-1")
    cases: list[tuple[list[Any], bool]] = [
        ([public], True),
        ([new_key("EdDSA", "key-2").as_dict(private=False), public], True),
        ([public, {"kty": "oct", "k": "AAAA", "kid": "other"}, "no key", {}], True),
        ([rsa.as_dict(private=False)], False),  # the same name, another type
        ([public, rsa.as_dict(private=False)], False),  # two of one name
        ([public, new_key("ES256", "key-1").as_dict(private=False)], False),
        ([{**public, "use": "enc"}], False),
        ([{**public, "alg": "ES384"}], False),
        ([{**public, "key_ops": ["sign"]}], False),
        ([{**public, "x": "AAAA"}], False),
        ([{name: value for name, value in public.items() if name != "kid"}], False),
        ([public] * 65, False),
    ]
    for number, (published, good) in enumerate(cases):
        provider.published = published
        async with believing(tmp_path / "a.toml", provider, clock) as identities:
            token = provider.token()
            if good:
                assert (await identities.read(token, now_s=now_s())).sub == "alice", number
            elif len(published) > 64:
                with pytest.raises(Unavailable):
                    await identities.read(token, now_s=now_s())
            else:
                await refused(identities, token)
    provider.published = [public]
    async with believing(tmp_path / "a.toml", provider, clock) as identities:
        await refused(identities, provider.sign(provider.claims(), kid="key-9"))
        nameless = provider.sign(provider.claims(), kid=None)
        assert (await identities.read(nameless, now_s=now_s())).sub == "alice"


async def test_short_rsa_keys_are_not_used(tmp_path: Path, clock: HandClock) -> None:
    from joserfc.jwk import RSAKey

    async with listening(Provider("RS256")) as provider:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            provider.key = RSAKey.generate_key(1024, {"kid": "key-1"})
        provider.published = [provider.key.as_dict(private=False)]
        async with believing(tmp_path / "a.toml", provider, clock) as identities:
            await refused(identities, provider.token())


# Rotation


async def test_a_new_key_is_fetched_once_for_all_who_wait(
    identities: Identities, provider: Provider, clock: HandClock
) -> None:
    old = provider.token()
    assert (await identities.read(old, now_s=now_s())).sub == "alice"
    provider.rotate("key-2")
    clock.forward(11)
    new = provider.token()
    read = await asyncio.gather(*(identities.read(new, now_s=now_s()) for _ in range(20)))
    assert {claims.sub for claims in read} == {"alice"}
    assert provider.asked_for("/keys") == 2
    # The old key went with the same answer.
    await refused(identities, old)


async def test_made_up_key_ids_make_nobody_ask_the_provider_again_and_again(
    identities: Identities, provider: Provider, clock: HandClock
) -> None:
    await identities.read(provider.token(), now_s=now_s())
    for number in range(50):
        await refused(identities, provider.sign(provider.claims(), kid=f"made-up-{number}"))
    assert provider.asked_for("/keys") == 1
    clock.forward(11)
    for number in range(50):
        await refused(identities, provider.sign(provider.claims(), kid=f"made-up-{number}"))
    assert provider.asked_for("/keys") == 2


async def test_a_withdrawn_key_ends_when_the_keys_are_not_fresh_any_more(
    identities: Identities, provider: Provider, clock: HandClock
) -> None:
    old = provider.token()
    await identities.read(old, now_s=now_s())
    provider.rotate("key-2")
    clock.forward(299)
    assert (await identities.read(old, now_s=now_s())).sub == "alice"
    clock.forward(2)
    await refused(identities, old)


async def test_while_the_provider_is_away_its_keys_serve_until_they_are_stale(
    identities: Identities, provider: Provider, clock: HandClock
) -> None:
    token = provider.token(exp=now_s() + 3600)
    await identities.read(token, now_s=now_s())
    provider.away = True
    clock.forward(3800)
    assert (await identities.read(token, now_s=now_s())).sub == "alice"
    clock.forward(200)
    with pytest.raises(Unavailable):
        await identities.read(token, now_s=now_s())
    asked = len(provider.asked)
    with pytest.raises(Unavailable):
        await identities.read(token, now_s=now_s())
    assert len(provider.asked) == asked
    provider.away = False
    clock.forward(11)
    assert (await identities.read(token, now_s=now_s())).sub == "alice"


@pytest.mark.parametrize(
    "discovery",
    [
        {"issuer": "https://other.example"},
        {"jwks_uri": "http://keys.example/keys"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": None},
    ],
)
async def test_a_discovery_document_of_another_or_leading_elsewhere_is_not_followed(
    identities: Identities, provider: Provider, discovery: dict[str, Any]
) -> None:
    provider.discovery = discovery
    with pytest.raises(Unavailable):
        await identities.read(provider.token(), now_s=now_s())
    assert provider.asked_for("/keys") == 0


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"keys": {}}', b'{"keys": "' + b"x" * 300_000])
async def test_what_is_no_set_of_keys_is_no_keys(
    identities: Identities, provider: Provider, body: bytes
) -> None:
    provider.body = body
    with pytest.raises(Unavailable):
        await identities.read(provider.token(), now_s=now_s())


# Claims


@pytest.mark.parametrize(
    "change",
    [
        lambda moment: {"iss": "http://127.0.0.1:1"},
        lambda moment: {"aud": "another"},
        lambda moment: {"aud": ["another", "third"]},
        lambda moment: {"aud": None},
        lambda moment: {"exp": moment - 31},
        lambda moment: {"exp": None},
        lambda moment: {"exp": "tomorrow"},
        lambda moment: {"exp": True},
        lambda moment: {"exp": moment + 25 * 3600},
        lambda moment: {"iat": moment + 40},
        lambda moment: {"iat": None},
        lambda moment: {"nbf": moment + 40},
        lambda moment: {"nbf": -1},
        lambda moment: {"sub": None},
        lambda moment: {"sub": ""},
        lambda moment: {"sub": ["alice"]},
        lambda moment: {"sub": "x" * 129},
        lambda moment: {"groups": None},
        lambda moment: {"groups": {"kv-operators": True}},
        lambda moment: {"groups": "kv-operators, kv-users"},
        lambda moment: {"nonce": "of a login"},
        lambda moment: {"at_hash": "of a login"},
    ],
)
async def test_a_token_for_another_of_another_time_or_for_nobody_is_refused(
    identities: Identities, provider: Provider, change: Callable[[int], dict[str, Any]]
) -> None:
    moment = now_s()
    assert (await identities.read(provider.token(), now_s=moment)).sub == "alice"
    await refused(identities, provider.token(**change(moment)), moment)


async def test_the_clock_may_be_off_by_the_skew_and_no_more(
    identities: Identities, provider: Provider
) -> None:
    moment = now_s()
    token = provider.token(iat=moment, exp=moment + 60, nbf=moment)
    for at_s in (moment - 30, moment, moment + 89):
        assert (await identities.read(token, now_s=at_s)).sub == "alice"
    for at_s in (moment - 31, moment + 90):
        await refused(identities, token, at_s)


async def test_a_token_of_another_type_is_refused(
    identities: Identities, provider: Provider
) -> None:
    for good in ("at+jwt", "application/at+jwt", "JWT", "jwt"):
        token = provider.sign(provider.claims(), typ=good)
        assert (await identities.read(token, now_s=now_s())).sub == "alice"
    for wrong in ("logout+jwt", "dpop+jwt", "", None, Typ.TOKEN, Typ.GRANT, Typ.PROOF):
        await refused(identities, provider.sign(provider.claims(), typ=wrong))
    await refused(identities, provider.sign(provider.claims(), crit=["typ"]))


async def test_the_audience_may_be_one_of_several(
    identities: Identities, provider: Provider
) -> None:
    token = provider.token(aud=["another", "strongroom"])
    assert (await identities.read(token, now_s=now_s())).aud == "strongroom"


async def test_what_is_no_token_is_refused(identities: Identities, provider: Provider) -> None:
    good = provider.token()
    head, body, tail = good.split(".")
    for wrong in (
        "",
        "..",
        "a.b.c",
        f"{head}.{body}",
        f"{head}.{body}.",
        f"{head}.{body}.{tail}.{tail}",
        f"{head}.{body[:-4]}AAAA.{tail}",
        good + "x" * 20_000,
        "\ud800." + good,
        encode_base64url(b'["alg"]') + f".{body}.{tail}",
        encode_base64url(b"[" * 10_000) + f".{body}.{tail}",
    ):
        await refused(identities, wrong)


BINDINGS = f"""
[oidc.tenants]
acme = "{TENANT}"
globex = "{OTHER}"

[[oidc.bindings]]
claim = "groups"
value = "users"
roles = ["subject"]
tenant_claim = "org"

[[oidc.bindings]]
claim = "groups"
value = "acme-admins"
roles = ["tenant_admin"]
tenant = "{TENANT}"

[[oidc.bindings]]
claim = "role"
value = "audit"
roles = ["auditor"]
"""


@pytest.mark.parametrize(
    ("claims", "tenant", "roles"),
    [
        ({"groups": ["users"], "org": "acme"}, TENANT, (Role.SUBJECT,)),
        ({"groups": ["users"], "org": "globex"}, OTHER, (Role.SUBJECT,)),
        (
            {"groups": ["users", "acme-admins"], "org": "acme"},
            TENANT,
            (Role.TENANT_ADMIN, Role.SUBJECT),
        ),
        ({"groups": None, "role": "audit"}, "", (Role.AUDITOR,)),
        # Two tenants at once, an unknown one, one by its id, several, none.
        ({"groups": ["users", "acme-admins"], "org": "globex"}, None, ()),
        ({"groups": ["users"], "role": "audit", "org": "acme"}, None, ()),
        ({"groups": ["users"], "org": "initech"}, None, ()),
        ({"groups": ["users"], "org": TENANT}, None, ()),
        ({"groups": ["users"], "org": ["acme"]}, None, ()),
        ({"groups": ["users"]}, None, ()),
        # What a token says about its own roles and tenant says nothing.
        ({"groups": ["users"], "org": "acme", "roles": ["operator"]}, TENANT, (Role.SUBJECT,)),
        ({"groups": [], "tenant": TENANT, "roles": ["operator"]}, None, ()),
    ],
)
async def test_tenant_and_roles_are_what_the_bindings_say(
    tmp_path: Path,
    provider: Provider,
    clock: HandClock,
    claims: dict[str, Any],
    tenant: str | None,
    roles: tuple[Role, ...],
) -> None:
    async with believing(tmp_path / "a.toml", provider, clock, BINDINGS) as identities:
        token = provider.token(**claims)
        if tenant is None:
            await refused(identities, token)
            return
        read = await identities.read(token, now_s=now_s())
        assert (read.tenant, read.roles) == (tenant, roles)


async def test_our_own_tokens_and_a_providers_never_pass_for_one_another(
    tmp_path: Path, provider: Provider, clock: HandClock
) -> None:
    async with believing(tmp_path / "a.toml", provider, clock) as identities:
        signer = new_signer("tokens")
        claims = json.dumps(provider.claims()).encode()
        await refused(identities, signer.sign(Typ.TOKEN, claims))
        ours = {
            **provider.claims(),
            "iss": "strongroom",
            "aud": "strongroom-service",
            "tenant": "",
            "roles": ["operator"],
            "jti": "1",
        }
        del ours["groups"]
        good = signer.sign(Typ.TOKEN, json.dumps(ours).encode())
        assert (await identities.read(good, now_s=now_s())).roles == (Role.OPERATOR,)
        await refused(identities, provider.sign(ours, typ=Typ.TOKEN))
        await refused(identities, provider.sign(ours))


# The file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("oidc = 1", "oidc"),
        ("[[saml]]", "saml"),
        ("[[oidc]]\nissuer = 'https://i.example'", "audience"),
        ("{", "no TOML"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "providers.toml"
    path.write_text(text)
    with pytest.raises(Misuse, match=told) as refusal:
        read_providers(path, "strongroom")
    assert refusal.value.field == "identity_providers_file"


@pytest.mark.parametrize(
    ("changes", "bindings", "told"),
    [
        ({"issuer": "http://idp.example"}, OPERATORS, "https"),
        ({"jwks_url": "http://10.0.0.1/keys"}, OPERATORS, "https"),
        ({"secret": "x"}, OPERATORS, "secret"),
        ({}, "", "bindings"),
        ({}, OPERATORS.replace("operator", "emperor"), "roles"),
        ({}, OPERATORS + f'tenant = "{TENANT}"', "operator belongs to no tenant"),
        ({}, OPERATORS.replace('"operator"', '"subject"'), "one tenant"),
        ({}, OPERATORS + f'tenant = "{TENANT}"\ntenant_claim = "org"', "not both"),
    ],
)
def test_a_provider_that_nobody_should_believe_is_refused(
    tmp_path: Path, changes: dict[str, Any], bindings: str, told: str
) -> None:
    provider = Provider()
    provider.url = "https://idp.example"
    path = provider_file(tmp_path / "a.toml", provider, OPERATORS)
    assert len(read_providers(path, "strongroom")) == 1
    with pytest.raises(Misuse, match=told):
        read_providers(provider_file(path, provider, bindings, **changes), "strongroom")


def test_an_issuer_is_named_once(tmp_path: Path) -> None:
    provider = Provider()
    provider.url = "https://idp.example"
    path = provider_file(tmp_path / "a.toml", provider, OPERATORS)
    with pytest.raises(Misuse, match="twice"):
        read_providers(path, provider.url)
    path.write_text(path.read_text() * 2)
    with pytest.raises(Misuse, match="twice"):
        read_providers(path, "strongroom")
    with pytest.raises(Misuse, match="cannot be read"):
        read_providers(tmp_path / "none.toml", "strongroom")
