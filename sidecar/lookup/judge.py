"""The verdict on one request: is the grant good here and now, and what of it is stored?

Rules (DESIGN sections 3 and 6):
- Every check that fails makes the same verdict, "not allowed, 0 tokens"; the reason goes to the
  spool alone.
- The order is cheap and offline first: shape, signature, then prompt, engine and salt, which a
  client could have forged; then log position and life; then lease; then keys. Of prompt, engine
  and salt everything is looked at before the first difference counts, and life too: the clock
  does not tell what a good signature was refused for.
- Nothing beyond the granted spans is looked up, hit or saved.
- The access record is in the spool before a positive verdict, and log, lease and life are
  checked once more after that: between the last check and the verdict nothing waits.
- A verdict seldom has to wait: for the log, a key lease or the spool. One flow serves both, as a
  generator that yields what it waits for: `begin` goes on to the first wait, and without one the
  verdict is there within the step in which the question came.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from sidecar.clocks import Clocks
from sidecar.control.client import ControlClient
from sidecar.control.gate import Gate
from sidecar.control.leases import KeyLeases
from sidecar.control.logstate import LogState
from sidecar.cost.appraisal import Appraiser
from sidecar.cost.decision import Offer, Stored
from sidecar.degrade.stance import Stance, unrestricted
from sidecar.lookup.chain import Chain
from sidecar.lookup.request import Denied, Hit, Judged, Prompt, Request
from sidecar.lookup.seen_grants import SeenGrants
from sidecar.record.audit import Audit, Kind
from sidecar.record.reasons import Reason
from storage.keyring import KeyRing
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from strongroom.blocks import TOKEN_BYTES, Grid, prompt_digest
from strongroom.derivation import salt_digest
from strongroom.errors import Missing, Refused, StrongroomError, Unavailable
from strongroom.grant import GrantClaims, Operation
from strongroom.kvformat import Layout
from strongroom.limits import (
    ENGINE_SALT_CHARS_MAX,
    EXTRAS_BYTES_MAX,
    GRANT_BYTES_MAX,
    PROMPT_TOKENS_MAX,
)
from strongroom.wire.frames import Digests, Open

PIECES: Final = 8
"""Into about so many equal pieces a hit in one tier is cut for the decision."""
SINGLE_PIECES: Final = 2
"""Blocks at the front that are pieces of their own; as many as a probe brings."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a session set measured and declared, as the judge needs it."""

    engine: str
    digests: Digests
    format_digest: bytes
    grid: Grid
    ranks: tuple[int, ...]
    """The ranks that are connected, or nothing unless all of them are."""
    layout: Layout
    """Rank 0's; the others hold about as much."""


@dataclass(frozen=True, slots=True)
class _No:
    """Raised nowhere: the reason for a negative verdict, as a value."""

    reason: Reason


_Wait = Callable[[], Awaitable[object]]
_Steps = Generator[_Wait, None, Judged | Denied]


class Judging:
    """A verdict that waits for something."""

    def __init__(self, steps: _Steps, wait: _Wait) -> None:
        self._steps = steps
        self._wait = wait

    async def verdict(self) -> Judged | Denied:
        """To be awaited once."""
        wait = self._wait
        try:
            while True:
                try:
                    await wait()
                except StrongroomError as error:
                    wait = self._steps.throw(error)
                else:
                    wait = next(self._steps)
        except StopIteration as ended:
            verdict: Judged | Denied = ended.value
            return verdict
        finally:
            self._steps.close()


class Judge:
    """Works out verdicts. Everything that it reads is memory, but for a key lease."""

    def __init__(
        self,
        client: ControlClient,
        log: LogState,
        gate: Gate,
        leases: KeyLeases,
        ring: KeyRing,
        store: BlockStore,
        audit: Audit,
        clocks: Clocks,
        catch_up_s: float,
        stance: Callable[[str, str], Stance] = unrestricted,
        appraiser: Appraiser | None = None,
    ) -> None:
        self._grants = SeenGrants(client.verifier, client.enrolled.issuer)
        self._tenants = frozenset(client.enrolled.tenants)
        self._log = log
        self._gate = gate
        self._leases = leases
        self._ring = ring
        self._store = store
        self._audit = audit
        self._clocks = clocks
        self._catch_up_s = catch_up_s
        self._stance = stance
        """What is in force for an engine and a tenant now."""
        self._appraiser = appraiser

    async def judge(
        self, request: Request, opened: Open, facts: EngineFacts, *, kind: Kind = "lookup"
    ) -> Judged | Denied:
        """Settle `request`; never raises for anything that the engine or its client sent.

        `kind` is what a positive verdict is put on record as.
        """
        begun = self.begin(request, opened, facts, kind=kind)
        return await begun.verdict() if isinstance(begun, Judging) else begun

    def begin(
        self, request: Request, opened: Open, facts: EngineFacts, *, kind: Kind = "lookup"
    ) -> Judged | Denied | Judging:
        """`judge` as far as it goes without waiting: `request` is settled unless it must wait."""
        steps = self._settle(request, opened, facts, kind)
        try:
            wait = next(steps)
        except StopIteration as ended:
            verdict: Judged | Denied = ended.value
            return verdict
        return Judging(steps, wait)

    def _settle(self, request: Request, opened: Open, facts: EngineFacts, kind: Kind) -> _Steps:
        found = yield from self._judge(request, opened, facts, kind)
        if isinstance(found, _No):
            # It gives nothing to anybody, so a failure to write it changes nothing.
            with suppress(Unavailable):
                written = self._audit.put(
                    "denied",
                    "refused",
                    found.reason,
                    engine=facts.engine,
                    request=request.name,
                    grant=request.grant,
                )
                if written is not None:
                    yield partial(_until, written)
            denied = Denied(found.reason)
            request.settle(denied)
            return denied
        request.settle(found)
        return found

    def _judge(
        self, request: Request, opened: Open, facts: EngineFacts, kind: Kind
    ) -> Generator[_Wait, None, Judged | _No]:
        grant = self._verified(opened)
        if isinstance(grant, _No):
            return grant
        request.grant = grant
        refusal = self._fits(grant, opened, facts)
        if refusal is not None:
            self._alive(request, grant)  # what is refused is looked at as what was revoked is
            return refusal
        if self._log.is_behind(grant.epoch, grant.seq):
            yield partial(self._log.reach, grant.epoch, grant.seq, self._catch_up_s)
        if self._log.is_behind(grant.epoch, grant.seq) or not self._log.usable:
            return _No(Reason.LEASE)
        refusal = self._alive(request, grant)
        if refusal is not None:
            return refusal
        if self._leases.lacking(grant):
            try:
                yield partial(self._leases.ensure, opened.grant, grant)
            except Refused:
                return _No(Reason.REVOKED)
            except Unavailable:
                return _No(Reason.LEASE)
            refusal = self._alive(request, grant)
            if refusal is not None:
                return refusal
        refusal = self._salted(grant, opened)
        if refusal is not None:
            return refusal
        return (yield from self._look_up(request, grant, opened, facts, kind))

    def _verified(self, opened: Open) -> GrantClaims | _No:
        tokens = len(opened.tokens)
        if (
            tokens == 0
            or tokens % TOKEN_BYTES
            or tokens > PROMPT_TOKENS_MAX * TOKEN_BYTES
            or len(opened.extras) > EXTRAS_BYTES_MAX
            or len(opened.grant) > GRANT_BYTES_MAX
            or len(opened.salt) > ENGINE_SALT_CHARS_MAX
        ):
            return _No(Reason.PROTOCOL)
        try:
            return self._grants.verify(
                opened.grant, now_s=self._clocks.now_s(), head=self._log.head
            )
        except Refused:
            return _No(Reason.PERMISSION)

    def _fits(self, grant: GrantClaims, opened: Open, facts: EngineFacts) -> _No | None:
        """The grant is for this prompt on this engine, and for a tenant of this sidecar."""
        measured = (facts.digests.model, facts.digests.tokenizer, facts.digests.template)
        granted = (grant.engine.model, grant.engine.tokenizer, grant.engine.template)
        digest = prompt_digest(opened.tokens, in_pieces=self._store.crypto_busy)
        other_prompt = not hmac.compare_digest(digest.hex(), grant.prompt_digest)
        other_salt = not hmac.compare_digest(salt_digest(opened.salt), grant.salt_digest)
        checks = (
            (bool(self._tenants) and grant.tenant not in self._tenants, Reason.PERMISSION),
            (Operation.READ not in grant.ops or not grant.spans, Reason.PERMISSION),
            (measured != granted or opened.adapter != grant.engine.adapter, Reason.IDENTITY),
            (len(opened.tokens) != grant.prompt_tokens * TOKEN_BYTES, Reason.PROMPT),
            (other_prompt, Reason.PROMPT),
            (other_salt, Reason.IDENTITY),
        )
        return next((_No(reason) for failed, reason in checks if failed), None)

    def _alive(self, request: Request, grant: GrantClaims) -> _No | None:
        try:
            self._gate.require()
        except Unavailable:
            return _No(Reason.LEASE)
        if request.fence.is_cut or self._log.dead(grant) is not None:
            return _No(Reason.REVOKED)
        return None

    def _salted(self, grant: GrantClaims, opened: Open) -> _No | None:
        """A prompt that is granted whole has the salt of its last namespace, and no other."""
        last = grant.spans[-1]
        if last.end < grant.prompt_tokens:
            return None
        salt = self._ring.salt(last.namespace)
        if salt is None or not hmac.compare_digest(salt, opened.salt):
            return _No(Reason.IDENTITY)
        return None

    def _look_up(
        self,
        request: Request,
        grant: GrantClaims,
        opened: Open,
        facts: EngineFacts,
        kind: Kind,
    ) -> Generator[_Wait, None, Judged | _No]:
        stance = self._stance(facts.engine, grant.tenant)
        if stance.refuses:
            return _No(Reason.BREAKER)
        prompt = Prompt(opened.tokens, opened.extras, opened.grant)
        chain = Chain(
            facts.grid,
            grant.spans,
            prompt,
            lambda namespace: self._ring.keys(namespace, facts.format_digest),
        )
        try:
            found = chain.longest(self._store.locator(facts.ranks))
        except Missing:
            return _No(Reason.LEASE)
        limit = stance.limit_tokens
        hit = allowed = found if limit is None else found.front(limit)
        if kind == "lookup":
            hit = self._worth_bringing(request, hit, len(opened.tokens) // TOKEN_BYTES, facts)
        missed = _reason(found, allowed, hit)
        may_save = Operation.WRITE in grant.ops and stance.saves
        judged = Judged(grant, prompt, hit, may_save, missed)
        tier = hit.tier
        try:
            written = self._audit.put(
                kind,
                "hit" if hit else "miss",
                missed,
                engine=facts.engine,
                request=request.name,
                grant=grant,
                # The engine may hit its own prefix cache on any granted span.
                namespaces=[span.namespace for span in grant.spans],
                tokens=judged.hit_tokens,
                tier="" if tier is None else tier.value,
            )
            if written is not None:
                yield partial(_until, written)
        except Unavailable:
            return _No(Reason.AUDIT)
        return self._alive(request, grant) or judged

    def _worth_bringing(self, request: Request, hit: Hit, tokens: int, facts: EngineFacts) -> Hit:
        """The front of the hit that is brought sooner than it is computed."""
        if self._appraiser is None:
            return hit
        page_tokens = facts.layout.page_tokens
        page_bytes = sum(facts.layout.page_bytes) * len(facts.ranks)
        stored = []
        start = 0
        for end, tier in pieces(hit):
            stored.append(Stored(end, tier, (end - start) // page_tokens * page_bytes))
            start = end
        request.weighed = self._appraiser.weigh(facts.engine, Offer(tokens, tuple(stored)))
        return hit.front(request.weighed.decision.tokens)


async def _until(written: asyncio.Future[None]) -> None:
    await written


def pieces(hit: Hit) -> Iterator[tuple[int, TierName]]:
    """End and tier of the pieces that are decided about: a piece lies in one tier.

    The first blocks are pieces of their own, since a probe brings these; what follows has up to
    `PIECES` a run in one tier, so that a decision costs the same for any length of prompt.
    """
    ends, tiers = hit.ends, hit.tiers
    size = max(1, -(-len(hit) // PIECES))
    begun = 0
    while begun < len(hit):
        tier = tiers[begun]
        stop = min(begun + (1 if begun < SINGLE_PIECES else size), len(hit))
        if tiers[begun:stop].count(tier) < stop - begun:
            stop = next(number for number in range(begun, stop) if tiers[number] is not tier)
        yield ends[stop - 1], tier
        begun = stop


def _reason(found: Hit, allowed: Hit, taken: Hit) -> Reason:
    """Why no more was taken of what is stored."""
    if not found:
        return Reason.ABSENT
    if len(taken) < len(allowed):
        return Reason.COST
    return Reason.NONE if allowed else Reason.ABSENT
