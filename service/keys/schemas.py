"""What the keys' route gives."""

from __future__ import annotations

from pydantic import ConfigDict

from service.schemas import Answer


class PublicKey(Answer):
    """One Ed25519 public key: raw 32 bytes, base64url."""

    kid: str
    key: str
    use: str
    """`service` (grants, leases, log, certificates) or `token`."""


class PublicKeys(Answer):
    """The keys with which what this service signs is verified."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "issuer": "strongroom",
                    "keys": [
                        {
                            "kid": "56475aa75463474c",
                            "key": "A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg",
                            "use": "service",
                        }
                    ],
                }
            ]
        }
    )

    issuer: str
    keys: list[PublicKey]
