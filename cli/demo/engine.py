"""The engine as the demo's client sees it: an OpenAI-compatible server on loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from cli.demo.processes import DemoFailure, Process, Processes

MODEL_NAME: Final = "smollm2"
MODEL_TITLE: Final = "SmolLM2-135M-Instruct, float32"
PAGE_TOKENS: Final = 32
ANSWER_TOKENS: Final = 24
_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion."""

    status: int
    text: str
    ttft_s: float
    """Request sent to first token received."""
    total_s: float
    cached_tokens: int
    """What the engine did not compute: its own prefix cache and restored tokens together."""
    shape: tuple[str, ...]
    """Every field name that the client saw, to compare what answers reveal."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How vLLM is started."""

    python: Path
    model: Path
    port: int
    socket: Path
    token_file: Path
    name: str


def start(running: Processes, config: EngineConfig, base_env: dict[str, str]) -> Process:
    """Start vLLM with our connector; ready when it answers its health check."""
    transfer = {
        "kv_connector": "StrongroomConnector",
        "kv_connector_module_path": "strongroom.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": str(config.socket),
            "token_file": str(config.token_file),
            "engine": config.name,
            # The demo may share its two cores with others: wait longer than the default 0.2 s
            # for a verdict, since a miss costs a whole prefill.
            "lookup_deadline_s": 3.0,
        },
    }
    command = [
        str(config.python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(config.model),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        "127.0.0.1",
        "--port",
        str(config.port),
        "--dtype",
        "float32",
        "--block-size",
        str(PAGE_TOKENS),
        "--max-model-len",
        "4096",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--kv-transfer-config",
        json.dumps(transfer),
    ]
    env = base_env | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = running.start("engine", command, env)
    process.wait_ready(lambda: _healthy(config.port))
    return process


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


class Engine:
    """A client of the running engine."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def tokenize(self, text: str) -> list[int]:
        """Token ids by the engine's own tokenizer, without special tokens of its own."""
        answer = self._http.post(
            "/tokenize",
            json={"model": MODEL_NAME, "prompt": text, "add_special_tokens": False},
        )
        answer.raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    def complete(
        self,
        tokens: Sequence[int],
        *,
        grant: str = "",
        salt: str = "",
        max_tokens: int = ANSWER_TOKENS,
    ) -> Answer:
        """Greedy completion of the very token ids, streamed, timed to the first token."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if salt:
            body["cache_salt"] = salt
        if grant:
            body["kv_transfer_params"] = {"strongroom": {"grant": grant}}
        started = time.perf_counter()
        first: float | None = None
        text: list[str] = []
        cached = 0
        shape: set[str] = set()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise DemoFailure(f"the engine answered {response.status_code}: {response.text}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise DemoFailure(f"the engine failed: {event['error']}")
                shape |= _field_names(event)
                if event["choices"]:
                    first = first if first is not None else time.perf_counter()
                    text.append(event["choices"][0]["text"])
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens", cached) or cached
        if first is None:
            raise DemoFailure("the engine sent no token")
        return Answer(
            status=200,
            text="".join(text),
            ttft_s=first - started,
            total_s=time.perf_counter() - started,
            cached_tokens=cached,
            shape=tuple(sorted(shape)),
        )


def _field_names(value: object, prefix: str = "") -> set[str]:
    if isinstance(value, dict):
        names = set()
        for key, item in value.items():
            names.add(prefix + key)
            names |= _field_names(item, f"{prefix}{key}.")
        return names
    if isinstance(value, list):
        return set().union(*(_field_names(item, prefix) for item in value)) if value else set()
    return set()
