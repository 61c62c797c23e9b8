"""A real identity provider: discovery and keys over HTTP, and tokens that it signs."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey

AUDIENCE = "strongroom"
Key = RSAKey | ECKey | OKPKey


def new_key(algorithm: str, kid: str) -> Key:
    """A signing key of a provider."""
    named: Any = {"kid": kid, "use": "sig"}
    match algorithm:
        case "RS256":
            return RSAKey.generate_key(2048, named)
        case "ES256":
            return ECKey.generate_key("P-256", named)
        case _:
            return OKPKey.generate_key("Ed25519", named)


class Provider:
    """What the provider publishes, and how often it was asked. `url` is its issuer."""

    def __init__(self, algorithm: str = "ES256") -> None:
        self.url = ""
        self.algorithm = algorithm
        self.key = new_key(algorithm, "key-1")
        self.published: list[Any] = [self.key.as_dict(private=False)]
        self.asked: list[tuple[str, str]] = []
        """Path and Authorization of each request."""
        self.away = False
        self.discovery: dict[str, Any] = {}
        """Replaces members of the discovery document."""
        self.body: bytes | None = None
        """Replaces the set of keys."""

    def rotate(self, kid: str) -> Key:
        """Sign with a new key from now on, and publish that one alone."""
        self.key = new_key(self.algorithm, kid)
        self.published = [self.key.as_dict(private=False)]
        return self.key

    def sign(
        self,
        claims: dict[str, Any],
        *,
        key: Key | None = None,
        kid: str | None = None,
        algorithm: str | None = None,
        **header: Any,
    ) -> str:
        """A JWT. `header` may add members, and a None takes one away."""
        algorithm = algorithm or self.algorithm
        key = key or self.key
        members = {"alg": algorithm, "typ": "at+jwt", "kid": kid or key.kid, **header}
        kept = {name: value for name, value in members.items() if value is not None}
        registry = jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "EdDSA" is an old name
            return jws.serialize_compact(kept, json.dumps(claims).encode(), key, registry=registry)

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Those of a good token of alice, who is an operator; None takes one away."""
        moment = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "alice",
            "iat": moment,
            "exp": moment + 300,
            "groups": ["staff", "kv-operators"],
            **changed,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, **changed: Any) -> str:
        return self.sign(self.claims(**changed))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        del receive
        headers = dict(scope["headers"])
        self.asked.append((scope["path"], headers.get(b"authorization", b"").decode()))
        status, body = 200, b"{}"
        if self.away:
            status = 500
        elif scope["path"] == "/.well-known/openid-configuration":
            document = {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.discovery}
            body = json.dumps(document).encode()
        elif scope["path"] == "/keys":
            body = self.body or json.dumps({"keys": self.published}).encode()
        else:
            status = 404
        answer = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": body})

    def asked_for(self, path: str) -> int:
        return sum(1 for asked, _ in self.asked if asked == path)


@asynccontextmanager
async def listening(provider: Provider) -> AsyncIterator[Provider]:
    """`provider` on a port of loopback."""
    import socket

    config = uvicorn.Config(provider, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        provider.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve([listener]))
            try:
                yield provider
            finally:
                server.should_exit = True
                await serving


def provider_file(path: Path, provider: Provider, bindings: str, **more: Any) -> Path:
    """A settings file that believes `provider`."""
    settings = {"issuer": provider.url, "audience": AUDIENCE, "algorithms": [provider.algorithm]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**settings, **more}.items()]
    path.write_text("[[oidc]]\n" + "\n".join(lines) + "\n" + bindings)
    return path


OPERATORS = """
[[oidc.bindings]]
claim = "groups"
value = "kv-operators"
roles = ["operator"]
"""
