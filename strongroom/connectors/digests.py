"""What the engine measured: SHA-256 over the files of weights, tokenizer and chat template.

    digest = SHA-256("strongroom/measured/v1" ‖ u32 length of part ‖ part
                     ‖ for each file in the order of its name:
                       u32 length of name ‖ name ‖ u64 length ‖ SHA-256 of the content)

Names are relative to the folder, `/` between parts. The configuration and any Python code of
the model count as weights: another `config.json` makes another model of the same numbers.
Nothing is remembered between calls: a remembered digest is of a file that was there once.

`python -m strongroom.connectors.digests MODEL_DIR [--tokenizer DIR]` prints the three as JSON;
the registry is given those.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import struct
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from strongroom.errors import Conflict, Missing, StrongroomError
from strongroom.wire.frames import Digests

_log = logging.getLogger(__name__)
_DOMAIN: Final = b"strongroom/measured/v1"
_CHUNK_BYTES: Final = 8 * 1024 * 1024

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
MODEL: Final = (
    *WEIGHTS, "*.index.json", "config.json", "params.json", "*quant_config.json",
    "quantize_config.json", "*.py",
)  # fmt: skip
TOKENIZER: Final = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "tekken.json", "*.tiktoken", "*.spm", "*.spiece",
)  # fmt: skip
TEMPLATE: Final = (
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip

Progress = Callable[[str, int, int], None]
"""Told a file's name, the bytes read so far and its length."""


def measure(
    model: Path, tokenizer: Path | None = None, progress: Progress | None = None
) -> Digests:
    """Measure `model`, a folder or one GGUF file; `tokenizer` defaults to the same folder.

    Raises `Missing` where there are no weights, `Conflict` where a file changes meanwhile.
    """
    home = model if model.is_dir() else model.parent
    words = tokenizer or home
    weights = [model] if model.is_file() else _select(home, MODEL)
    if not any(fnmatch(path.name, pattern) for path in weights for pattern in WEIGHTS):
        raise Missing(f"no weights in {model}", field="model")
    return Digests(
        model=_digest("model", home, weights, progress),
        tokenizer=_digest("tokenizer", words, _select(words, TOKENIZER), progress),
        template=_digest("template", words, _select(words, TEMPLATE), progress),
    )


def _select(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _digest(part: str, folder: Path, files: Sequence[Path], progress: Progress | None) -> str:
    total = hashlib.sha256(_DOMAIN + struct.pack("<I", len(part)) + part.encode())
    for path in files:
        name = path.relative_to(folder).as_posix()
        size, content = _hash_file(path, name, progress)
        encoded = name.encode()
        total.update(struct.pack("<I", len(encoded)) + encoded + struct.pack("<Q", size) + content)
    return total.hexdigest()


def _hash_file(path: Path, name: str, progress: Progress | None) -> tuple[int, bytes]:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    done = 0
    with path.open("rb", buffering=0) as file:
        before = path.stat()
        while count := file.readinto(buffer):
            digest.update(view[:count])
            done += count
            if done > before.st_size:
                break  # it grows, maybe as fast as it is read
            if progress is not None:
                progress(name, done, before.st_size)
        after = path.stat()
    if done != before.st_size or (before.st_mtime_ns, before.st_size) != (
        after.st_mtime_ns, after.st_size,
    ):  # fmt: skip
        raise Conflict(f"{name} changed while it was measured", field="model")
    return done, digest.digest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit status 1 with a message where nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m strongroom.connectors.digests",
        description="Measure a model's weights, tokenizer and chat template.",
    )
    parser.add_argument("model", type=Path, help="folder of the model, or its one GGUF file")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, if another")
    options = parser.parse_args(arguments)
    try:
        measured = measure(options.model, options.tokenizer, _report)
    except (StrongroomError, OSError) as error:
        sys.stderr.write(f"cannot measure: {error}\n")
        return 1
    sys.stdout.write(
        json.dumps(
            {
                "model": measured.model,
                "tokenizer": measured.tokenizer,
                "template": measured.template,
            }
        )
        + "\n"
    )
    return 0


def _report(name: str, done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    sys.stderr.write(f"\rmeasuring {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB{end}")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
