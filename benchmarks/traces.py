"""Request traces, generated from published workload statistics; seeded, so that they repeat.

A request is a prompt made of spans, each the first so many tokens of a stream. Two prompts that
begin with the same spans share the blocks of these. Arrival times belong to the trace, as in a
recorded one, so that every policy meets the same load; only the clients of `Saturated`, whose
number is what is fixed there, ask again a gap after their last answer.

Where the parameters come from:
- chat: turns a conversation 4.6 (ShareChat, arXiv 2512.17843: 660,293 turns in 142,808
  conversations; WildChat, arXiv 2405.01470, has over 2.5 million in 1 million). Both are in the
  papers' abstracts. 343 tokens of an answer: the mean of Mooncake's conversation trace
  (github.com/kvcache-ai/Mooncake, FAST25-release/traces: 12,031 requests, on average 12,035
  tokens in and 342.6 out, counted). Assumptions: some 300 user's tokens a turn, the spread of
  both, and attachments so that prompts are of several thousand tokens, which is less than
  Mooncake's mean. Gaps between turns are exponential ("KVCache
  cache in the wild", arXiv 2506.02634: reuse times are exponential within a category, 80% within
  10 minutes), here shortened so that a run of minutes sees several turns of each conversation.
- rag: 3% of the documents draw 60% of the requests (RAGCache, arXiv 2404.12457, as a summary of
  it says; its abstract does not), which Zipf's law gives with an exponent near 1. Assumptions:
  documents of about 3,700 tokens on average (the paper itself could not be read), two of them a
  prompt, short answers.
- agents: about 2,500 new tokens a turn (80,000 tokens after 30 turns) and 131 times as many
  tokens in as out (traces of Codex on SWE-bench Pro, vLLM blog, 6 May 2026); 12 to 21 steps
  (SWE-agent, arXiv 2405.15793: median of successful runs, mean of all). How long tools run is not
  published in a form that can be sampled: a log-normal with a wide tail stands for it.
- saturated: prompts of 1k to 8k tokens from 32 to 64 clients, whose prefixes are stored (the
  matrix of llm-d-router pull request 2833), each client asking again a while after its answer.
- arrivals: gamma distributed gaps, burstier than Poisson (BurstGPT, arXiv 2401.17644).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random  # noqa: TID251 - seeded traces, no secret

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The first `tokens` tokens of a stream. `kind`: system, document or history."""

    stream: int
    tokens: int
    kind: str


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `after` names the request whose answer it follows by `gap_s`."""

    number: int
    at_s: float
    spans: tuple[Span, ...]
    output_tokens: int
    after: int | None = None
    gap_s: float = 0.0
    tenant: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of their numbers. `stored` prompts lie in a tier before it begins."""

    name: str
    requests: tuple[Request, ...]
    stored: tuple[tuple[Span, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Chat:
    """Multi-turn conversations of several tenants, each with a shared system prompt."""

    sessions: int = 260
    sessions_per_s: float = 0.8
    turns_mean: float = 4.6
    user_tokens: float = 296.0
    answer_tokens: float = 343.0
    attachment_tokens: float = 6000.0
    system_tokens: int = 1536
    gap_s: float = 40.0
    burst: float = 2.0
    tenants: int = 4

    def trace(self, name: str, seed: int) -> Trace:
        """The trace of this seed."""
        draw = _Draw(seed)
        drawn: list[_Drawn] = []
        streams = count(1000)
        for at_s in draw.arrivals(self.sessions, self.sessions_per_s, self.burst):
            tenant = draw.integer(self.tenants)
            stream, held, turn_s = next(streams), 0, at_s
            for turn in range(draw.geometric(self.turns_mean)):
                held += draw.tokens(self.user_tokens, 1.2)
                if turn == 0:
                    held += draw.tokens(self.attachment_tokens, 1.0)
                answer = draw.tokens(self.answer_tokens, 0.8)
                spans = (Span(tenant, self.system_tokens, "system"), Span(stream, held, "history"))
                drawn.append((turn_s, spans, answer, tenant))
                turn_s += _answer_s(answer) + draw.exponential(self.gap_s)
                held += answer
        return Trace(name, _in_order(drawn))


@dataclass(frozen=True, slots=True)
class Rag:
    """Questions over shared documents, the popular ones first in the prompt."""

    requests: int = 1200
    requests_per_s: float = 2.0
    documents: int = 2000
    zipf: float = 1.02
    document_tokens: float = 3718.0
    documents_a_prompt: int = 2
    question_tokens: float = 64.0
    answer_tokens: float = 60.0
    system_tokens: int = 512
    burst: float = 1.5
    warm: int = 0
    """Documents, the most popular ones, that are stored before the trace begins."""

    def trace(self, name: str, seed: int) -> Trace:
        """The trace of this seed."""
        draw = _Draw(seed)
        lengths = [draw.tokens(self.document_tokens, 0.7) for _ in range(self.documents)]
        rank = draw.ranks(self.documents, self.zipf)
        questions = count(10**6)
        requests = []
        system = Span(0, self.system_tokens, "system")
        for number, at_s in enumerate(
            draw.arrivals(self.requests, self.requests_per_s, self.burst)
        ):
            chosen = sorted({rank() for _ in range(self.documents_a_prompt)})
            spans = (
                system,
                *(Span(10_000 + each, lengths[each], "document") for each in chosen),
                Span(next(questions), draw.tokens(self.question_tokens, 0.5), "history"),
            )
            requests.append(Request(number, at_s, spans, draw.tokens(self.answer_tokens, 0.8)))
        stored = tuple(
            (system, Span(10_000 + each, lengths[each], "document")) for each in range(self.warm)
        )
        return Trace(name, tuple(requests), stored)


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents that call tools: long prompts that grow, with pauses while a tool runs."""

    sessions: int = 45
    sessions_per_s: float = 0.12
    turns_mean: float = 16.0
    turn_tokens: float = 2200.0
    answer_tokens: float = 300.0
    tools_tokens: int = 6144
    tool_s: float = 5.0
    tool_spread: float = 1.3
    burst: float = 1.5
    kinds: int = 3
    prompt_tokens_max: int = 100_000

    def trace(self, name: str, seed: int) -> Trace:
        """The trace of this seed."""
        draw = _Draw(seed)
        drawn: list[_Drawn] = []
        streams = count(1000)
        for at_s in draw.arrivals(self.sessions, self.sessions_per_s, self.burst):
            kind, stream = draw.integer(self.kinds), next(streams)
            held, turn_s = 0, at_s
            for _ in range(max(2, round(draw.around(self.turns_mean, 0.4)))):
                held += draw.tokens(self.turn_tokens, 0.8)
                if held + self.tools_tokens > self.prompt_tokens_max:
                    break
                answer = draw.tokens(self.answer_tokens, 0.6)
                spans = (Span(kind, self.tools_tokens, "system"), Span(stream, held, "history"))
                drawn.append((turn_s, spans, answer, kind))
                turn_s += _answer_s(answer) + draw.lognormal(self.tool_s, self.tool_spread)
                held += answer
        return Trace(name, _in_order(drawn))


@dataclass(frozen=True, slots=True)
class Saturated:
    """Clients that ask over stored prefixes as soon as they have thought about the answer."""

    clients: int = 64
    rounds: int = 20
    prompt_tokens: int = 8192
    fresh_tokens: int = 128
    answer_tokens: float = 128.0
    gap_s: float = 4.0
    ramp_s: float = 10.0

    def trace(self, name: str, seed: int) -> Trace:
        """The trace of this seed."""
        draw = _Draw(seed)
        requests: list[Request] = []
        questions = count(10**6)
        for client in range(self.clients):
            at_s, after = draw.uniform(self.ramp_s), None
            for _ in range(self.rounds):
                spans = (
                    Span(1000 + client, self.prompt_tokens - self.fresh_tokens, "document"),
                    Span(next(questions), self.fresh_tokens, "history"),
                )
                answer = draw.tokens(self.answer_tokens, 0.3)
                gap_s = draw.exponential(self.gap_s)
                requests.append(Request(len(requests), at_s, spans, answer, after, gap_s))
                after = requests[-1].number
        stored = tuple(
            (Span(1000 + client, self.prompt_tokens - self.fresh_tokens, "document"),)
            for client in range(self.clients)
        )
        return Trace(name, tuple(requests), stored)


_Drawn = tuple[float, tuple[Span, ...], int, int]
"""When, what, how long the answer, whose."""


def _in_order(drawn: list[_Drawn]) -> tuple[Request, ...]:
    return tuple(
        Request(number, at_s, spans, answer, tenant=tenant)
        for number, (at_s, spans, answer, tenant) in enumerate(
            sorted(drawn, key=lambda each: each[0])
        )
    )


def _answer_s(tokens: int) -> float:
    """How long an answer takes that nothing holds up: the next turn comes no sooner."""
    return 1.0 + tokens * 0.02


Workload = Chat | Rag | Agents | Saturated


class _Draw:
    """Draws from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def integer(self, below: int) -> int:
        return self._random.randrange(below)

    def uniform(self, below: float) -> float:
        return self._random.uniform(0.0, below)

    def exponential(self, mean: float) -> float:
        return self._random.expovariate(1.0 / mean)

    def geometric(self, mean: float) -> int:
        """One or more, `mean` on average."""
        return 1 + int(math.log(1.0 - self._random.random()) / math.log(1.0 - 1.0 / mean))

    def around(self, mean: float, spread: float) -> float:
        return max(0.0, self._random.gauss(mean, mean * spread))

    def lognormal(self, median: float, sigma: float) -> float:
        return self._random.lognormvariate(math.log(median), sigma)

    def tokens(self, mean: float, sigma: float) -> int:
        """Log-normal with this mean, whole pages, at least one and at most 8 times the mean."""
        drawn = self._random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        pages = round(min(drawn, 8 * mean) / PAGE_TOKENS)
        return max(1, pages) * PAGE_TOKENS

    def arrivals(self, number: int, per_s: float, burst: float) -> Iterator[float]:
        """Gamma distributed gaps; `burst` is the squared coefficient of variation."""
        at_s = 0.0
        for _ in range(number):
            at_s += self._random.gammavariate(1.0 / burst, burst / per_s)
            yield at_s

    def ranks(self, number: int, exponent: float) -> Callable[[], int]:
        """Draws 0, 1, 2, ... by Zipf's law."""
        weights = [1.0 / (each + 1) ** exponent for each in range(number)]
        numbers = range(number)
        cumulative: list[float] = []
        total = 0.0
        for weight in weights:
            total += weight
            cumulative.append(total)
        return lambda: self._random.choices(numbers, cum_weights=cumulative)[0]
