"""What the connector costs an engine that never hits: decode throughput with it and without.

Three engines of a real vLLM stand side by side and are asked in turn: one with the connector and a
real sidecar, and two without it, whose difference is the noise and is printed first. Every prompt
is new, so that nothing hits; each has a grant, so that each is judged, saved and encrypted.
"""

from __future__ import annotations

import random  # noqa: TID251 - a seeded generator, so that a run can be repeated
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.lookup import sidecar
from benchmarks.rows import BOUNDS, Row, folded
from benchmarks.scale import MIB
from benchmarks.suite import Bench, Suite
from benchmarks.talk import Talk
from strongroom.connectors.digests import measure as measure_digests
from tests.connectors.engine_process import ENGINE_PYTHON, MODEL, EngineProcess

OPTIONS: Final[dict[str, Any]] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "enable_chunked_prefill": True,
}
REQUESTS: Final = 4
PROMPT_TOKENS: Final = 128
VOCABULARY: Final = 40_000
RESAMPLES: Final = 10_000


def lacks() -> str:
    """What is missing here."""
    if not ENGINE_PYTHON.exists():
        return "no engine environment: make setup-engine"
    return "" if MODEL.exists() else "no model: make model"


class Prompts:
    """Prompts that nobody has asked before."""

    def __init__(self, talk: Talk, digests: dict[str, str]) -> None:
        self._talk = talk
        self._digests = digests
        self._random = random.Random(11)

    def requests(self, *, granted: bool) -> list[dict[str, Any]]:
        """A batch, with a grant and a salt each where the engine has the connector."""
        batch = []
        for _ in range(REQUESTS):
            tokens = [self._random.randrange(1000, VOCABULARY) for _ in range(PROMPT_TOKENS)]
            request: dict[str, Any] = {"tokens": tokens}
            if granted:
                answer = self._talk.ask("grant_tokens", tokens=tokens, engine=self._digests)
                request |= {"grant": answer["token"], "salt": answer["salt"]}
            batch.append(request)
        return batch


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    scale = bench.scale
    with tempfile.TemporaryDirectory(prefix="sr") as name, ExitStack() as stack:
        home = Path(name)
        bench.say("engine: starting three engines and a sidecar")
        talk = stack.enter_context(
            sidecar(home / "s", 0, staging_bytes=64 * MIB, host_bytes=256 * MIB)
        )
        prompts = Prompts(talk, _digests())
        plain, other, ours = (stack.enter_context(EngineProcess(home)) for _ in range(3))
        for engine, extra in ((plain, None), (other, None), (ours, _extra(talk, home))):
            engine.ask("start", model=str(MODEL), extra=extra, **OPTIONS)

        def throughput(engine: EngineProcess, *, granted: bool) -> float:
            requests = prompts.requests(granted=granted)
            answer = engine.ask("generate", requests=requests, max_tokens=scale.engine_tokens)
            if any(answer["cached"]):
                raise AssertionError("something hit")
            decoding: float = answer["seconds"] - max(answer["ttft"])
            return REQUESTS * (scale.engine_tokens - 1) / decoding

        for engine in (plain, other, ours):
            throughput(engine, granted=engine is ours)
        noise = _pairs(
            scale.engine_pairs,
            lambda: throughput(other, granted=False),
            lambda: throughput(plain, granted=False),
            lambda n: bench.say(f"engine: noise, pair {n} of {scale.engine_pairs}"),
        )
        pairs = _pairs(
            scale.engine_pairs,
            lambda: throughput(ours, granted=True),
            lambda: throughput(plain, granted=False),
            lambda n: bench.say(f"engine: pair {n} of {scale.engine_pairs}"),
        )
        stored = talk.ask("resident")["blocks"]
        if not stored:
            raise AssertionError("the engine with the connector saved nothing: it was not on")
    return _rows(noise, pairs, stored)


def _extra(talk: Talk, home: Path) -> dict[str, Any]:
    where = talk.ask("where")
    token = home / "token"
    token.write_text(where["tokens"]["engine-a"])
    return {
        "socket": where["socket"],
        "token_file": str(token),
        "engine": "engine-a",
        "lookup_deadline_s": 5.0,
    }


def _digests() -> dict[str, str]:
    measured = measure_digests(MODEL)
    return {
        "model": measured.model,
        "adapter": "none",
        "tokenizer": measured.tokenizer,
        "template": measured.template,
    }


def _pairs(
    count: int,
    ours: Callable[[], float],
    reference: Callable[[], float],
    say: Callable[[int], None],
) -> list[tuple[float, float]]:
    """Pairs in turn; every other one begins with the reference."""
    pairs = []
    for number in range(count):
        say(number + 1)
        if number % 2:
            second = reference()
            pairs.append((ours(), second))
        else:
            pairs.append((ours(), reference()))
    return pairs


def bootstrap(ratios: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median, by resampling."""
    drawn = random.Random(7)
    medians = sorted(
        statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def _rows(
    noise: Sequence[tuple[float, float]], pairs: Sequence[tuple[float, float]], stored: int
) -> list[Row]:
    quiet = [ours / reference for ours, reference in noise]
    ratios = [ours / reference for ours, reference in pairs]
    low, high = bootstrap(ratios)
    floor, ceiling = bootstrap(quiet)
    return [
        folded(
            "engine_noise",
            "tokens/s",
            quiet,
            noise,
            interval=(floor, ceiling),
            note="two engines without the connector: the noise",
        ),
        folded(
            "engine_overhead",
            "tokens/s",
            ratios,
            pairs,
            interval=(low, high),
            excused=BOUNDS["engine_overhead"].holds(high),
            note=f"{len(pairs)} pairs, 95% interval of the median {low:.3f} to {high:.3f}; "
            f"noise {floor:.3f} to {ceiling:.3f}; {stored} blocks saved meanwhile",
        ),
    ]


SUITE = Suite(
    name="engine_overhead",
    summary="decode throughput of a real vLLM with the connector, nothing hit, against without",
    rows=("engine_noise", "engine_overhead"),
    measure=measure,
    lacks=lacks,
)
