"""Session sets: one engine's scheduler, its workers, and the requests that they share.

A connection is Greeting (in `server`), then one of the roles here, then closed; a role's
frames in another role are a protocol violation. The newest connection of a role and rank wins:
an engine that restarted reconnects before its old socket is seen to be dead. When the scheduler
goes, its requests are cancelled; when a worker goes, its transfers are.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sidecar.clocks import NS
from sidecar.engines.connection import Connection, Later, SessionOver, end_session
from sidecar.engines.hello import Greeting
from sidecar.engines.hints import Allowance, HintDesk, Hints, addresses_of
from sidecar.engines.holdings import Holdings, PerTenant
from sidecar.engines.opens import Names, Opens, Steps
from sidecar.lookup.judge import EngineFacts, Judge, Judging
from sidecar.lookup.request import Cancelled, Denied, Judged, Opened, Request, Requests
from sidecar.record.audit import Notes
from sidecar.record.reasons import Reason
from sidecar.revocation.invalidation import LiveRequest, LiveRequests
from sidecar.transfers.depot import Depot, Shard
from sidecar.transfers.load import LoadTransfer, Turns
from sidecar.transfers.save import SaveTransfer
from sidecar.transfers.saves import SavesInFlight
from sidecar.transfers.slots import Slots
from storage.fair import Fair
from strongroom.blocks import TOKEN_BYTES
from strongroom.errors import Conflict, Overloaded, ProtocolViolation, Unavailable
from strongroom.identity import ComponentId
from strongroom.limits import REQUEST_ID_CHARS_MAX
from strongroom.wire.frames import (
    Cancel,
    Copied,
    EngineFrame,
    Fenced,
    Filled,
    Finish,
    Hint,
    Lease,
    Load,
    LoadFailed,
    Open,
    Report,
    Save,
    SaveDone,
    Unhint,
    Verdict,
)
from strongroom.wire.frames import Slots as SlotsFrame

LOADS_AT_ONCE: Final = 2
"""Of one tenant on one connection: enough to keep the crypto threads and a disk busy."""

FRAMES_IN_A_ROW: Final = 16
"""`Open`s that are read before others may run: more than verdicts begin meanwhile, so that who
comes last is seen soon, and few enough for the loop."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """See `SidecarSettings`."""

    requests_max: int
    prompt_bytes_max: int
    opens_max: int
    transfers_max: int
    blocks_at_once: int
    """Of one connection's loads: enough to keep the crypto threads busy by itself."""
    linger_ns: int
    judge_wait_s: float


@dataclass(frozen=True, slots=True)
class Bench:
    """What sessions need of the sidecar."""

    judge: Judge
    depot: Depot
    in_flight: SavesInFlight
    live: LiveRequests
    hints: HintDesk
    limits: SessionLimits
    steps: Steps
    names: Names


@dataclass(eq=False)
class SessionSet:
    """Everything of one engine id that agrees on what the engine is."""

    greeting: Greeting
    bench: Bench
    hints: Allowance
    """What its scheduler may still ask for with hints."""
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    requests: Requests = field(init=False)
    opens: Opens = field(init=False)
    scheduler: SchedulerSession | None = None
    workers: dict[int, WorkerSession] = field(default_factory=dict)
    format_digest: bytes = field(init=False)
    _facts: EngineFacts | None = None
    """As long as the same workers are here."""
    members: int = 0
    """Connections that have joined and not left, those still being welcomed included."""

    def __post_init__(self) -> None:
        self.format_digest = self.greeting.format.digest()
        limits, weight = self.bench.limits, self.bench.depot.store.weight
        self.opens = Opens(limits.requests_max, limits.prompt_bytes_max, limits.opens_max, weight)
        self.requests = Requests(self.opens.over)

    @property
    def empty(self) -> bool:
        """No connection is left, nor one that was replaced and whose transfers still end."""
        return not self.members and not self.requests.busy

    def facts(self) -> EngineFacts:
        """For the judge: what was measured, and the ranks that can take part."""
        greeting = self.greeting
        whole = len(self.workers) == greeting.ranks
        ranks = tuple(sorted(self.workers)) if whole else ()
        if self._facts is None or self._facts.ranks != ranks:
            self._facts = EngineFacts(
                engine=greeting.engine,
                digests=greeting.digests,
                format_digest=self.format_digest,
                grid=greeting.grid,
                ranks=ranks,
                layout=greeting.layout,
            )
        return self._facts

    def live(self) -> Iterable[LiveRequest]:
        """For an invalidation."""
        for request in self.requests:
            yield LiveRequest(request, partial(self._tell_fenced, request.name))

    def _tell_fenced(self, name: str) -> None:
        # What it was promised will not be brought: others need not queue behind it.
        self.bench.depot.appraiser.dropped(self.greeting.engine, name)
        frame = Fenced(name)
        if self.scheduler is not None:
            self.scheduler.connection.send(frame)
        for worker in self.workers.values():
            worker.connection.send(frame)


class Sessions:
    """The session sets of a sidecar, by engine id."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.hints = bench.hints
        self._sets: dict[str, SessionSet] = {}
        self._hints: dict[str, Allowance] = {}
        """By engine id, also while it is not here; there are as many as token files."""
        self._refused = 0
        """Of sets that are gone."""

    def __len__(self) -> int:
        return len(self._sets)

    def __iter__(self) -> Iterator[SessionSet]:
        return iter(tuple(self._sets.values()))

    @property
    def refused(self) -> int:
        """Requests that were beyond their tenant's part of an engine's, since start."""
        return self._refused + sum(found.opens.refused for found in self)

    def join(self, greeting: Greeting) -> SessionSet:
        """The engine's session set. `Conflict` when its other connections declare otherwise."""
        found = self._sets.get(greeting.engine)
        if found is not None and not found.greeting.agrees_with(greeting):
            raise Conflict(
                "this engine's other connections declare other digests, format or layout",
                field="layout",
            )
        if found is None:
            allowance = self._hints.get(greeting.engine)
            if allowance is None:
                allowance = self._hints[greeting.engine] = self.hints.allowance()
            found = SessionSet(greeting, self._bench, allowance)
            self._sets[greeting.engine] = found
            self._bench.live.add(found.live)
        # Counted at once: a connection that is being welcomed must not find its set forgotten,
        # where neither a fence nor a lease would reach it.
        found.members += 1
        return found

    def facts(self, engine: str) -> EngineFacts | None:
        """What an engine is now; None when no connection of it is here."""
        found = self._sets.get(engine)
        return None if found is None else found.facts()

    def leave(self, joined: SessionSet) -> None:
        """A connection that had joined is over; a set that has none left is forgotten."""
        joined.members -= 1
        if joined.empty and self._sets.get(joined.greeting.engine) is joined:
            del self._sets[joined.greeting.engine]
            self._refused += joined.opens.refused
            self._bench.live.remove(joined.live)

    def tell_lease(self) -> None:
        """Tell every scheduler until when the sidecar may serve.

        For a renewal, right after the log was applied up to its head: what that fenced has been
        told on the same connections before.
        """
        for joined in self:
            if joined.scheduler is not None:
                joined.scheduler.tell_lease()


class SchedulerSession:
    """`Open`, `Cancel`, `Finish`, and hints."""

    def __init__(self, joined: SessionSet, connection: Connection) -> None:
        self.joined = joined
        self.connection = connection
        self._bench = joined.bench
        self._hints = Hints(joined.bench.hints, joined.facts, joined.hints)
        self._refusals = Notes(joined.bench.depot.audit)
        self._in_a_row = 0

    async def serve(self) -> None:
        """Until the connection ends; then every request of the engine is cancelled."""
        earlier, self.joined.scheduler = self.joined.scheduler, self
        if earlier is not None:
            earlier.connection.close(Conflict("a newer scheduler connection took over"))
            self._cancel_all()
        self.tell_lease()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self.connection.serve(self._handle)
                end_session()
        except* SessionOver:
            pass
        finally:
            self._hints.close()
            if self.joined.scheduler is self:
                self.joined.scheduler = None
                self._bench.depot.watch.engine_gone(self.joined.greeting.engine)
                self._cancel_all()

    def _cancel_all(self) -> None:
        for request in self.joined.requests:
            self._bench.depot.appraiser.dropped(self.joined.greeting.engine, request.name)
        self.joined.requests.cancel_all(self._now())

    def tell_lease(self) -> None:
        """Until when verdicts count. Nothing is said while the sidecar may not serve."""
        try:
            deadline_ns = self._bench.depot.gate.require()
        except Unavailable:
            return
        self.connection.send(Lease(deadline_ns))

    def _handle(self, frame: EngineFrame) -> Later | None:
        match frame:
            case Open():
                return self._open(frame)
            case Cancel(name):
                request = self.joined.requests.get(name)
                if request is not None:
                    request.cancel(self._now())
                    self._bench.depot.appraiser.dropped(self.joined.greeting.engine, name)
            case Finish(name):
                request = self.joined.requests.get(name)
                if request is not None:
                    request.finish(self._now())
                    self._bench.depot.appraiser.dropped(self.joined.greeting.engine, name)
            case Report():
                self._bench.depot.watch.reported(self.joined.greeting.engine, frame)
            case Hint():
                self._hints.take(frame, self._tasks)
            case Unhint(name):
                self._hints.drop(name)
            case _:
                raise ProtocolViolation("not a scheduler's frame", field="frame")
        return None

    def _open(self, frame: Open) -> Later | None:
        if not 0 < len(frame.request) <= REQUEST_ID_CHARS_MAX:
            raise ProtocolViolation(
                "a request id is empty or too long", field="request", limit=REQUEST_ID_CHARS_MAX
            )
        limits = self._bench.limits
        self.joined.requests.sweep(
            self._now() - limits.linger_ns,
            number_max=limits.requests_max,
            bytes_max=limits.prompt_bytes_max,
        )
        if not frame.request.isprintable():
            # It goes into records that people read; no engine has a reason for such a name.
            return self._refuse(frame, "", Reason.PROTOCOL)
        opens, tenant = self.joined.opens, self._bench.names.tenant(frame.grant)
        if not opens.take(tenant, len(frame.tokens)):
            return self._refuse(frame, frame.request, Reason.BACKPRESSURE)
        began_ns = self._now()
        request = self.joined.requests.open(frame.request, began_ns)
        opens.keep(request, tenant, len(frame.tokens))
        if opens.judging.is_free(tenant) and self._bench.steps.begin_now(tenant, len(frame.tokens)):
            self._judge_now(request, frame, tenant, began_ns)
        else:
            self._tell_started(request, frame)
            opens.judging_later(
                request,
                self._tasks.create_task(
                    self._judge(request, frame, tenant, began_ns), name="judge"
                ),
            )
        return self._give_way()

    def _give_way(self) -> Later | None:
        """Let others run after so many `Open`s."""
        self._in_a_row += 1
        if self._in_a_row < FRAMES_IN_A_ROW:
            return None
        self._in_a_row = 0
        return partial(asyncio.sleep, 0)

    def _judge_now(
        self, request: Request, frame: Open, tenant: ComponentId | None, began_ns: int
    ) -> None:
        """The verdict in this very step, or a task where it has to wait for something."""
        facts = self.joined.facts()
        begun = self._bench.judge.begin(request, frame, facts)
        if isinstance(begun, Judging):
            self._tell_started(request, frame)
            self.joined.opens.judging_later(
                request,
                self._tasks.create_task(
                    self._judge_on(begun, request, facts, tenant, began_ns), name="judge"
                ),
            )
            return
        self._answer(begun, request, facts, began_ns, frame)

    async def _judge_on(
        self,
        begun: Judging,
        request: Request,
        facts: EngineFacts,
        tenant: ComponentId | None,
        began_ns: int,
    ) -> None:
        async with self.joined.opens.judging.one(tenant):
            verdict = await begun.verdict()
        if self.joined.requests.get(request.name) is request:
            self._answer(verdict, request, facts, began_ns)

    async def _judge(
        self, request: Request, frame: Open, tenant: ComponentId | None, began_ns: int
    ) -> None:
        async with self.joined.opens.judging.one(tenant):
            await self._bench.steps.begin(tenant, len(frame.tokens))
            facts = self.joined.facts()
            verdict: Judged | Denied
            if isinstance(request.state, Cancelled):
                verdict = Denied(Reason.CANCELLED)  # nobody waits for it any more
            else:
                verdict = await self._bench.judge.judge(request, frame, facts)
        # Else it was replaced by a newer request of the same name.
        if self.joined.requests.get(request.name) is request:
            self._answer(verdict, request, facts, began_ns)

    def _answer(
        self,
        verdict: Judged | Denied,
        request: Request,
        facts: EngineFacts,
        began_ns: int,
        untold: Open | None = None,
    ) -> None:
        """Send the verdict; what is told and begun because of it comes after that.

        `untold`: the request was judged at once, and nobody was told yet that it has come.
        """
        if isinstance(verdict, Denied):
            request.deny(self._now())
            self._bench.depot.appraiser.dropped(self.joined.greeting.engine, request.name)
        # A request that was fenced or cancelled while it was judged is not allowed.
        match request.state:
            case Judged() as judged:
                answer = Verdict(request.name, True, judged.hit_tokens, judged.may_save)
            case _:
                answer = Verdict(request.name, False, 0, False)
        self.connection.send(answer)
        weighed, request.weighed = request.weighed, None
        if weighed is not None and answer.allowed:
            self._bench.depot.appraiser.count(facts.engine, request.name, weighed)
        if untold is not None:
            self._tell_started(request, untold)
        watch, seconds = self._bench.depot.watch, (self._now() - began_ns) / NS
        if answer.allowed:
            watch.judged(
                facts.engine,
                request.name,
                request.tenant or "",
                Reason.NONE if isinstance(verdict, Denied) else verdict.missed,
                tokens=answer.tokens,
                seconds=seconds,
            )
        elif isinstance(verdict, Denied):
            watch.journal.denied(
                facts.engine, request.name, request.tenant or "", verdict.reason, seconds
            )
        if isinstance(request.state, Judged):
            self._prefetch(request, request.state, facts)

    def _tell_started(self, request: Request, frame: Open) -> None:
        greeting = self.joined.greeting
        self._bench.depot.watch.journal.request_started(
            greeting.engine, request.name, greeting.digests.model, len(frame.tokens) // TOKEN_BYTES
        )

    def _prefetch(self, request: Request, judged: Judged, facts: EngineFacts) -> None:
        """Bring nearer what the engine has not asked for yet. The verdict is on its way."""
        prefetcher = self._bench.hints.prefetcher
        stance = self._bench.depot.watch.stance(facts.engine, judged.grant.tenant)
        if not stance.prefetches:
            return
        if not request.transfers and prefetcher.concerns(judged.hit.tier):
            request.prefetch = prefetcher.begin(
                judged.grant.jti,
                request.fence,
                addresses_of(judged, facts),
                tenant=judged.grant.tenant,
            )

    def _refuse(self, frame: Open, name: str, reason: Reason) -> Later | None:
        """Nobody waits for its record: it gives nothing to anybody, and others' frames follow."""
        self.connection.send(Verdict(frame.request, False, 0, False))
        later = self._refusals.put(
            "denied",
            "refused",
            reason,
            engine=self.joined.greeting.engine,
            request=name,
            grant=None,
        )
        return later or self._give_way()

    def _now(self) -> int:
        return self._bench.depot.clocks.boot()


class WorkerSession:
    """`Load`, `Copied`, `Save`, `Filled` of one rank, with its own staging."""

    def __init__(
        self, joined: SessionSet, greeting: Greeting, connection: Connection, slots: Slots
    ) -> None:
        self.joined = joined
        self.connection = connection
        self.slots = slots
        self._bench = joined.bench
        self._shard = Shard(
            engine=greeting.engine,
            format_digest=greeting.format.digest(),
            layout=greeting.layout,
            layout_digest=greeting.layout.digest(),
        )
        limits, weight = joined.bench.limits, joined.bench.depot.store.weight
        self._held = Holdings(limits.transfers_max, weight)
        self._loads_at_once = PerTenant(LOADS_AT_ONCE)
        # Each load has two blocks under way at most, so nobody is ever pushed out.
        at_once, waiting_max = limits.blocks_at_once, 8 * limits.transfers_max
        self._turns = Turns(
            host=Fair("blocks", at_once, waiting_max=waiting_max, weight=weight),
            disk=Fair("blocks-past-host", at_once, waiting_max=waiting_max, weight=weight),
        )
        self._loads: dict[int, LoadTransfer | None] = {}
        self._saves: dict[int, SaveTransfer | None] = {}
        """By number; None while the request's verdict is awaited."""

    @property
    def transfers(self) -> int:
        return len(self._loads) + len(self._saves)

    async def serve(self) -> None:
        """Until the connection ends; then its transfers are over and its staging is zeroed."""
        rank = self._shard.layout.rank
        earlier = self.joined.workers.get(rank)
        self.joined.workers[rank] = self
        if earlier is not None:
            earlier.connection.close(Conflict("a newer worker connection took over"))
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self.connection.serve(self._handle)
                end_session()
        except* SessionOver:
            pass
        finally:
            if self.joined.workers.get(rank) is self:
                del self.joined.workers[rank]

    def _handle(self, frame: EngineFrame) -> None:
        match frame:
            case Load():
                self._start_load(frame)
            case Save():
                self._start_save(frame)
            case Copied(number, offset):
                load = self._loads.get(number)
                if load is not None:
                    load.copied(offset)
            case Filled(number):
                save = self._saves.get(number)
                if save is not None:
                    save.filled(frame)
            case _:
                raise ProtocolViolation("not a worker's frame", field="frame")

    def _start_load(self, frame: Load) -> None:
        page = self._shard.layout.page_tokens
        if frame.load in self._loads or frame.load < 0:
            raise ProtocolViolation("a load number is used once at a time", field="load")
        if not 0 <= frame.start < frame.end or frame.start % page or frame.end % page:
            raise ProtocolViolation("a load covers whole pages", field="end", limit=page)
        tenant = self._tenant(frame.request)
        if not self._held.take(tenant):
            self.connection.send(LoadFailed(frame.load, frame.start))
            return
        self._loads[frame.load] = None
        self._tasks.create_task(self._load(frame, tenant), name="load")

    async def _load(self, frame: Load, tenant: ComponentId | None) -> None:
        try:
            async with self._loads_at_once.one(tenant):
                await self._run_load(frame)
        finally:
            del self._loads[frame.load]
            self._held.give_back(tenant)

    async def _run_load(self, frame: Load) -> None:
        request = await self._request(frame.request)
        judged = None if request is None else request.readable()
        if request is None or judged is None or frame.end > judged.hit_tokens:
            self.connection.send(LoadFailed(frame.load, frame.start))
            return
        load = LoadTransfer(
            frame,
            request,
            judged,
            self._shard,
            self.slots,
            self._turns,
            self._bench.depot,
            self.connection.send,
        )
        self._loads[frame.load] = load
        await load.run()

    def _start_save(self, frame: Save) -> None:
        page = self._shard.layout.page_tokens
        if frame.save in self._saves or frame.save < 0:
            raise ProtocolViolation("a save number is used once at a time", field="save")
        if frame.end < 0 or frame.end % page:
            raise ProtocolViolation("a save covers whole pages", field="end", limit=page)
        tenant = self._tenant(frame.request)
        if not self._held.take(tenant):
            self._nothing_to_save(frame)
            return
        self._saves[frame.save] = None
        self._tasks.create_task(self._save(frame, tenant), name="save")

    async def _save(self, frame: Save, tenant: ComponentId | None) -> None:
        try:
            await self._run_save(frame)
        finally:
            del self._saves[frame.save]
            self._held.give_back(tenant)

    async def _run_save(self, frame: Save) -> None:
        request = await self._request(frame.request)
        judged = None if request is None else request.writable()
        if request is None or judged is None or frame.end > judged.grant.prompt_tokens:
            self._nothing_to_save(frame)
            return
        save = SaveTransfer(
            frame,
            request,
            judged,
            self.joined.greeting.grid,
            self._shard,
            self.slots,
            self._bench.depot,
            self._bench.in_flight,
            self.connection.send,
        )
        self._saves[frame.save] = save
        if not await save.run():
            # Its slots cannot be used again while it may still write: a new session gets new ones.
            self.connection.close(Overloaded("slots of a save were never answered for"))

    def _tenant(self, name: str) -> ComponentId | None:
        """Whose request it is; None while that is not known."""
        request = self.joined.requests.get(name)
        return None if request is None else request.tenant

    async def _request(self, name: str) -> Request | None:
        """A judged request; waits a bounded time for its verdict, never for an unknown one."""
        request = self.joined.requests.get(name)
        if request is not None and isinstance(request.state, Opened):
            try:
                async with asyncio.timeout(self._bench.limits.judge_wait_s):
                    await request.judged.wait()
            except TimeoutError:
                return None
        return request

    def _nothing_to_save(self, frame: Save) -> None:
        self.connection.send(SlotsFrame(frame.save, ()))
        self.connection.send(SaveDone(frame.save, 0))
