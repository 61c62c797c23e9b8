"""What enters the KV format of a vLLM engine, and what keeps an engine out of the cache.

The configurations are vLLM's own, read from a model's folder in the engine's environment.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.engine_process import ENGINE_PYTHON, engine_environment, make_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not ENGINE_PYTHON.exists(), reason="no engine environment (make setup-engine)"
    ),
]

DRIVER = Path(__file__).with_name("shape_driver.py")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, dict[str, Any]]]:
    """By name: what is declared of an engine that was configured in this way."""
    with tempfile.TemporaryDirectory(prefix="sr") as name:
        home = Path(name)
        plain = make_tiny_model(home / "plain", home)
        quantized = home / "quantized"
        shutil.copytree(plain, quantized)
        config = json.loads((plain / "config.json").read_text())
        (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
        cases: dict[str, dict[str, Any]] = {
            "float32": {"dtype": "float32"},
            "bfloat16": {"dtype": "bfloat16"},
            "online": {"dtype": "bfloat16", "quantization": "fp8_per_tensor"},
            "online fp8": {"dtype": "bfloat16", "quantization": "fp8"},
            "online mxfp8": {"dtype": "bfloat16", "quantization": "mxfp8"},
            "by layers": {
                "dtype": "bfloat16", "quantization": "online",
                "quantization_config": {"linear": "fp8_per_tensor"},
            },
            "declared": {"dtype": "float16", "model": str(quantized)},
            "declared and more": {
                "dtype": "float16", "model": str(quantized),
                "quantization_config": {"linear": "fp8_per_tensor"},
            },
            "other configuration": {"dtype": "float16", "hf_config_path": str(quantized)},
        }  # fmt: skip
        common = {"model": str(plain), "skip_tokenizer_init": True, "max_model_len": 2048}
        ran = subprocess.run(
            [str(ENGINE_PYTHON), str(DRIVER)],
            input=json.dumps([{**common, **case} for case in cases.values()]),
            env=engine_environment(home),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        yield dict(zip(cases, json.loads(ran.stdout.splitlines()[-1]), strict=True))


def test_models_that_compute_in_another_dtype_do_not_share_kv_of_one_dtype(
    engines: dict[str, dict[str, Any]],
) -> None:
    single, half = engines["float32"], engines["bfloat16"]
    assert single["dtype"] == half["dtype"] == "float32"
    assert (single["quantization"], half["quantization"]) == ("none/float32", "none/bfloat16")
    assert single["digest"] != half["digest"]


@pytest.mark.parametrize("name", ["online", "online fp8", "online mxfp8", "by layers"])
def test_weights_that_are_quantized_while_they_are_loaded_are_not_cached(
    engines: dict[str, dict[str, Any]], name: str
) -> None:
    assert "weights are quantized while they are loaded" in engines[name]["refused"]


def test_quantization_that_is_in_the_measured_files_is_cached_and_named(
    engines: dict[str, dict[str, Any]],
) -> None:
    assert engines["declared"]["quantization"].endswith("gptq/float16")


def test_what_is_quantized_beyond_the_measured_files_is_not_cached(
    engines: dict[str, dict[str, Any]],
) -> None:
    assert "while they are loaded" in engines["declared and more"]["refused"]


def test_a_configuration_from_elsewhere_is_not_the_one_that_was_measured(
    engines: dict[str, dict[str, Any]],
) -> None:
    assert "not the one that was measured" in engines["other configuration"]["refused"]
