"""A real vLLM in a process of its own, in the engine's environment, for the tests."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
MODEL = ROOT / "build" / "models" / "smollm2-135m-f32"
DRIVER = Path(__file__).with_name("engine_driver.py")

TINY = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(7)
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=512, max_position_embeddings=4096,
    bos_token_id=1, eos_token_id=2, initializer_range=0.2, dtype="float32",
)
LlamaForCausalLM(config).to(torch.float32).save_pretrained(sys.argv[1])
"""


def engine_environment(home: Path) -> dict[str, str]:
    """The variables of ENGINES.md; `strongroom` comes from a folder that holds nothing else."""
    only = home / "engine-path"
    only.mkdir(exist_ok=True)
    link = only / "strongroom"
    if not link.exists():
        link.symlink_to(ROOT / "strongroom")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": str(only),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "OMP_NUM_THREADS": "1",
    }


def make_tiny_model(folder: Path, home: Path) -> Path:
    """A random Llama of four layers, the same bytes every time."""
    subprocess.run(
        [str(ENGINE_PYTHON), "-c", TINY, str(folder)],
        check=True,
        env=engine_environment(home),
        capture_output=True,
    )
    return folder


class EngineProcess:
    """One engine. `ask` sends a command of `engine_driver` and returns its answer."""

    def __init__(self, home: Path) -> None:
        read, write = os.pipe()
        self.log_path = Path(tempfile.mkstemp(dir=home, prefix="engine-", suffix=".log")[1])
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(ENGINE_PYTHON), str(DRIVER), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=engine_environment(home),
                text=True,
            )
        os.close(write)
        self._answers: IO[str] = os.fdopen(read, "r")

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer; the test fails where the command does."""
        answer = self.attempt(command, **arguments)
        assert "error" not in answer, f"{answer['error']}\n{self.log()[-4000:]}"
        return answer

    def attempt(self, command: str, **arguments: Any) -> Any:
        """The answer, or `{"error": ...}`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        assert line, f"the engine died:\n{self.log()[-4000:]}"
        return json.loads(line)

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        elif self._process.stdin is not None:
            self._process.stdin.close()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
