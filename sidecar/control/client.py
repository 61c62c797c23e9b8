"""The sidecar's side of `strongroom.control`: enrolment, leases, log, liveness, intake.

Rules:
- Each call carries `Authorization: Sidecar <JWS>`, a proof over method, path, body digest and
  a nonce that is never used twice. `path` is the request target: path, and query if any.
- What the service signs is verified against the keys pinned at enrolment, and its nonce must
  be the one that was sent. Anything else is `Refused`.
- A service that cannot be reached, or answers with an error, is `Unavailable` or `Refused`;
  httpx's own exceptions never leave this module.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from policy.signing import Signer, Verifier, decode_base64url, encode_base64url
from sidecar.clocks import NS, Clocks
from sidecar.state import SidecarKeys
from strongroom.canonical import canonical_json
from strongroom.control import (
    SIDECAR_PREFIX,
    AckRequest,
    EnrolAnswer,
    EnrolRequest,
    IntakeAnswer,
    IntakeRequest,
    KeyChangeAnswer,
    KeyChangeClaims,
    KeyChangeRequest,
    KeyLeaseAnswer,
    KeyLeaseClaims,
    KeyLeaseInfo,
    KeyLeaseRequest,
    LivenessAnswer,
    LivenessRequest,
    LogPage,
    ProofClaims,
    ResidencyReceipt,
    ResidencyRequest,
    ServingLeaseAnswer,
    ServingLeaseClaims,
    ServingLeaseRequest,
    Typ,
)
from strongroom.derivation import SECRET_BYTES
from strongroom.errors import Misuse, Refused, StrongroomError, Unavailable
from strongroom.identity import NamespaceId

_NONCE_BYTES: Final = 16
_ENROL_PATH: Final = "/v1/sidecars"
STREAM_PATH: Final = f"{SIDECAR_PREFIX}/invalidations/stream"
_SUITE: Final = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
_Answer = TypeVar("_Answer")
_CLIENT_ERROR: Final = range(400, 500)
_RETRY_LATER: Final = frozenset((408, 425, 429))


@dataclass(frozen=True, slots=True)
class ServingLease:
    """A verified answer, and when its question was sent (boot clock)."""

    claims: ServingLeaseClaims
    sent_ns: int

    @property
    def deadline_ns(self) -> int:
        # DESIGN 6: the lease runs from the moment the question was sent.
        return self.sent_ns + self.claims.lease_ms * 1_000_000


@dataclass(frozen=True, slots=True, repr=False)
class LeasedKey:
    """One namespace's secret, as opened. The holder overwrites `secret`."""

    namespace: NamespaceId
    components: tuple[str, ...]
    secret: bytearray


@dataclass(frozen=True, slots=True, repr=False)
class KeyLease:
    """A verified and opened key lease."""

    info: KeyLeaseInfo
    keys: tuple[LeasedKey, ...]
    expires_ns: int


async def enrol(
    http: httpx.AsyncClient, *, join_token: str, name: str, keys: SidecarKeys
) -> EnrolAnswer:
    """Enrol with a one-time token; raises `Refused` for a spent one."""
    request = EnrolRequest(
        join_token=join_token,
        name=name,
        signing_key=encode_base64url(keys.signer.public_key),
        hpke_key=encode_base64url(keys.hpke_public),
    )
    body = msgspec.json.encode(request)
    answer = await _send(http, "POST", _ENROL_PATH, body, {})
    enrolled = _decode(answer, EnrolAnswer)
    pinned_keys(enrolled)
    return enrolled


def pinned_keys(enrolled: EnrolAnswer) -> Verifier:
    """The verifier over the keys that enrolment pinned."""
    return Verifier(
        {kid: decode_base64url(key, "service_keys") for kid, key in enrolled.service_keys.items()}
    )


class Turnstile:
    """Lets calls through side by side, and one that must be alone after all before it."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def through(self) -> AsyncGenerator[None, None]:
        """Wait for whoever is alone, then go on beside the others."""
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None, None]:
        """Wait until nobody is inside; until it ends nobody else gets in."""
        async with self._alone:
            self._open.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._open.set()


class ControlClient:
    """Speaks to the service as one enrolled sidecar."""

    def __init__(
        self, http: httpx.AsyncClient, enrolled: EnrolAnswer, keys: SidecarKeys, clocks: Clocks
    ) -> None:
        self.enrolled = enrolled
        self.verifier = pinned_keys(enrolled)
        self._http = http
        self._signer: Signer = keys.signer
        self._hpke: X25519PrivateKey = keys.hpke
        self._clocks = clocks
        self._turnstile = Turnstile()

    async def change_keys(self, new: SidecarKeys, *, proven_by_new: bool) -> None:
        """Have the service put `new` in force, and use them from its answer on.

        `proven_by_new`: they may be in force already; raises `Refused` if they are not. Raises
        `Unavailable` when the outcome is not known: ask again, by the new ones first.
        """
        async with self._turnstile.alone():
            claims = KeyChangeClaims(
                sidecar=self.enrolled.sidecar,
                replaces=encode_base64url(self._signer.public_key),
                signing_key=encode_base64url(new.signer.public_key),
                hpke_key=encode_base64url(new.hpke_public),
            )
            request = KeyChangeRequest(
                signing_key=claims.signing_key,
                hpke_key=claims.hpke_key,
                possession=new.signer.sign(Typ.KEY_CHANGE, canonical_json(asdict(claims))),
            )
            raw, target = msgspec.json.encode(request), f"{SIDECAR_PREFIX}/keys"
            signer = new.signer if proven_by_new else self._signer
            headers = self._headers("POST", target, raw, signer)
            answer = _decode(await _send(self._http, "POST", target, raw, headers), KeyChangeAnswer)
            if answer.kid != new.signer.kid:
                raise Refused("another key is in force")
            self._signer, self._hpke = new.signer, new.hpke

    async def serving_lease(self, epoch: str, seq: int) -> ServingLease:
        """Ask whether to go on serving; `epoch` and `seq` say how far the log is applied."""
        nonce = _nonce()
        sent_ns = self._clocks.boot()
        answer = await self._call(
            "POST",
            "/serving-lease",
            ServingLeaseRequest(nonce=nonce, epoch=epoch, seq=seq),
            ServingLeaseAnswer,
        )
        claims = self._claims(Typ.SERVING_LEASE, answer.jws, ServingLeaseClaims)
        self._expect(claims.sidecar, claims.nonce, nonce)
        if claims.lease_ms <= 0:
            raise Refused("a lease of no length")
        return ServingLease(claims, sent_ns)

    async def key_lease(self, grant: str) -> KeyLease:
        """The secrets of a grant's namespaces; raises `Refused` when one is not to be had."""
        nonce = _nonce()
        sent_ns = self._clocks.boot()
        answer = await self._call(
            "POST", "/key-lease", KeyLeaseRequest(grant=grant, nonce=nonce), KeyLeaseAnswer
        )
        claims = self._claims(Typ.KEY_LEASE, answer.jws, KeyLeaseClaims)
        info = claims.info
        self._expect(info.sidecar, info.nonce, nonce)
        opened = self._open(claims)
        try:
            if len(opened) != SECRET_BYTES * len(info.namespaces):
                raise Refused("the sealed secrets do not fit the namespaces")
            keys = tuple(
                LeasedKey(
                    NamespaceId(leased.namespace),
                    tuple(leased.components),
                    opened[index * SECRET_BYTES : (index + 1) * SECRET_BYTES],
                )
                for index, leased in enumerate(info.namespaces)
            )
        finally:
            opened[:] = bytes(len(opened))
        return KeyLease(info, keys, sent_ns + info.lease_ms * 1_000_000)

    async def log_page(self, epoch: str, after: int) -> LogPage:
        """Entries after `after`."""
        return await self._call("GET", f"/invalidations?epoch={epoch}&after={after}", None, LogPage)

    async def stream(self, epoch: str, after: int, silence_s: float) -> AsyncGenerator[str, None]:
        """Entries as they are committed, each a compact JWS; ends when the stream does.

        Heartbeats are comments, and keep it open; `silence_s` without any byte ends it.
        """
        target = f"{STREAM_PATH}?epoch={epoch}"
        headers = self._headers("GET", target, b"", self._signer) | {
            "Accept": "text/event-stream",
            "Last-Event-ID": f"{epoch}:{after}",
        }
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_s)
        try:
            async with self._http.stream(
                "GET", target, headers=headers, timeout=timeout
            ) as response:
                _check(response)
                data: list[str] = []
                async for line in response.aiter_lines():
                    if line == "event: restart":
                        return  # the epoch is over; the next serving lease says so, signed
                    if line.startswith("data:"):
                        data.append(line.removeprefix("data:").strip())
                    elif not line and data:
                        yield "\n".join(data)
                        data = []
        except httpx.HTTPError as error:
            raise Unavailable("the invalidation stream broke") from error

    async def acknowledge(self, ack: AckRequest) -> None:
        """Say what was done about the log up to a seq."""
        await self._call("POST", "/acks", ack, None)

    async def retired(self, namespaces: list[NamespaceId]) -> frozenset[NamespaceId]:
        """Which of `namespaces` can never be leased again."""
        answer = await self._call(
            "POST", "/liveness", LivenessRequest(list(namespaces)), LivenessAnswer
        )
        return frozenset(NamespaceId(name) for name in answer.retired)

    async def residency(self, report: ResidencyRequest) -> bool:
        """Say what lies on this node; True: begin anew, the service lacks what was said before."""
        answer = await self._call("POST", "/residency", report, ResidencyReceipt)
        return answer.restart

    async def intake(self, request: IntakeRequest) -> int:
        """Hand over a run of the spool; returns the first count that was not taken."""
        answer = await self._call("POST", "/audit", request, IntakeAnswer)
        return answer.next_count

    async def _call(
        self, method: str, path: str, body: object | None, kind: type[_Answer] | None
    ) -> _Answer:
        raw = b"" if body is None else msgspec.json.encode(body)
        target = SIDECAR_PREFIX + path
        async with self._turnstile.through():
            headers = self._headers(method, target, raw, self._signer)
            answer = await _send(self._http, method, target, raw, headers)
        # Only `acknowledge` passes no type, and it looks at no answer.
        return None if kind is None else _decode(answer, kind)  # type: ignore[return-value]

    def _headers(self, method: str, target: str, body: bytes, signer: Signer) -> dict[str, str]:
        claims = ProofClaims(
            sidecar=self.enrolled.sidecar,
            method=method,
            path=target,
            body_sha256=hashlib.sha256(body).hexdigest(),
            nonce=_nonce(),
            iat=self._clocks.now_s(),
        )
        proof = signer.sign(Typ.PROOF, canonical_json(asdict(claims)))
        return {"Authorization": f"Sidecar {proof}"}

    def _claims(self, typ: str, jws: str, kind: type[_Answer]) -> _Answer:
        return _decode(self.verifier.verify(typ, jws), kind)

    def _expect(self, sidecar: str, nonce: str, sent: str) -> None:
        if sidecar != self.enrolled.sidecar or not secrets.compare_digest(nonce, sent):
            raise Refused("the answer is for another sidecar or another question")

    def _open(self, claims: KeyLeaseClaims) -> bytearray:
        try:
            sealed = decode_base64url(claims.sealed, "sealed")
            info = canonical_json(asdict(claims.info))
            return bytearray(_SUITE.decrypt(sealed, self._hpke, info))
        except (InvalidTag, ValueError, StrongroomError) as error:
            raise Refused("the key lease does not open") from error


def _nonce() -> str:
    return secrets.token_urlsafe(_NONCE_BYTES)


async def _send(
    http: httpx.AsyncClient, method: str, target: str, body: bytes, headers: dict[str, str]
) -> bytes:
    try:
        response = await http.request(
            method, target, content=body, headers=headers | {"Content-Type": "application/json"}
        )
    except httpx.HTTPError as error:
        raise Unavailable("the control plane cannot be reached") from error
    _check(response)
    return response.content


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if status in _CLIENT_ERROR and status not in _RETRY_LATER:
        raise Refused(f"the control plane refused this ({status})")
    if not response.is_success:
        raise Unavailable(f"the control plane answered {status}")


def _decode(raw: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, Misuse) as error:
        raise Refused("the control plane's answer cannot be understood") from error


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom to believe that it is the service, and what to show it. None: the system's; nothing."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises `Misuse` for files that do not work."""
        try:
            context = ssl.create_default_context(
                cafile=None if self.ca_file is None else str(self.ca_file)
            )
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ValueError) as error:
            raise Misuse("the TLS files do not work", field="service_ca_file") from error
        return context


def http_client(
    url: str,
    timeout_s: float,
    transport: httpx.AsyncBaseTransport | None = None,
    tls: ClientTls | None = None,
) -> httpx.AsyncClient:
    """The one HTTP client of a sidecar. Redirects and proxies from the environment are not
    followed: both would hand proofs to somebody else.
    """
    options: dict[str, Any] = {} if transport is None else {"transport": transport}
    return httpx.AsyncClient(
        base_url=url,
        timeout=timeout_s,
        follow_redirects=False,
        trust_env=False,
        verify=(tls or ClientTls()).context(),
        **options,
    )


def seconds(ns: int) -> float:
    """Nanoseconds as seconds."""
    return ns / NS
