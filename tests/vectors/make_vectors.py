"""Golden bytes by a second hand: written from docs/format.md, importing nothing of ours.

    python tests/vectors/make_vectors.py > tests/vectors/vectors.json

A test runs this again, compares it with the file, and holds our code against it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys

# Section 1: bytes


def u16(number: int) -> bytes:
    return number.to_bytes(2, "little")


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def tagged(magic: bytes, *fields: tuple[int, bytes]) -> bytes:
    out = magic + u16(1)
    for tag, value in fields:
        out += bytes([tag]) + u32(len(value)) + value
    return out


# Section 2: identity

TENANT = "0123456789abcdef0123456789abcdef"
MODEL = "11" * 16
ADAPTER = "22" * 16
TOKENIZER = "33" * 16
TEMPLATE = "44" * 16
POLICY = "55" * 16
DOCUMENTS = ["ff" * 16, "06" * 16]
GROUPS = ["a0" * 16, "0a" * 16, "77" * 16]


def identity(adapter: str | None, documents: list[str], groups: list[str]) -> bytes:
    return tagged(
        b"SRID",
        (1, bytes.fromhex(TENANT)),
        (2, bytes.fromhex(MODEL)),
        (4, b"") if adapter is None else (3, bytes.fromhex(adapter)),
        (5, bytes.fromhex(TOKENIZER)),
        (6, bytes.fromhex(TEMPLATE)),
        (7, bytes.fromhex(POLICY)),
        (8, b"".join(bytes.fromhex(each) for each in sorted(documents))),
        (9, b"".join(bytes.fromhex(each) for each in sorted(groups))),
    )


# Section 3: format and layout

FORMAT = tagged(
    b"SRKF",
    (1, b"float32"),
    (2, b"none"),
    (3, u32(30)),
    (4, u32(3)),
    (5, u32(64)),
    (6, b"gqa"),
    (7, b"default:100000"),
)
LAYOUT = tagged(
    b"SRKL",
    (1, b"vllm-cpu-packed"),
    (2, b"vec"),
    (3, u32(32)),
    (4, u64(49152) + u64(49152)),
    (5, u32(2) + u32(1) + u32(1) + u32(0)),
)

# Section 4: derivation


def extract(salt: bytes, ikm: bytes) -> bytes:
    return hmac.new(salt or b"\0" * 32, ikm, hashlib.sha256).digest()


def expand(prk: bytes, info: bytes, length: int) -> bytes:
    okm, last, number = b"", b"", 0
    while len(okm) < length:
        number += 1
        last = hmac.new(prk, last + info + bytes([number]), hashlib.sha256).digest()
        okm += last
    return okm[:length]


def main() -> None:
    plain = identity(None, [], GROUPS[:1])
    full = identity(ADAPTER, DOCUMENTS, GROUPS)
    fingerprint = hashlib.sha256(full).digest()
    secrets = [bytes([number]) * 32 for number in range(1, 12)]
    secret = expand(
        extract(b"", b"".join(u32(32) + each for each in secrets)),
        b"strongroom/v1" + fingerprint,
        32,
    )
    format_digest = hashlib.sha256(FORMAT).digest()
    lookup = expand(secret, b"strongroom/v1/lookup" + format_digest, 32)
    data = expand(secret, b"strongroom/v1/data" + format_digest, 32)
    salt = base64.urlsafe_b64encode(expand(secret, b"strongroom/v1/salt", 32)).decode().strip("=")

    tokens = [0, 1, 2**32 - 1, 49152, 7] * 6 + [9, 10]
    packed = b"".join(u32(token) for token in tokens)

    def block(parent: bytes, position: int, body: bytes, extras: bytes) -> bytes:
        keyed = hashlib.blake2b(digest_size=32, key=lookup, person=b"strongroom/block")
        count = len(body) // 4
        keyed.update(parent + u64(position) + u32(count) + body + u32(len(extras)) + extras)
        return keyed.digest()

    first = block(bytes(32), 0, packed, b"")
    second = block(first, 32, packed[:64], b"image:" + bytes(8))
    block_salt = bytes(range(16))
    okm = expand(data, b"strongroom/v1/block" + first + block_salt, 64)

    entry = {
        "at": "2026-01-31T12:00:00.000000Z",
        "components": [DOCUMENTS[0]],
        "epoch": "00ff00ff00ff00ff",
        "kind": "components",
        "min_revision": 0,
        "prev": hashlib.sha256(b"strongroom/log/v1" + b"00ff00ff00ff00ff").hexdigest(),
        "seq": 1,
        "sidecar": "",
        "subject": "",
        "tenant": TENANT,
    }
    payload = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    # msgpack by hand: {"type": "ping", "number": 5}
    ping = bytes([0x82]) + b"\xa4type" + b"\xa4ping" + b"\xa6number" + bytes([5])

    json.dump(
        {
            "identity_plain": plain.hex(),
            "identity_full": full.hex(),
            "fingerprint_full": fingerprint.hex(),
            "format": FORMAT.hex(),
            "format_digest": format_digest.hex(),
            "layout_digest": hashlib.sha256(LAYOUT).hexdigest(),
            "component_secrets": [each.hex() for each in secrets],
            "namespace_secret": secret.hex(),
            "lookup_key": lookup.hex(),
            "data_key": data.hex(),
            "engine_salt": salt,
            "salt_digest": hashlib.sha256(b"strongroom/salt/v1" + salt.encode()).hexdigest(),
            "tokens": tokens,
            "packed_tokens": packed.hex(),
            "prompt_digest": hashlib.sha256(
                b"strongroom/prompt/v1" + u32(len(tokens)) + packed
            ).hexdigest(),
            "block_first": first.hex(),
            "block_second": second.hex(),
            "block_salt": block_salt.hex(),
            "block_key": okm[:32].hex(),
            "block_commitment": okm[32:].hex(),
            "log_genesis": entry["prev"],
            "log_entry_hash": hashlib.sha256(payload).hexdigest(),
            "frame_ping": (u32(len(ping)) + ping).hex(),
        },
        sys.stdout,
        indent=1,
    )
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
