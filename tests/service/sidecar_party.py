"""A sidecar as the service meets it: its keys, its proofs, and what it opens."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import asdict
from typing import Any

import httpx
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from policy.signing import Signer, Verifier, decode_base64url, encode_base64url
from service.sidecars.sealing import SUITE
from strongroom.canonical import canonical_json
from strongroom.control import (
    SIDECAR_PREFIX,
    EnrolAnswer,
    KeyLeaseClaims,
    LogPage,
    ProofClaims,
    ServingLeaseClaims,
    SpoolEvent,
    Typ,
)
from strongroom.log import LogEntry
from tests.service.house import Service


class SidecarParty:
    """One sidecar, before and after it has enrolled."""

    def __init__(self, http: httpx.AsyncClient, name: str = "node-1") -> None:
        self.http = http
        self.name = name
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.hpke = X25519PrivateKey.generate()
        self.id = ""
        self.epoch = ""
        self.verifier = Verifier({})

    async def enrol(self, join_token: str) -> httpx.Response:
        response = await self.http.post("/v1/sidecars", json=self.enrolment(join_token))
        if response.is_success:
            answer = msgspec.json.decode(response.content, type=EnrolAnswer)
            self.id, self.epoch = answer.sidecar, answer.epoch
            self.verifier = Verifier(
                {kid: decode_base64url(key, "key") for kid, key in answer.service_keys.items()}
            )
        return response

    def enrolment(self, join_token: str) -> dict[str, str]:
        return {
            "join_token": join_token,
            "name": self.name,
            "signing_key": encode_base64url(self.signer.public_key),
            "hpke_key": encode_base64url(self.hpke.public_key().public_bytes_raw()),
        }

    def key_change(self, follower: SidecarParty, **changed: Any) -> dict[str, str]:
        """The request that puts the keys of `follower` in force for this sidecar."""
        claims = {
            "sidecar": self.id,
            "replaces": encode_base64url(self.signer.public_key),
            "signing_key": encode_base64url(follower.signer.public_key),
            "hpke_key": encode_base64url(follower.hpke.public_key().public_bytes_raw()),
        }
        possession = follower.signer.sign(Typ.KEY_CHANGE, canonical_json(claims | changed))
        keys = {name: claims[name] for name in ("signing_key", "hpke_key")}
        return keys | {"possession": possession}

    def with_new_keys(self) -> SidecarParty:
        """The same sidecar, with keys that nobody knows yet."""
        follower = SidecarParty(self.http, self.name)
        follower.id, follower.epoch, follower.verifier = self.id, self.epoch, self.verifier
        return follower

    def proof(self, method: str, path: str, body: bytes, **changed: Any) -> str:
        claims = ProofClaims(
            sidecar=self.id,
            method=method,
            path=path,
            body_sha256=hashlib.sha256(body).hexdigest(),
            nonce=secrets.token_urlsafe(16),
            iat=int(time.time()),
        )
        return self.signer.sign(Typ.PROOF, canonical_json(asdict(claims) | changed))

    async def send(
        self, method: str, path: str, body: Any = None, *, proof: str | None = None
    ) -> httpx.Response:
        raw = b"" if body is None else msgspec.json.encode(body)
        target = SIDECAR_PREFIX + path
        signed = proof or self.proof(method, target, raw)
        headers = {"Authorization": f"Sidecar {signed}", "Content-Type": "application/json"}
        return await self.http.request(method, target, content=raw, headers=headers)

    async def serving_lease(self, epoch: str = "", seq: int = 0) -> ServingLeaseClaims:
        nonce = secrets.token_urlsafe(16)
        response = await self.send(
            "POST", "/serving-lease", {"nonce": nonce, "epoch": epoch, "seq": seq}
        )
        assert response.status_code == 200, response.text
        payload = self.verifier.verify(Typ.SERVING_LEASE, response.json()["jws"])
        claims = msgspec.json.decode(payload, type=ServingLeaseClaims)
        assert claims.nonce == nonce
        return claims

    async def key_lease(self, grant: str) -> httpx.Response:
        return await self.send(
            "POST", "/key-lease", {"grant": grant, "nonce": secrets.token_urlsafe(16)}
        )

    def open_lease(self, response: httpx.Response) -> tuple[KeyLeaseClaims, list[bytes]]:
        payload = self.verifier.verify(Typ.KEY_LEASE, response.json()["jws"])
        claims = msgspec.json.decode(payload, type=KeyLeaseClaims)
        info = canonical_json(asdict(claims.info))
        plain = SUITE.decrypt(decode_base64url(claims.sealed, "sealed"), self.hpke, info)
        return claims, [plain[at : at + 32] for at in range(0, len(plain), 32)]

    async def log(self, after: int = 0, epoch: str = "") -> LogPage:
        response = await self.send("GET", f"/invalidations?epoch={epoch}&after={after}")
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=LogPage)

    async def entries(self, after: int = 0) -> list[LogEntry]:
        page = await self.log(after)
        return [
            msgspec.json.decode(self.verifier.verify(Typ.LOG, jws), type=LogEntry)
            for jws in page.entries
        ]

    async def ack(self, seq: int, state: str = "fenced", **counts: int) -> httpx.Response:
        head = await self.log()
        return await self.send(
            "POST", "/acks", {"epoch": head.epoch, "seq": seq, "state": state, **counts}
        )

    async def ship(self, spool: str, events: list[SpoolEvent]) -> httpx.Response:
        return await self.send("POST", "/audit", {"spool": spool, "events": events})


async def enrolled(service: Service, *tenants: str, name: str = "node-1") -> SidecarParty:
    """A sidecar that may serve `tenants`; none: every one."""
    answer = await service.operator.post("/v1/sidecars/join-tokens", {"tenants": list(tenants)})
    party = SidecarParty(service.http, name)
    response = await party.enrol(answer["join_token"])
    assert response.status_code == 201, response.text
    return party
