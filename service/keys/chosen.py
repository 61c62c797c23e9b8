"""Which key provider the settings name, and what it needs of them."""

from __future__ import annotations

import ipaddress
from typing import assert_never
from urllib.parse import urlsplit

from service.keys.aws_kms import AwsKms, KmsPlace
from service.keys.provider import KeyProvider
from service.keys.ring import LocalFileRing
from service.keys.transit import TransitPlace, VaultTransit
from service.settings import KeyProviderKind, ServiceSettings
from strongroom.errors import Misuse


def open_provider(settings: ServiceSettings) -> KeyProvider:
    """The provider, not yet asked anything. Raises `Misuse`, naming the setting that it lacks."""
    match settings.key_provider:
        case KeyProviderKind.FILE_RING:
            return LocalFileRing.open(settings.keys)
        case KeyProviderKind.VAULT_TRANSIT:
            return VaultTransit(_transit(settings))
        case KeyProviderKind.AWS_KMS:
            return AwsKms(_kms(settings))
        case _:
            assert_never(settings.key_provider)


def _transit(settings: ServiceSettings) -> TransitPlace:
    if settings.vault_token_file is None:
        raise Misuse("Vault needs a file with its token", field="vault_token_file")
    return TransitPlace(
        address=_encrypted(settings.vault_address, "vault_address"),
        token_file=settings.vault_token_file,
        mount=settings.vault_mount,
        prefix=settings.key_prefix,
        namespace=settings.vault_namespace or None,
        ca_file=settings.key_ca_file,
        timeout_s=settings.key_call_timeout_s,
    )


def _kms(settings: ServiceSettings) -> KmsPlace:
    if not settings.kms_region:
        raise Misuse("KMS needs its region", field="kms_region")
    endpoint = settings.kms_endpoint
    return KmsPlace(
        region=settings.kms_region,
        prefix=settings.key_prefix,
        endpoint=_encrypted(endpoint, "kms_endpoint") if endpoint else None,
        ca_file=None if settings.key_ca_file is None else str(settings.key_ca_file),
        timeout_s=settings.key_call_timeout_s,
    )


def _encrypted(url: str, field: str) -> str:
    """`url`, if what is sent there is encrypted on its way or stays on this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.username or parts.password:
        raise Misuse("a URL holds no password here", field=field)
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and loopback)):
        raise Misuse("secrets are sent there: it needs an https:// URL", field=field)
    return url
