"""Runs vLLM in the engine's environment, told what to do by JSON lines on standard input.

Answers go, one JSON line each, to the descriptor given as the first argument; standard output
and error are vLLM's own. The commands are in `COMMANDS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    state: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("do")
        try:
            answer = COMMANDS[kind](state, **command)
        except Exception as error:  # noqa: BLE001 - the test decides what an error means
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        if kind == "stop":
            return


def start(state: dict[str, Any], model: str, extra: dict[str, Any] | None, **options: Any) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from strongroom.wire.frames import Lease

    policy = options.pop("policy", "recompute")
    if extra is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="StrongroomConnector",
            kv_connector_module_path="strongroom.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        )
    began = time.monotonic()
    state["llm"] = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        seed=0,
        disable_log_stats=False,
        **options,
    )
    reports: list[str] = []
    state["reports"] = reports
    scheduler = state["llm"].llm_engine.engine_core.engine_core.scheduler
    state["scheduler"] = scheduler
    watched = scheduler._update_from_kv_xfer_finished

    def watch(output: Any) -> None:
        reports.extend(output.finished_recving or ())
        watched(output)

    scheduler._update_from_kv_xfer_finished = watch
    state["preemptions"] = 0
    state["lapse"] = False
    state["asked"] = []
    preempt = scheduler._preempt_request

    def count(*arguments: Any, **named: Any) -> None:
        state["preemptions"] += 1
        if state["lapse"]:
            scheduler.connector._lookups.received(Lease(0))
        preempt(*arguments, **named)

    scheduler._preempt_request = count
    if extra is not None:
        watch_lookups(state, scheduler.connector)
    return {"seconds": time.monotonic() - began}


def watch_lookups(state: dict[str, Any], connector: Any) -> None:
    """Keep what the connector answers for requests that were preempted before."""
    asked = connector.get_num_new_matched_tokens

    def watch(request: Any, local_tokens: int) -> Any:
        answer = asked(request, local_tokens)
        if request.num_preemptions:
            state["asked"].append([request.request_id, local_tokens, answer[0]])
        return answer

    connector.get_num_new_matched_tokens = watch


def generate(
    state: dict[str, Any],
    requests: list[dict[str, Any]],
    max_tokens: int = 8,
    *,
    lapse_at_preemption: bool = False,
) -> Any:
    from vllm import SamplingParams

    prompts, parameters = [], []
    for request in requests:
        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        extra = None
        if request.get("grant"):
            extra = {"kv_transfer_params": {"strongroom": {"grant": request["grant"]}}}
        prompts.append(prompt)
        parameters.append(
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args=extra,
                **request.get("sampling", {}),
            )
        )
    reports = state["reports"]
    reports.clear()
    state["asked"].clear()
    state["lapse"] = lapse_at_preemption
    before = state["preemptions"]
    began = time.monotonic()
    outputs = state["llm"].generate(prompts, parameters, use_tqdm=False)
    seconds = time.monotonic() - began
    return {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "text": [output.outputs[0].text for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "ttft": [output.metrics.first_token_latency for output in outputs],
        "parameters": [output.kv_transfer_params for output in outputs],
        "seconds": seconds,
        "loads": list(reports),
        "asked": list(state["asked"]),
        "preemptions": state["preemptions"] - before,
        "left": len(state["scheduler"].requests),
        "used_pages": pages_used(state),
    }


def pages_used(state: dict[str, Any]) -> int:
    pool = state["scheduler"].kv_cache_manager.block_pool
    used: int = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return used


def abort(state: dict[str, Any], request: dict[str, Any], until: str) -> Any:
    """Add a request, step the engine until it has this status, abort it, and drain."""
    from vllm import SamplingParams

    engine = state["llm"].llm_engine
    extra = {"kv_transfer_params": {"strongroom": {"grant": request["grant"]}}}
    engine.add_request(
        "to-abort",
        {"prompt_token_ids": request["tokens"], "cache_salt": request["salt"]},
        SamplingParams(temperature=0.0, max_tokens=64, extra_args=extra),
    )
    state["reports"].clear()
    deadline = time.monotonic() + 10
    statuses: list[str] = []
    while statuses != [until] and time.monotonic() < deadline:
        engine.step()
        statuses = [r.status.name for r in state["scheduler"].requests.values()]
    engine.abort_request(list(state["scheduler"].requests), internal=True)
    return {"statuses": statuses, **drain(state)}


def drain(state: dict[str, Any]) -> Any:
    """Step the engine until it knows no request."""
    began = time.monotonic()
    while state["scheduler"].requests and time.monotonic() < began + 20:
        state["llm"].llm_engine.engine_core.engine_core.step_fn()
    return {
        "loads": list(state["reports"]),
        "left": len(state["scheduler"].requests),
        "used_pages": pages_used(state),
        "seconds": time.monotonic() - began,
    }


def tokenize(state: dict[str, Any], text: str) -> Any:
    return {"tokens": state["llm"].get_tokenizer().encode(text)}


def connected(state: dict[str, Any]) -> Any:
    """Wait until both sides have a session; a lost one is opened anew."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    links = [get_kv_transfer_group()._link, state["scheduler"].connector._link]
    return {"open": all(link.wait_open(10) for link in links)}


def sabotage(state: dict[str, Any], name: str) -> Any:
    """Let this method of the lookups fail until `mend`."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug in the lookups")

    setattr(state["scheduler"].connector._lookups, name, fail)
    return {}


def mend(state: dict[str, Any], name: str) -> Any:
    delattr(state["scheduler"].connector._lookups, name)
    return {}


def reset(state: dict[str, Any]) -> Any:
    return {"done": state["llm"].reset_prefix_cache()}


def statistics(state: dict[str, Any]) -> Any:
    import dataclasses

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    transfers = worker._transfers
    return {
        "transfers": dataclasses.asdict(transfers.statistics()) if transfers else None,
        "engine": state["scheduler"].connector._engine,
        "modules": sorted(
            name for name in ("storage", "sidecar", "service", "policy") if name in sys.modules
        ),
    }


def stop(state: dict[str, Any]) -> Any:
    return {}


COMMANDS: dict[str, Callable[..., Any]] = {
    "start": start,
    "generate": generate,
    "abort": abort,
    "reset": reset,
    "sabotage": sabotage,
    "mend": mend,
    "drain": drain,
    "tokenize": tokenize,
    "connected": connected,
    "statistics": statistics,
    "stop": stop,
}

if __name__ == "__main__":
    main()
