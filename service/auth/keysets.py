"""The public keys of one identity provider, fetched over HTTP and kept for a while.

Rules:
- Keys come from where the settings say, never from where a token says: `jku`, `x5u`, `jwk` and
  `x5c` in a header are not looked at.
- A key is found by its `kid` and the algorithm that it is for. A key of another type, use or
  algorithm, a weak one, and every one of several with the same `kid`, is not there.
- Fetched again when they are not fresh any more, and when a token names a `kid` that is not
  known, but never oftener than `refetch_s`, and once for all who wait. So whoever sends
  made-up key ids makes the service ask the provider once in that time.
- While the provider does not answer, the keys of before are used until they are stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from policy.signing import decode_base64url
from service.auth.providers import Algorithm, Provider, check_url
from strongroom.clock import Clock
from strongroom.errors import Misuse, Unavailable

DOCUMENT_BYTES_MAX: Final = 256 * 1024
KEYS_MAX: Final = 64
FETCH_S: Final = 5.0
_DISCOVERY: Final = "/.well-known/openid-configuration"
_RSA_BITS: Final = range(2048, 8193)
_NS: Final = 1_000_000_000
_log = logging.getLogger("strongroom.service")

Key = RSAKey | ECKey | OKPKey


@dataclass(frozen=True, slots=True)
class _Fetched:
    keys: Mapping[tuple[str, Algorithm], Key]
    at_ns: int


class KeySet:
    """The keys of one provider; used from the event loop only. `close` ends its client."""

    def __init__(self, provider: Provider, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self._http = _client(provider)
        self._fetching = asyncio.Lock()
        """Guards the two below; held while the provider is asked."""
        self._fetched: _Fetched | None = None
        self._asked_ns: int | None = None

    async def find(self, kid: str, algorithm: Algorithm) -> Key | None:
        """The key, or None. Raises `Unavailable` when there are no keys to look among."""
        fetched = self._fetched
        if fetched is not None and self._age_s(fetched) < self._provider.keys_fresh_s:
            key = fetched.keys.get((kid, algorithm))
            if key is not None:
                return key
        await self._fetch_again()
        fetched = self._fetched
        if fetched is None or self._age_s(fetched) >= (
            self._provider.keys_fresh_s + self._provider.keys_stale_s
        ):
            raise Unavailable("the identity provider does not answer")
        return fetched.keys.get((kid, algorithm))

    async def close(self) -> None:
        """Close the connections to the provider."""
        await self._http.aclose()

    def _age_s(self, fetched: _Fetched) -> float:
        return (self._clock() - fetched.at_ns) / _NS

    async def _fetch_again(self) -> None:
        async with self._fetching:
            now_ns = self._clock()
            asked_ns = self._asked_ns
            if asked_ns is not None and now_ns - asked_ns < self._provider.refetch_s * _NS:
                return
            self._asked_ns = now_ns
            try:
                async with asyncio.timeout(FETCH_S):
                    keys = usable_keys(await self._document(await self._url()))
            except asyncio.CancelledError:
                self._asked_ns = asked_ns  # whoever waits behind may ask
                raise
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, OSError) as error:
                _log.warning("no keys from %s: %s", self._provider.issuer, type(error).__name__)
                return
            except (Misuse, msgspec.DecodeError) as error:
                _log.warning("unusable keys from %s: %s", self._provider.issuer, error)
                return
            self._fetched = _Fetched(keys, now_ns)

    async def _url(self) -> str:
        provider = self._provider
        if provider.jwks_url is not None:
            return provider.jwks_url
        found = await self._document(provider.issuer.rstrip("/") + _DISCOVERY)
        # OpenID Connect Discovery 4.3: or one provider could pass another's keys off as its own.
        if found.get("issuer") != provider.issuer:
            raise Misuse("the discovery document is another issuer's")
        url = check_url(str(found.get("jwks_uri")))
        if provider.issuer.startswith("https:") and not url.startswith("https:"):
            raise Misuse("the discovery document leads away from https")
        return url

    async def _document(self, url: str) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if self._provider.bearer_token_file is not None:
            token = await asyncio.to_thread(self._provider.bearer_token_file.read_text)
            headers["Authorization"] = f"Bearer {token.strip()}"
        body = bytearray()
        async with self._http.stream("GET", url, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise Misuse(f"answered {response.status_code}")
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > DOCUMENT_BYTES_MAX:
                    raise Misuse("too long an answer", limit=DOCUMENT_BYTES_MAX)
        return msgspec.json.decode(bytes(body), type=dict[str, Any])


def _client(provider: Provider) -> httpx.AsyncClient:
    context = ssl.create_default_context(
        cafile=None if provider.ca_file is None else str(provider.ca_file)
    )
    # No redirects and no proxy from the environment: keys come from where the settings say.
    return httpx.AsyncClient(
        verify=context, timeout=FETCH_S, follow_redirects=False, trust_env=False
    )


def usable_keys(document: Mapping[str, Any]) -> dict[tuple[str, Algorithm], Key]:
    """The keys of a JWK Set that may verify a token. Raises `Misuse` for what is no set."""
    listed = document.get("keys")
    if not isinstance(listed, list) or len(listed) > KEYS_MAX:
        raise Misuse("no set of keys", field="keys", limit=KEYS_MAX)
    found: dict[tuple[str, Algorithm], Key] = {}
    ids: Counter[object] = Counter()
    for jwk in listed:
        if not isinstance(jwk, dict):
            continue
        kid = jwk.get("kid")
        if not isinstance(kid, str) or not kid:
            continue
        ids[kid] += 1
        with contextlib.suppress(JoseError, ValueError, KeyError, TypeError, Misuse):
            parsed = _parse(jwk)
            if parsed is not None:
                found[kid, parsed[0]] = parsed[1]
    return {(kid, algorithm): key for (kid, algorithm), key in found.items() if ids[kid] == 1}


def _parse(jwk: dict[str, Any]) -> tuple[Algorithm, Key] | None:
    """The key and what it is for; public members alone are taken."""
    if jwk.get("use", "sig") != "sig" or "verify" not in jwk.get("key_ops", ["verify"]):
        return None
    said = jwk.get("alg")
    match jwk.get("kty"), jwk.get("crv"):
        case "RSA", _ if said in (None, Algorithm.RS256):
            if 8 * len(decode_base64url(jwk["n"], "n")) in _RSA_BITS:
                members = {name: jwk[name] for name in ("kty", "n", "e")}
                return Algorithm.RS256, RSAKey.import_key(members)
        case "EC", "P-256" if said in (None, Algorithm.ES256):
            members = {name: jwk[name] for name in ("kty", "crv", "x", "y")}
            return Algorithm.ES256, ECKey.import_key(members)
        case "OKP", "Ed25519" if said in (None, Algorithm.EDDSA, "Ed25519"):
            members = {name: jwk[name] for name in ("kty", "crv", "x")}
            return Algorithm.EDDSA, OKPKey.import_key(members)
    return None
