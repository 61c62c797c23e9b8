"""What a sidecar and the service say to each other over HTTP (JSON bodies).

They are standard-library dataclasses, so that FastAPI documents and checks them and msgspec
encodes and decodes them: one definition for both ends. Binary values are base64url without
padding. A sidecar authenticates each call with `Authorization: Sidecar <JWS>`, a JWS of type
`Typ.PROOF` over `ProofClaims`, signed by its own Ed25519 key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SIDECAR_PREFIX = "/v1/sidecars/self"


@dataclass(frozen=True, slots=True)
class ProofClaims:
    """Possession of the sidecar's key, for one call."""

    sidecar: str
    method: str
    path: str
    body_sha256: str
    nonce: str
    iat: int


@dataclass(frozen=True, slots=True)
class EnrolRequest:
    """`POST /v1/sidecars`: enrol with a one-time join token."""

    join_token: str = field(repr=False)
    name: str
    signing_key: str
    """Ed25519 public key, raw 32 bytes."""
    hpke_key: str
    """X25519 public key, raw 32 bytes."""


@dataclass(frozen=True, slots=True)
class EnrolAnswer:
    """The sidecar's id and the service keys that it pins."""

    sidecar: str
    issuer: str
    service_keys: dict[str, str]
    """Key id to Ed25519 public key."""
    epoch: str
    tenants: list[str]
    """Components of the tenants that it is enrolled for; empty means all."""


@dataclass(frozen=True, slots=True)
class KeyChangeClaims:
    """The new signing key says that it follows the one in force, for this sidecar."""

    sidecar: str
    replaces: str
    """The signing key in force."""
    signing_key: str
    hpke_key: str


@dataclass(frozen=True, slots=True)
class KeyChangeRequest:
    """`POST /v1/sidecars/self/keys`: exchange both keys. Proven by the key in force."""

    signing_key: str
    """Ed25519 public key, raw 32 bytes."""
    hpke_key: str
    """X25519 public key, raw 32 bytes."""
    possession: str
    """A JWS of type `Typ.KEY_CHANGE` over `KeyChangeClaims`, signed by the new key."""


@dataclass(frozen=True, slots=True)
class KeyChangeAnswer:
    """`kid`: the key that is in force from now on, and the only one."""

    kid: str


@dataclass(frozen=True, slots=True)
class ServingLeaseRequest:
    """`POST /v1/sidecars/self/serving-lease`."""

    nonce: str
    epoch: str = ""
    seq: int = 0
    """How far the sidecar has applied the log; for the service's bookkeeping."""


@dataclass(frozen=True, slots=True)
class ServingLeaseAnswer:
    """`jws` (type `Typ.SERVING_LEASE`) holds `ServingLeaseClaims`."""

    jws: str


@dataclass(frozen=True, slots=True)
class ServingLeaseClaims:
    """Valid for `lease_ms` from the moment the question with `nonce` was sent."""

    sidecar: str
    nonce: str
    epoch: str
    seq: int
    hash: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class KeyLeaseRequest:
    """`POST /v1/sidecars/self/key-lease`: the namespaces of one grant."""

    grant: str
    nonce: str


@dataclass(frozen=True, slots=True)
class KeyLeaseAnswer:
    """`jws` (type `Typ.KEY_LEASE`) holds `KeyLeaseClaims`."""

    jws: str


@dataclass(frozen=True, slots=True)
class LeasedNamespace:
    """One namespace of a key lease. Its secret is in the sealed part, in the same order."""

    namespace: str
    components: list[str]


@dataclass(frozen=True, slots=True)
class KeyLeaseInfo:
    """The HPKE `info`: canonical JSON of this, sent in clear inside the signed answer."""

    sidecar: str
    nonce: str
    epoch: str
    seq: int
    lease_ms: int
    namespaces: list[LeasedNamespace]


@dataclass(frozen=True, slots=True)
class KeyLeaseClaims:
    """`sealed` is HPKE (X25519, HKDF-SHA256, AES-256-GCM) of the 32-byte secrets, back to back."""

    info: KeyLeaseInfo
    sealed: str


@dataclass(frozen=True, slots=True)
class LogPage:
    """`GET /v1/sidecars/self/invalidations?epoch=&after=`: entries in order, as compact JWS.

    `restart` true: the caller's epoch is over; start afresh from `after=0` in `epoch`.
    """

    epoch: str
    head_seq: int
    entries: list[str]
    restart: bool = False


@dataclass(frozen=True, slots=True)
class AckRequest:
    """`POST /v1/sidecars/self/acks`: what this sidecar has done about entries up to `seq`."""

    epoch: str
    seq: int
    state: str
    """`fenced` or `reclaimed`."""
    loads_fenced: int = 0
    saves_fenced: int = 0
    namespaces_dropped: int = 0
    bytes_reclaimed: int = 0


@dataclass(frozen=True, slots=True)
class LivenessRequest:
    """`POST /v1/sidecars/self/liveness`: which of these namespaces may still be leased?"""

    namespaces: list[str]


@dataclass(frozen=True, slots=True)
class LivenessAnswer:
    """Those that are retired for ever; the rest may stay."""

    retired: list[str]


RESIDENCY_ROWS_MAX: Final = 512
"""Amounts of one report."""


@dataclass(frozen=True, slots=True)
class ResidencyAmount:
    """What one namespace has in one tier of the node now; no blocks: nothing any more."""

    namespace: str
    tier: str
    """`host`, `nvme` or `remote`."""
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ResidencyRequest:
    """`POST /v1/sidecars/self/residency`: amounts that differ from those said before."""

    run: str
    """128 random bits in hexadecimal, new whenever everything is said anew."""
    number: int
    """Of the report in its run, from 0."""
    amounts: list[ResidencyAmount]


@dataclass(frozen=True, slots=True)
class ResidencyReceipt:
    """`restart`: the service lacks a report before this one. Begin a new run."""

    restart: bool


@dataclass(frozen=True, slots=True)
class SpoolEvent:
    """One access as the sidecar saw it; `count` and `prev` chain the spool (DESIGN section 10)."""

    count: int
    prev: str
    at: str
    kind: str
    """`lookup`, `load`, `save`, `denied`, `fenced`, `corrupt`, `quota`, `error`."""
    outcome: str
    """`hit`, `miss`, `refused`, `stored`, `failed`."""
    reason: str = ""
    """The layer that missed: engine, host, nvme, permission, identity, expired, integrity,
    quota, cost, backpressure, lease, revoked, prompt, protocol."""
    tenant: str = ""
    subject: str = ""
    request: str = ""
    grant: str = ""
    """The grant's jti."""
    namespaces: list[str] = field(default_factory=list)
    tokens: int = 0
    tier: str = ""
    bytes: int = 0
    epoch: str = ""
    seq: int = 0
    engine: str = ""


@dataclass(frozen=True, slots=True)
class IntakeRequest:
    """`POST /v1/sidecars/self/audit`: a run of the spool, in order."""

    spool: str
    """The spool's id: a new one after a spool was lost."""
    events: list[SpoolEvent]


@dataclass(frozen=True, slots=True)
class IntakeAnswer:
    """`next_count`: the first count that the service has not taken. A gap is alarmed."""

    next_count: int


class Typ:
    """The `typ` header of each kind of JWS: one kind never passes for another."""

    GRANT = "strongroom-grant+jwt"
    TOKEN = "strongroom-token+jwt"  # noqa: S105 - a type name, no secret
    LOG = "strongroom-log+jws"
    SERVING_LEASE = "strongroom-serving-lease+jws"
    KEY_LEASE = "strongroom-key-lease+jws"
    CERTIFICATE = "strongroom-certificate+jws"
    AUDIT_HEAD = "strongroom-audit-head+jws"
    PROOF = "strongroom-proof+jws"
    KEY_CHANGE = "strongroom-key-change+jws"
    BACKUP = "strongroom-backup+jws"
