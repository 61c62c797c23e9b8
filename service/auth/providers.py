"""Identity providers: whose tokens are believed besides our own, and what they may say.

`identity_providers_file` is TOML: `[[oidc]]` for an OpenID Connect issuer, `[[kubernetes]]` for
the issuer of projected service-account tokens. docs/operations.md shows both.

Rules:
- Everything is pinned here: issuer, audience, algorithms, types. A token's header chooses among
  these and adds nothing; `none` and HMAC have no name here.
- Which tenant and which roles somebody has is said here, by bindings. A token carries facts
  (a group, a service account), never a role of ours.
- Keys come by HTTPS; plain HTTP is for loopback alone.
- An unknown key in the file is an error, as for every setting.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.auth.tokens import Role, check_roles
from service.schemas import ComponentIdText
from strongroom.errors import Misuse
from strongroom.limits import NAME_CHARS_MAX

_FILE_BYTES_MAX: Final = 1024 * 1024
_BINDINGS_MAX: Final = 10_000


class Algorithm(StrEnum):
    """What a provider may sign with."""

    EDDSA = "EdDSA"
    """Ed25519; also under the name that RFC 9864 gives it."""
    ES256 = "ES256"
    RS256 = "RS256"


def check_url(url: str) -> str:
    """`url`, if keys may be fetched from there. Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname and not parts.fragment:
        return url
    if parts.scheme == "http" and parts.hostname and _loopback(parts.hostname):
        return url
    raise ValueError("keys are fetched by https (http is for loopback alone)")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Url = Annotated[str, Field(min_length=8, max_length=1024), AfterValidator(check_url)]
Text = Annotated[str, Field(min_length=1, max_length=256)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Bound(_Part):
    """What whoever fits gets: `roles`, in one tenant or for the installation."""

    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    tenant: ComponentIdText | None = None
    """A tenant's component id. None: the installation, or whatever `tenant_claim` says."""

    @model_validator(mode="after")
    def _possible(self) -> _Bound:
        try:
            self.check()
        except Misuse as error:
            raise ValueError(error.message) from error
        return self

    def check(self) -> None:
        """Raise `Misuse` for roles that nobody can have there."""
        check_roles(self.roles, self.tenant or "")


class ClaimBinding(_Bound):
    """Whoever has `value` in `claim`, alone or in a list."""

    claim: Text
    value: Text
    tenant_claim: Text | None = None
    """The claim that names the tenant: by its id, or by a name in the provider's `tenants`."""

    def check(self) -> None:
        """As above; with a `tenant_claim` it is known only with the token."""
        if self.tenant_claim is None:
            super().check()
        elif self.tenant is not None:
            raise Misuse("say tenant or tenant_claim, and not both")


class ServiceAccountBinding(_Bound):
    """The pods of one service account."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    service_account: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class _Provider(_Part):
    issuer: Annotated[
        str, Field(min_length=8, max_length=NAME_CHARS_MAX), AfterValidator(check_url)
    ]
    """`iss`, letter for letter."""
    audience: Text
    """What `aud` must be, or hold."""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)]
    jwks_url: Url | None = None
    """Where the keys are. None: as the issuer's discovery document says."""
    ca_file: Path | None = None
    """Authorities for the provider's own certificate. None: those of the system."""
    bearer_token_file: Path | None = None
    """A token to show when keys are fetched, read anew each time."""
    skew_s: Annotated[int, Field(ge=0, le=300)] = 30
    """How far the provider's clock may be off."""
    life_s_max: Annotated[int, Field(gt=0, le=30 * 24 * 3600)] = 24 * 3600
    """Tokens that live longer are refused."""
    keys_fresh_s: Annotated[float, Field(gt=0, le=24 * 3600)] = 300.0
    """After this the keys are fetched again: so long a key that was withdrawn still counts."""
    keys_stale_s: Annotated[float, Field(gt=0, le=24 * 3600)] = 3600.0
    """How long keys are used while the provider does not answer."""
    refetch_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Keys are fetched no oftener than this, whatever tokens name."""


class OidcProvider(_Provider):
    """An OpenID Connect issuer, whose access tokens are JWTs (RFC 9068)."""

    types: tuple[str, ...] = ("at+jwt", "JWT")
    """Accepted `typ` headers; "" is a token without one."""
    subject_claim: Text = "sub"
    """What names the party; for subjects it is the principal's name."""
    tenants: dict[Text, ComponentIdText] = Field(default_factory=dict)
    """What a `tenant_claim` may hold, and which tenant each is. Empty: it holds ids."""
    bindings: Annotated[tuple[ClaimBinding, ...], Field(min_length=1, max_length=_BINDINGS_MAX)]


class KubernetesProvider(_Provider):
    """A cluster's issuer of projected service-account tokens."""

    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = (Algorithm.RS256,)
    types: tuple[str, ...] = ("", "JWT")
    """Kubernetes writes none."""
    bindings: Annotated[
        tuple[ServiceAccountBinding, ...], Field(min_length=1, max_length=_BINDINGS_MAX)
    ]


Provider = OidcProvider | KubernetesProvider


class _File(_Part):
    oidc: tuple[OidcProvider, ...] = ()
    kubernetes: tuple[KubernetesProvider, ...] = ()


def read_providers(path: Path | None, own_issuer: str) -> Sequence[Provider]:
    """The providers in the file. Raises `Misuse` naming what is wrong in it."""
    if path is None:
        return ()
    name = "identity_providers_file"
    try:
        raw = path.read_bytes()
        if len(raw) > _FILE_BYTES_MAX:
            raise Misuse(f"{path} is too large", field=name, limit=_FILE_BYTES_MAX)
        file = _File.model_validate(tomllib.loads(raw.decode()))
    except OSError as error:
        raise Misuse(f"{path} cannot be read: {error.strerror}", field=name) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misuse(f"{path} is no TOML: {error}", field=name) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Misuse(f"{path}: {place}: {first['msg']}", field=name) from None
    providers: tuple[Provider, ...] = (*file.oidc, *file.kubernetes)
    issuers = [own_issuer, *(provider.issuer for provider in providers)]
    if len(set(issuers)) != len(issuers):
        raise Misuse(f"{path}: an issuer is named twice", field=name)
    return providers
