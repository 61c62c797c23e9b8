"""What a sidecar asks of its interpreter, seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMES_AND_GOES = """
import resource, sys
from sidecar.interpreter import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    print("none")
    raise SystemExit
def prompts():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytes(bytearray(128 * 1024)) for _ in range(400)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
prompts()
print(prompts())
"""


def _faults(how: str) -> int | None:
    command = [sys.executable, "-c", COMES_AND_GOES, how]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    return None if said == "none" else int(said)


def test_the_memory_of_earlier_prompts_is_used_again_without_asking_the_kernel() -> None:
    kept = _faults("kept")
    if kept is None:
        pytest.skip("this C library has no mallopt")
    assert kept < 400
    given_back = _faults("given back")
    assert given_back is not None
    assert given_back > 4000, "without it the test would say nothing"
