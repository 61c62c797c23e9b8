"""Every setting of the service, read once, frozen, and handed down as values.

Environment variables carry the prefix `STRONGROOM_SERVICE_`. An unknown one is an error: a
misspelt limit must not silently leave its default in force. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from strongroom.errors import Misuse
from strongroom.limits import (
    ERASURE_FINAL_S_DEFAULT,
    GRANT_LIFE_S_MAX,
    KEY_LEASE_S_DEFAULT,
    SERVING_LEASE_S_DEFAULT,
)

ENV_PREFIX: Final = "STRONGROOM_SERVICE_"

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]


Prefix = Annotated[str, Field(pattern="^[a-zA-Z0-9][a-zA-Z0-9_-]{0,31}$")]


class KeyProviderKind(StrEnum):
    """What keeps the key-encryption keys."""

    FILE_RING = "file_ring"
    VAULT_TRANSIT = "vault_transit"
    AWS_KMS = "aws_kms"


class ServiceSettings(BaseSettings):
    """Frozen; an unknown name, from the environment or a caller, is refused."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True
    )

    # Where things lie.
    state_directory: Path = Path("state")
    """Holds what the settings below do not place elsewhere."""
    database_url: Annotated[str, Field(repr=False)] = ""
    """Empty: SQLite in the state directory. Else `postgresql+asyncpg://...`."""
    key_directory: Path | None = None
    """KEK ring and signing keys, 0700. None: `keys` in the state directory."""
    journal_directory: Path | None = None
    """Signed log entries outside the database. None: `journal` in the state directory."""
    accept_lost_journal: bool = False
    """Write an empty journal anew from the database, which is then believed. For one start."""

    # Where key-encryption keys are kept.
    key_provider: KeyProviderKind = KeyProviderKind.FILE_RING
    """The file ring in the key directory, Vault's Transit engine, or AWS KMS."""
    key_prefix: Prefix = "strongroom"
    """What the names of its keys begin with in Vault or KMS."""
    key_ca_file: Path | None = None
    """The authority of Vault's or KMS's certificate; None: the system's."""
    key_call_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """One call to Vault or KMS."""
    vault_address: str = ""
    """`https://...`; plain HTTP only on this machine."""
    vault_token_file: Path | None = None
    """A file (0600) with the token, as a Vault agent writes it; read again when it is refused."""
    vault_mount: Prefix = "transit"
    vault_namespace: str = ""
    kms_region: str = ""
    kms_endpoint: str = ""
    """Empty: the region's own."""

    # Where it listens.
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8420
    tls_certificate: Path | None = None
    """PEM, with its chain. None: plain HTTP, which is for loopback."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """Authorities of client certificates; with it nobody connects without one."""
    tls_version_min: Literal["1.2", "1.3"] = "1.3"
    tls_reload_s: Seconds = 60.0
    """How often the files are looked at for a change."""
    listen_beyond_loopback_in_plain_http: bool = False
    """Anybody on the way can then read tokens and keys: for a TLS proxy in front, and only that."""

    # Who it is.
    issuer: Annotated[str, Field(min_length=1, max_length=128)] = "strongroom"
    """`iss` of grants, leases and tokens."""
    identity_providers_file: Path | None = None
    """TOML: whose tokens are believed besides our own (`service.auth.providers`)."""

    # Limits.
    principal_requests_per_min: Annotated[int, Field(ge=1, le=10_000_000)] = 60_000
    """Of one principal of one tenant, whatever tokens it has; counted by each process."""
    tenant_requests_per_min: Annotated[int, Field(ge=1, le=10_000_000)] = 300_000
    sidecar_requests_per_min: Annotated[int, Field(ge=1, le=10_000_000)] = 60_000
    enrolments_per_min: Annotated[int, Field(ge=1, le=10_000_000)] = 600
    """Of one client address, good or bad."""
    rate_windows_max: Annotated[int, Field(ge=1, le=10_000_000)] = 65_536
    """Principals, tenants, sidecars and addresses whose requests are remembered at once."""
    body_bytes_max: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024)] = 4 * 1024 * 1024
    page_items_max: Annotated[int, Field(ge=1, le=1000)] = 200
    grant_life_s: Annotated[int, Field(gt=0, le=GRANT_LIFE_S_MAX)] = GRANT_LIFE_S_MAX
    token_life_s_max: Annotated[int, Field(gt=0, le=30 * 24 * 3600)] = 24 * 3600
    token_skew_s: Annotated[int, Field(ge=0, le=300)] = 30
    """How far in the future a token's `iat` may lie."""
    policies_max: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Tenants whose policies are kept in memory; the others are built when they are asked for."""
    policies_bytes_max: Annotated[int, Field(ge=1024 * 1024)] = 512 * 1024 * 1024
    """Memory for them, estimated."""

    # Leases and the log.
    serving_lease_s: Annotated[float, Field(gt=0, le=300)] = SERVING_LEASE_S_DEFAULT
    key_lease_s: Annotated[float, Field(gt=0, le=3600)] = KEY_LEASE_S_DEFAULT
    stream_heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    log_behind_max: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """A sidecar that is more entries behind is told to start afresh instead of reading them."""
    join_token_life_s: Seconds = 3600.0

    # The audit.
    audit_heads_directory: Path | None = None
    """Signed heads of the audit tree, never written over. None: `audit-heads` in the state
    directory; better on another machine's disk."""
    audit_heads_url: str = ""
    """`s3://bucket/prefix`, where they are kept too. Credentials come from the environment."""
    audit_heads_endpoint: str = ""
    """Of an object store that is not AWS."""
    audit_head_every_s: Seconds = 300.0
    audit_retention_days: Annotated[int, Field(ge=1, le=36500)] | None = None
    """Events older than this are purged unless a legal hold covers them. None: never."""
    audit_upkeep_s: Seconds = 3600.0
    """How often partitions are made ahead and what is past its retention is purged."""

    # Revocation and erasure.
    revocation_check_s: Seconds = 5.0
    """How often each process looks for scheduled revocations that another one left."""
    erasure_final_s: Seconds = float(ERASURE_FINAL_S_DEFAULT)
    """How long after a destruction the KEK version that wrapped the secret may still live."""
    rotation_check_s: Seconds = 60.0
    """How often the service looks for KEK versions that are due."""
    key_uses_kept_s: Annotated[float, Field(gt=0, le=3660 * 24 * 3600)] = 400.0 * 24 * 3600
    """How long the key-use log keeps an entry."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self

    @property
    def database(self) -> str:
        """The database URL in force."""
        return self.database_url or f"sqlite+aiosqlite:///{self.state_directory / 'strongroom.db'}"

    @property
    def keys(self) -> Path:
        """The key directory in force."""
        return self.key_directory or self.state_directory / "keys"

    @property
    def audit_heads(self) -> Path:
        """The folder of audit heads in force."""
        return self.audit_heads_directory or self.state_directory / "audit-heads"

    @property
    def journal(self) -> Path:
        """The journal directory in force."""
        return self.journal_directory or self.state_directory / "journal"


def read_settings(environment: Mapping[str, str] | None = None, **values: Any) -> ServiceSettings:
    """The settings from `values` and the environment; `values` win.

    Raises `Misuse` naming the first setting that is unknown or out of bounds.
    """
    environment = os.environ if environment is None else environment  # noqa: TID251
    for name in environment:
        setting = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and setting not in ServiceSettings.model_fields:
            raise Misuse(f"there is no setting {name}", field=name)
    given = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX)
    }
    try:
        return ServiceSettings(**{**given, **values})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise Misuse(f"setting {field}: {first['msg']}", field=field) from None
