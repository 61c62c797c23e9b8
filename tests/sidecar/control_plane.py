"""A FAKE control plane, for tests only: `strongroom.control` over an in-process httpx transport.

It signs with the real `policy.signing` and `policy.grants`, derives with the real derivation and
seals with real HPKE, so that the sidecar under test meets real messages. It has no database, no
policy and no HTTP server; the tests against the real service are in `test_with_service.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from urllib.parse import parse_qs

import httpx
import msgspec
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from policy import grants
from policy.signing import Signer, Verifier, decode_base64url, encode_base64url, key_id
from strongroom import control
from strongroom.blocks import pack_tokens, prompt_digest
from strongroom.canonical import canonical_json
from strongroom.derivation import engine_salt, namespace_secret, salt_digest
from strongroom.grant import (
    GRANT_AUDIENCE,
    EngineDigests,
    GrantClaims,
    GrantedSpan,
    Operation,
)
from strongroom.identity import (
    CacheIdentity,
    ComponentId,
    LabelSet,
    NamespaceId,
    new_component_id,
)
from strongroom.log import InvalidationKind, LogEntry, LogHead, genesis

ISSUER = "fake-control-plane"
SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
MODEL = hashlib.sha256(b"model").hexdigest()
TOKENIZER = hashlib.sha256(b"tokenizer").hexdigest()
TEMPLATE = hashlib.sha256(b"template").hexdigest()


@dataclass(frozen=True)
class Tenant:
    """A tenant with its artefacts."""

    id: ComponentId
    model: ComponentId
    tokenizer: ComponentId
    template: ComponentId
    policy: ComponentId
    everyone: ComponentId


@dataclass
class Granted:
    """What a gateway would hand to the engine."""

    token: str
    salt: str
    claims: GrantClaims
    prompt: list[int]
    namespaces: list[NamespaceId] = field(default_factory=list)


class FakeControlPlane(httpx.AsyncBaseTransport):
    """The transport is the control plane. `away` makes it unreachable."""

    def __init__(self, *, lease_ms: int = 5000, key_lease_ms: int = 60_000) -> None:
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.lease_ms = lease_ms
        self.key_lease_ms = key_lease_ms
        self.away = False
        self.stream_held = False
        self.epoch = secrets.token_hex(8)
        self.entries: list[str] = []
        self.head = LogHead(self.epoch, 0, genesis(self.epoch))
        self.secrets: dict[ComponentId, bytes] = {}
        self.components: dict[NamespaceId, tuple[ComponentId, ...]] = {}
        self.join_tokens = {"join-me"}
        self.sidecars: dict[str, tuple[Verifier, X25519PublicKey]] = {}
        self.tenants: list[str] = []
        self.acks: list[control.AckRequest] = []
        self.events: list[control.SpoolEvent] = []
        self.residency: list[control.ResidencyAmount] = []
        self.spools: dict[str, int] = {}
        self.calls: list[str] = []
        self.news = asyncio.Event()
        self.acked = asyncio.Event()
        self.nonces: set[str] = set()
        self.before_key_lease: asyncio.Event | None = None
        self.key_lease_waiting = asyncio.Event()
        self.append(InvalidationKind.EPOCH)

    # What an administrator does

    def component(self) -> ComponentId:
        name = new_component_id()
        self.secrets[name] = secrets.token_bytes(32)
        return name

    def tenant(self) -> Tenant:
        return Tenant(*(self.component() for _ in range(6)))

    def append(self, kind: InvalidationKind, **fields: object) -> LogEntry:
        for name in fields.get("components", ()):  # type: ignore[attr-defined]
            self.secrets.pop(name, None)
        entry = LogEntry(
            epoch=self.epoch,
            seq=self.head.seq + 1,
            prev=self.head.hash,
            at="2026-01-01T00:00:00.000000Z",
            kind=kind,
            **fields,  # type: ignore[arg-type]
        )
        self.push(entry)
        return entry

    def push(self, entry: LogEntry) -> None:
        self.entries.append(self.signer.sign(control.Typ.LOG, entry.payload()))
        self.head = LogHead(entry.epoch, entry.seq, entry.hash())
        self._announce()

    def revoke(self, *components: ComponentId) -> LogEntry:
        return self.append(InvalidationKind.COMPONENTS, components=components)

    def renew_epoch(self) -> None:
        self.epoch = secrets.token_hex(8)
        self.entries = []
        self.head = LogHead(self.epoch, 0, genesis(self.epoch))
        self.append(InvalidationKind.EPOCH)

    def grant(
        self,
        tenant: Tenant,
        prompt: Sequence[int],
        spans: Sequence[tuple[int, Sequence[ComponentId], Sequence[ComponentId]]] | None = None,
        **changes: object,
    ) -> Granted:
        """A grant for `prompt`; spans are (end, documents, groups) and default to `everyone`."""
        prompt = list(prompt)
        spans = [(len(prompt), (), (tenant.everyone,))] if spans is None else spans
        base = (tenant.id, tenant.model, tenant.tokenizer, tenant.template, tenant.policy)
        documents: frozenset[ComponentId] = frozenset()
        groups: frozenset[ComponentId] = frozenset()
        granted, namespaces = [], []
        for end, more_documents, more_groups in spans:
            adds = (set(more_documents) | set(more_groups)) - documents - groups
            documents |= frozenset(more_documents)
            groups |= frozenset(more_groups)
            identity = CacheIdentity(
                tenant.id, tenant.model, "none", tenant.tokenizer, tenant.template,
                tenant.policy, LabelSet(documents, groups),
            )  # fmt: skip
            self.components[identity.namespace] = identity.components()
            granted.append(GrantedSpan(end, identity.namespace, tuple(sorted(adds))))
            namespaces.append(identity.namespace)
        whole = bool(spans) and spans[-1][0] == len(prompt)
        salt = secrets.token_urlsafe(32)
        if whole and all(name in self.secrets for name in self.components[namespaces[-1]]):
            salt = engine_salt(self.secret(namespaces[-1]))
        now = int(time.time())
        claims = GrantClaims(
            iss=ISSUER,
            aud=GRANT_AUDIENCE,
            jti=secrets.token_hex(8),
            tenant=tenant.id,
            sub="alice",
            iat=now,
            exp=now + 300,
            ops=(Operation.READ, Operation.WRITE),
            base=base,
            spans=tuple(granted),
            prompt_tokens=len(prompt),
            prompt_digest=prompt_digest(pack_tokens(prompt)).hex(),
            engine=EngineDigests(MODEL, "none", TOKENIZER, TEMPLATE),
            salt_digest=salt_digest(salt),
            revision=1,
            epoch=self.epoch,
            seq=self.head.seq,
        )
        claims = msgspec.structs.replace(claims, **changes)
        return Granted(grants.mint(claims, self.signer), salt, claims, prompt, namespaces)

    def secret(self, namespace: NamespaceId) -> bytes:
        parts = [self.secrets[name] for name in self.components[namespace]]
        return namespace_secret(parts, bytes.fromhex(namespace))

    async def until_acked(self, state: str, seq: int) -> control.AckRequest:
        while True:
            for ack in self.acks:
                if ack.state == state and ack.seq >= seq and ack.epoch == self.epoch:
                    return ack
            self.acked.clear()
            await self.acked.wait()

    # The transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("away", request=request)
        body = await request.aread()
        path = request.url.path
        self.calls.append(path)
        if path == "/v1/sidecars":
            return self._enrol(body)
        sidecar = self._authenticate(request, body)
        if sidecar is None:
            return httpx.Response(401)
        match path.removeprefix(control.SIDECAR_PREFIX):
            case "/serving-lease":
                return self._serving_lease(sidecar, body)
            case "/key-lease":
                return await self._key_lease(sidecar, body)
            case "/invalidations":
                return self._page(request)
            case "/invalidations/stream":
                return self._stream(request)
            case "/acks":
                self.acks.append(msgspec.json.decode(body, type=control.AckRequest))
                self.acked.set()
                return httpx.Response(204)
            case "/liveness":
                return self._liveness(body)
            case "/residency":
                report = msgspec.json.decode(body, type=control.ResidencyRequest)
                self.residency += report.amounts
                return _json(control.ResidencyReceipt(restart=False))
            case "/audit":
                return self._intake(body)
            case _:
                return httpx.Response(404)

    def _enrol(self, body: bytes) -> httpx.Response:
        asked = msgspec.json.decode(body, type=control.EnrolRequest)
        if asked.join_token not in self.join_tokens:
            return httpx.Response(403)
        self.join_tokens.discard(asked.join_token)
        signing = decode_base64url(asked.signing_key, "signing_key")
        box = X25519PublicKey.from_public_bytes(decode_base64url(asked.hpke_key, "hpke_key"))
        name = secrets.token_hex(16)
        self.sidecars[name] = (Verifier({key_id(signing): signing}), box)
        return _json(
            control.EnrolAnswer(
                sidecar=name,
                issuer=ISSUER,
                service_keys={self.signer.kid: encode_base64url(self.signer.public_key)},
                epoch=self.epoch,
                tenants=self.tenants,
            )
        )

    def _authenticate(self, request: httpx.Request, body: bytes) -> str | None:
        scheme, _, proof = request.headers["Authorization"].partition(" ")
        assert scheme == "Sidecar"
        for name, (verifier, _) in self.sidecars.items():
            payload = verifier.verify(control.Typ.PROOF, proof)
            claims = msgspec.json.decode(payload, type=control.ProofClaims)
            target = request.url.raw_path.decode()
            if (
                claims.sidecar == name
                and claims.method == request.method
                and claims.path == target
                and claims.body_sha256 == hashlib.sha256(body).hexdigest()
                and claims.nonce not in self.nonces
            ):
                self.nonces.add(claims.nonce)
                return name
        return None

    def _serving_lease(self, sidecar: str, body: bytes) -> httpx.Response:
        asked = msgspec.json.decode(body, type=control.ServingLeaseRequest)
        claims = control.ServingLeaseClaims(
            sidecar, asked.nonce, self.head.epoch, self.head.seq, self.head.hash, self.lease_ms
        )
        return self._signed(control.Typ.SERVING_LEASE, claims, control.ServingLeaseAnswer)

    async def _key_lease(self, sidecar: str, body: bytes) -> httpx.Response:
        asked = msgspec.json.decode(body, type=control.KeyLeaseRequest)
        claims = grants.verify(
            asked.grant,
            Verifier({self.signer.kid: self.signer.public_key}),
            now_s=int(time.time()),
            issuer=ISSUER,
        )
        namespaces = list(dict.fromkeys(span.namespace for span in claims.spans))
        parts = [self.components[name] for name in namespaces]
        if any(part not in self.secrets for group in parts for part in group):
            return httpx.Response(403)
        info = control.KeyLeaseInfo(
            sidecar, asked.nonce, self.head.epoch, self.head.seq, self.key_lease_ms,
            [
                control.LeasedNamespace(name, list(group))
                for name, group in zip(namespaces, parts, strict=True)
            ],
        )  # fmt: skip
        sealed = SUITE.encrypt(
            b"".join(self.secret(name) for name in namespaces),
            self.sidecars[sidecar][1],
            canonical_json(asdict(info)),
        )
        if self.before_key_lease is not None:
            self.key_lease_waiting.set()
            await self.before_key_lease.wait()
        answer = control.KeyLeaseClaims(info, encode_base64url(sealed))
        return self._signed(control.Typ.KEY_LEASE, answer, control.KeyLeaseAnswer)

    def _page(self, request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.url.query.decode())
        after = int(query["after"][0])
        if query["epoch"] != [self.epoch]:
            return _json(control.LogPage(self.epoch, self.head.seq, [], restart=True))
        return _json(control.LogPage(self.epoch, self.head.seq, self.entries[after : after + 100]))

    def _stream(self, request: httpx.Request) -> httpx.Response:
        after = int(request.headers["Last-Event-ID"].rpartition(":")[2])
        return httpx.Response(200, stream=_Events(self, after))

    def _liveness(self, body: bytes) -> httpx.Response:
        asked = msgspec.json.decode(body, type=control.LivenessRequest)
        retired = [
            name
            for name in asked.namespaces
            if any(
                part not in self.secrets for part in self.components.get(NamespaceId(name), ("",))
            )
        ]
        return _json(control.LivenessAnswer(retired))

    def _intake(self, body: bytes) -> httpx.Response:
        asked = msgspec.json.decode(body, type=control.IntakeRequest)
        expected = self.spools.get(asked.spool, 1)
        for event in asked.events:
            if event.count == expected:
                self.events.append(event)
                expected += 1
        self.spools[asked.spool] = expected
        self._announce()
        return _json(control.IntakeAnswer(expected))

    def _signed(self, typ: str, claims: object, answer: type) -> httpx.Response:
        payload = canonical_json(json.loads(msgspec.json.encode(claims)))
        return _json(answer(self.signer.sign(typ, payload)))

    def _announce(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


class _Events(httpx.AsyncByteStream):
    """Server-sent events: every entry after `after`, and then as they come."""

    def __init__(self, plane: FakeControlPlane, after: int) -> None:
        self._plane = plane
        self._after = after

    async def __aiter__(self) -> AsyncIterator[bytes]:
        epoch = self._plane.epoch
        yield b": hello\n\n"
        while self._plane.epoch == epoch and not self._plane.away:
            while self._after < len(self._plane.entries) and not self._plane.stream_held:
                jws = self._plane.entries[self._after]
                self._after += 1
                yield f"id: {epoch}:{self._after}\nevent: entry\ndata: {jws}\n\n".encode()
            await self._plane.news.wait()


def _json(answer: object) -> httpx.Response:
    return httpx.Response(200, content=msgspec.json.encode(answer))
