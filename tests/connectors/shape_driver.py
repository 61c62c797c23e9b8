"""Describes engines that are configured but not started, in the engine's environment.

Standard input: a JSON list of vLLM's `EngineArgs`; the last line of standard output: for each
the KV format that `vllm_shape` declares, or why it declares none. Everything is vLLM's own, but
the pages, which only a started engine has.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs

    answers = []
    for options in json.load(sys.stdin):
        config = EngineArgs(**options).create_engine_config()
        answers.append(describe(config))
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


def describe(config: Any) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from strongroom.connectors import vllm_shape

    # The same dtype of the pages for each: it is what must not be enough to tell them apart.
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
    pages = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
    )
    try:
        shape = vllm_shape.describe(config, pages, tp_rank=0, pp_rank=0)
    except vllm_shape.Unsupported as error:
        return {"refused": str(error)}
    return {**dataclasses.asdict(shape.format), "digest": shape.format.digest().hex()}


if __name__ == "__main__":
    main()
