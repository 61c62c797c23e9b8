"""What a vLLM engine is: KV format, layout, files to measure, or why it can't be cached.

Nothing is guessed: whatever this module does not know to be one group of plain full attention,
with the numbers that were declared, is `Unsupported`, and nothing of that engine is cached.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from strongroom.errors import Misuse
from strongroom.kvformat import KVFormat, Layout


class Unsupported(Misuse):
    """This engine's KV can't be described, so it is not cached."""

    code = "unsupported"


@dataclass(frozen=True, slots=True)
class Shape:
    """How this rank's KV looks. `layers` are vLLM's names in layer order."""

    format: KVFormat
    layout: Layout
    layers: tuple[str, ...]
    page_count: int


def describe(vllm_config: Any, kv_cache_config: Any, *, tp_rank: int, pp_rank: int) -> Shape:
    """Read the engine's own configuration; raises `Unsupported` with the reason."""
    _refuse_modes(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(f"the model has {len(groups)} KV cache groups", field="kv_cache_groups")
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        raise Unsupported(f"{type(spec).__name__} is not plain full attention", field="attention")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        raise Unsupported("attention is windowed, chunked or not causal", field="attention")
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise Unsupported("the KV cache is quantized", field="quantization")
    if spec.page_size_bytes != spec.unpadded_page_size_bytes:
        raise Unsupported("pages are padded", field="page_bytes")
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = tuple(sorted(groups[0].layer_names, key=_layer_order))
    return Shape(
        format=KVFormat(
            dtype=str(spec.dtype).removeprefix("torch."),
            quantization=_precision(model),
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            head_size=spec.head_size,
            attention="full",
            rope=_rope(model.hf_text_config),
        ),
        layout=Layout(
            order=_order(kv_cache_config),
            isa=_isa(vllm_config, spec),
            page_tokens=spec.block_size,
            page_bytes=(spec.page_size_bytes,) * len(layers),
            tp_size=parallel.tensor_parallel_size,
            tp_rank=tp_rank,
            pp_size=parallel.pipeline_parallel_size,
            pp_rank=pp_rank,
        ),
        layers=layers,
        page_count=kv_cache_config.num_blocks,
    )


def model_files(vllm_config: Any) -> tuple[Path, Path | None]:
    """Where weights and tokenizer lie on this disk; raises `Unsupported`."""
    model = vllm_config.model_config
    weights = _local(model.model, model.revision)
    if model.tokenizer in {None, "", model.model}:
        return weights, None
    return weights, _local(model.tokenizer, model.tokenizer_revision)


def _refuse_modes(vllm_config: Any) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.nnodes > 1:
        raise Unsupported("ranks spread over several nodes", field="nnodes", limit=1)
    contexts = (parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    if contexts != (1, 1):
        raise Unsupported("context parallelism", field="context_parallel_size", limit=1)
    if vllm_config.speculative_config is not None:
        raise Unsupported("speculative decoding: a draft model is not measured", field="model")
    if model.hf_overrides:
        raise Unsupported("hf_overrides change the model that was measured", field="hf_overrides")
    if model.hf_config_path not in {None, "", model.model}:
        raise Unsupported("the configuration is not the one that was measured", field="hf_config")
    if vllm_config.load_config.load_format == "dummy":
        raise Unsupported("weights are not loaded from files", field="load_format")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise Unsupported("weights may be replaced while the engine runs", field="weights")
    if model.enable_sleep_mode:
        raise Unsupported("sleep mode takes KV memory away from transfers", field="sleep_mode")


def _precision(model: Any) -> str:
    """How the numbers are computed: the weights' quantization and the dtype of computing.

    The dtype of the KV cache does not tell: a model that computes in bfloat16 and one that
    computes in float32 may store it in the same dtype, and store other numbers.
    """
    declared = model.model_arch_config.quantization_config
    if model.quantization_config is not None or (model.quantization and declared is None):
        raise Unsupported(
            f"weights are quantized while they are loaded ({model.quantization}), which is not "
            "in the files that were measured",
            field="quantization",
        )
    return f"{model.quantization or 'none'}/{str(model.dtype).removeprefix('torch.')}"


def _layer_order(name: str) -> tuple[int, str]:
    numbers = re.findall(r"\d+", name)
    return (int(numbers[0]) if numbers else -1, name)


def _rope(config: Any) -> str:
    """A digest of the rope parameters: they are many, and their names differ by model."""
    named = {
        name: getattr(config, name, None)
        for name in ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
    }
    text = json.dumps(named, sort_keys=True, default=str)
    return "rope-" + hashlib.sha256(text.encode()).hexdigest()


def _order(kv_cache_config: Any) -> str:
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolved when the engine runs

    if current_platform.is_cpu():
        return "vllm-cpu-packed"
    return f"vllm-{current_platform.device_type}-{kv_cache_config.kv_cache_layout or 'default'}"


def _isa(vllm_config: Any, spec: Any) -> str:
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolved when the engine runs

    if not current_platform.is_cpu():
        return "any"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU only

    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return isa


def _local(name: str, revision: str | None) -> Path:
    path = Path(name)
    if path.exists():
        return path
    hub = importlib.import_module("huggingface_hub")  # only for models named by id

    try:
        return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise Unsupported(f"the files of {name} are not on this disk", field="model") from error
