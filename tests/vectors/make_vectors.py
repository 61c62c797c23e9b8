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


# Section 7: frames. msgpack by hand, as its specification has it: big-endian, shortest form


def packed_value(value: object) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if value < 128:
            return value.to_bytes(1, "big")
        for form, width in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
            if value < 1 << 8 * width:
                return bytes([form]) + value.to_bytes(width, "big")
    if isinstance(value, bytes):
        return b"\xc4" + len(value).to_bytes(1, "big") + value
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else bytes([0xD9, len(raw)])) + raw
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(packed_value(each) for each in value)
    assert isinstance(value, dict)
    body = b"".join(packed_value(name) + packed_value(each) for name, each in value.items())
    return bytes([0x80 | len(value)]) + body


def frame(kind: str, **fields: object) -> str:
    body = packed_value({"type": kind, **fields})
    return (u32(len(body)) + body).hex()


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
            "frame_ping": frame("ping", number=5),
            "frame_hello": frame(
                "hello",
                version=1,
                engine="engine-0",
                role="worker",
                token="t" * 43,
                digests={"model": "aa" * 32, "tokenizer": "bb" * 32, "template": "cc" * 32},
                format={
                    "dtype": "float32",
                    "quantization": "none",
                    "layers": 30,
                    "kv_heads": 3,
                    "head_size": 64,
                    "attention": "gqa",
                    "rope": "default:100000",
                },
                layout={
                    "order": "vllm-cpu-packed",
                    "isa": "vec",
                    "page_tokens": 32,
                    "page_bytes": [49152, 49152],
                    "tp_size": 2,
                    "tp_rank": 1,
                    "pp_size": 1,
                    "pp_rank": 0,
                },
            ),
            "frame_open": frame(
                "open",
                request="r-1",
                grant="a.b.c",
                salt=salt,
                tokens=packed,
                adapter="none",
                extras=b"image:" + bytes(8),
            ),
            "frame_verdict": frame("verdict", request="r-1", allowed=True, tokens=1696, save=False),
            "frame_part": frame(
                "part", load=7, start=0, end=256, offset=1 << 20, deadline_ns=(1 << 40) + 1
            ),
            "frame_slots": frame(
                "slots",
                save=9,
                slots=[
                    {"start": 0, "end": 256, "offset": 0},
                    {"start": 256, "end": 288, "offset": 4096},
                ],
            ),
            "frame_failure": frame(
                "failure", code="protocol", message="frame too large", field="frame", limit=1 << 23
            ),
            "frame_failure_bare": frame(
                "failure", code="refused", message="no", field=None, limit=None
            ),
        },
        sys.stdout,
        indent=1,
    )
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
