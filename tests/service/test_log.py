"""The log's chain, its pages and its stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn

from cli.serve import Connection
from service.auth.actor import SYSTEM
from service.auth.tokens import Role
from service.db.session import Database
from service.log import chain, store
from service.log.stream import parse_event_id, stream
from service.log.tail import PAGE_ENTRIES, Tail
from service.settings import ServiceSettings
from strongroom.control import LogPage
from strongroom.errors import Corrupt, Misuse
from strongroom.identity import new_component_id
from strongroom.log import InvalidationKind, LogEntry
from tests.service.evidence import Evidence, new_signer, start
from tests.service.house import Service, running
from tests.service.sidecar_party import SidecarParty, enrolled

SIGNER = new_signer()
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


@pytest.fixture
async def evidence(database: Database, tmp_path: Path) -> AsyncIterator[Evidence]:
    started = await start(database, tmp_path / "journal" / "log.jws")
    yield started
    await started.journal.close()


async def retire(evidence: Evidence, count: int = 1) -> None:
    async with evidence.changes.begin(SYSTEM) as change:
        for _ in range(count):
            await change.invalidate(
                kind=InvalidationKind.COMPONENTS, components=[new_component_id()]
            )


def entries(count: int, epoch: str = "e" * 32) -> list[LogEntry]:
    head = chain.empty(epoch)
    made = [chain.next_entry(head, NOW, InvalidationKind.EPOCH)]
    while len(made) < count:
        made.append(
            chain.next_entry(
                chain.head_of(made[-1]),
                NOW,
                InvalidationKind.COMPONENTS,
                components=(new_component_id(),),
            )
        )
    return made


def test_a_chain_is_followed_through_its_epochs() -> None:
    links = chain.Chain()
    for entry in (*entries(5), *entries(3, "f" * 32)):
        links.follow(entry)
    assert links.head is not None
    assert (links.head.epoch, links.head.seq) == ("f" * 32, 3)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda e: [e[0], e[2]], "where 2 belongs"),
        (lambda e: [e[0], e[1], e[1]], "where 3 belongs"),
        (lambda e: [e[1]], "without its first"),
        (lambda e: [e[0], e[0]], "begins twice"),
        (lambda e: [e[0], msgspec.structs.replace(e[1], prev="0" * 64)], "forks"),
        (lambda e: [e[0], msgspec.structs.replace(e[1], epoch="a" * 32)], "without its first"),
    ],
)
def test_a_gap_a_step_back_and_a_fork_are_refused(
    broken: Callable[[list[LogEntry]], list[LogEntry]], reason: str
) -> None:
    links = chain.Chain()

    def follow() -> None:
        for entry in broken(entries(4)):
            links.follow(entry)

    with pytest.raises(Corrupt, match=reason):
        follow()


def test_an_entry_reads_back_by_the_right_key_and_not_by_another() -> None:
    from policy.signing import Verifier

    entry = entries(2)[1]
    jws = chain.sign(entry, SIGNER)
    assert chain.read(jws, Verifier({SIGNER.kid: SIGNER.public_key})) == entry
    assert chain.parse(jws) == entry
    other = new_signer("other")
    with pytest.raises(Corrupt):
        chain.read(jws, Verifier({other.kid: other.public_key}))
    with pytest.raises(Corrupt):
        chain.parse("not.a.jws")


def test_an_event_id_is_epoch_and_seq_and_nothing_else() -> None:
    assert parse_event_id("a" * 32 + ":17") == ("a" * 32, 17)
    for wrong in ("", "17", "a:1", "a" * 32 + ":", "a" * 32 + ":-1", "a" * 32 + ":1 "):
        with pytest.raises(Misuse):
            parse_event_id(wrong)


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


def tail_of(evidence: Evidence) -> Tail:
    return Tail(evidence.database.readers, evidence.kick)


def opened(
    evidence: Evidence,
    epoch: str = "",
    after: int = 0,
    heartbeat_s: float = 30.0,
    behind_max: int = 10_000,
) -> AsyncGenerator[bytes, None]:
    return stream(tail_of(evidence), epoch, after, heartbeat_s, yes, behind_max)


async def test_the_stream_sends_what_there_is_and_then_what_is_committed(
    evidence: Evidence,
) -> None:
    await retire(evidence)
    async with aclosing(opened(evidence)) as events:
        assert (await anext(events)).startswith(b":")
        first, second = await anext(events), await anext(events)
        assert b":1\ndata: " in first
        assert b":2\ndata: " in second
        coming = asyncio.ensure_future(anext(events))  # noqa: TID251 - awaited below
        await asyncio.sleep(0)
        await retire(evidence)
        third = (await asyncio.wait_for(coming, 5)).decode()
    assert third.startswith("id: ")
    entry = chain.read(third.split("data: ")[1].strip(), evidence.verifier)
    assert entry.seq == 3


async def test_the_stream_resumes_after_the_last_event_id_and_skips_nothing(
    evidence: Evidence,
) -> None:
    await retire(evidence, PAGE_ENTRIES + 5)
    async with aclosing(opened(evidence, after=0)) as events:
        await anext(events)
        seen = [await anext(events) for _ in range(3)]
    last_id = seen[-1].decode().split("\n")[0].removeprefix("id: ")
    epoch, after = parse_event_id(last_id)
    async with aclosing(opened(evidence, epoch, after)) as events:
        await anext(events)
        rest = [await anext(events) for _ in range(PAGE_ENTRIES + 3)]
    seqs = [int(event.decode().split("\n")[0].rsplit(":", 1)[1]) for event in rest]
    assert seqs == list(range(4, PAGE_ENTRIES + 7))


async def test_silence_is_filled_with_heartbeats(evidence: Evidence) -> None:
    async with aclosing(opened(evidence, after=1, heartbeat_s=0.01)) as events:
        await anext(events)
        assert await anext(events) == b": heartbeat\n\n"
        assert await anext(events) == b": heartbeat\n\n"


async def test_the_stream_ends_for_a_sidecar_that_is_no_longer_live(evidence: Evidence) -> None:
    events = stream(tail_of(evidence), "", 1, 0.01, no, 100)
    assert [event async for event in events] == [b": strongroom invalidation log\n\n"]


@pytest.mark.parametrize("position", ["another epoch", "ahead of the log"])
async def test_a_client_that_is_elsewhere_is_told_to_restart(
    evidence: Evidence, position: str
) -> None:
    epoch, after = ("0" * 32, 0) if position == "another epoch" else ("", 99)
    found = [event async for event in opened(evidence, epoch, after)]
    assert found[-1].startswith(b"event: restart\n")


async def test_a_stream_that_waits_is_told_when_the_epoch_is_renewed(evidence: Evidence) -> None:
    async with aclosing(opened(evidence, after=1)) as events:
        await anext(events)
        coming = asyncio.ensure_future(anext(events))  # noqa: TID251 - awaited below
        await asyncio.sleep(0)
        async with evidence.changes.begin(SYSTEM) as change:
            began = await change.begin_epoch()
        event = await asyncio.wait_for(coming, 5)
    assert event.startswith(b"event: restart\n")
    assert began.epoch.encode() in event


async def test_pages_continue_and_say_when_to_start_afresh(service: Service) -> None:
    party = await enrolled(service)
    page = await party.log()
    assert page.head_seq == len(page.entries)
    assert not page.restart
    assert (await party.log(after=page.head_seq)).entries == []
    assert (await party.log(after=page.head_seq + 1)).restart
    assert (await party.log(epoch="0" * 32)).restart


async def test_the_whole_log_is_for_the_installations_auditors_alone(service: Service) -> None:
    tenant = await service.tenant()
    auditor = service.party("aud", "", Role.AUDITOR)
    answer = await auditor.get("/v1/log")
    links = chain.Chain()
    for jws in answer["entries"]:
        links.follow(chain.read(jws, service.runtime.verifier))
    assert links.head is not None
    assert (links.head.seq, links.head.hash) == (answer["head_seq"], answer["head_hash"])
    for party, status in (
        (service.party("aud", tenant, Role.AUDITOR), 403),
        (service.party("boss", tenant, Role.TENANT_ADMIN), 403),
        (service.nobody, 401),
    ):
        assert (await party.ask("GET", "/v1/log")).status_code == status


@asynccontextmanager
async def listening(
    service: Service, connection: type[asyncio.Protocol] | str = "auto"
) -> AsyncIterator[str]:
    """The service behind a real HTTP server on a loopback port."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            service.app,
            lifespan="off",
            log_config=None,
            ws="none",
            http=connection,
        )
        server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve([door]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                yield f"http://127.0.0.1:{door.getsockname()[1]}"
            finally:
                server.should_exit = True
                server.force_exit = True
                await serving


async def test_a_sidecar_follows_the_stream_over_http(
    settings: ServiceSettings, service: Service
) -> None:
    del settings
    party = await enrolled(service)
    head = await party.log()
    async with listening(service) as url, httpx.AsyncClient(base_url=url) as http:
        path = "/v1/sidecars/self/invalidations/stream"
        headers = {
            "Authorization": f"Sidecar {party.proof('GET', path, b'')}",
            "Last-Event-ID": f"{head.epoch}:{head.head_seq}",
        }
        async with http.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith(":")
            async with service.runtime.changes.begin(SYSTEM) as change:
                entry = await change.invalidate(
                    kind=InvalidationKind.COMPONENTS, components=[new_component_id()]
                )
            found = ""
            while not found.startswith("data: "):
                found = await asyncio.wait_for(anext(lines), 5)
            assert chain.read(found.removeprefix("data: "), party.verifier) == entry
        refused = await http.get(path)
        assert refused.status_code == 401


async def test_a_client_that_is_too_far_behind_is_told_to_restart(evidence: Evidence) -> None:
    await retire(evidence, 6)
    near = [event async for event in _until_silence(opened(evidence, after=2, behind_max=5))]
    assert [b"event: restart" in event for event in near] == [False] * 6
    far = [event async for event in opened(evidence, after=1, behind_max=5)]
    assert far[-1].startswith(b"event: restart\n")


async def _until_silence(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The greeting and the five entries that there are."""
    async with aclosing(events):
        for _ in range(6):
            yield await anext(events)


async def test_pages_say_to_start_afresh_to_who_is_too_far_behind(
    settings: ServiceSettings,
) -> None:
    async with running(settings.model_copy(update={"log_behind_max": 3})) as service:
        party = await enrolled(service)
        for _ in range(4):
            async with service.runtime.changes.begin(SYSTEM) as change:
                await change.invalidate(
                    kind=InvalidationKind.COMPONENTS, components=[new_component_id()]
                )
        page = await party.log(after=1)
        assert page.restart
        assert page.entries == []
        assert not (await party.log(after=2)).restart


async def test_a_tail_gives_the_same_entries_from_memory_as_from_the_database(
    evidence: Evidence,
) -> None:
    tail = tail_of(evidence)
    await retire(evidence, 3)
    for _ in range(2):
        head, kept = await tail.after("", 1)
        async with evidence.database.readers() as session:
            assert list(kept) == list(await store.page(session, head.epoch, 1, PAGE_ENTRIES))
        await retire(evidence, PAGE_ENTRIES + 7)
    head, far = await tail.after("", 0)
    assert [each.seq for each in far] == list(range(1, PAGE_ENTRIES + 1))
    assert (await tail.after(head.epoch, head.seq))[1] == ()
    assert (await tail.after("0" * 32, 0))[1] == ()


async def test_a_sidecar_has_one_stream_and_its_newest_one_goes_on(
    settings: ServiceSettings,
) -> None:
    async with running(settings) as service:
        party = await enrolled(service)
        head = await party.log()
        async with (
            listening(service) as url,
            httpx.AsyncClient(base_url=url) as http,
            follow(http, party, head) as older,
        ):
            await anext(older)
            async with follow(http, party, head) as newer:
                await anext(newer)
                await retire_at(service)
                assert any([line.startswith("data:") async for line in _few(newer)])
                assert not any([line.startswith("data:") async for line in older])


async def _few(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Lines up to the first that holds data."""
    async for line in lines:
        yield line
        if line.startswith("data:"):
            return


async def retire_at(service: Service) -> None:
    async with service.runtime.changes.begin(SYSTEM) as change:
        await change.invalidate(kind=InvalidationKind.COMPONENTS, components=[new_component_id()])


@asynccontextmanager
async def follow(
    http: httpx.AsyncClient, party: SidecarParty, head: LogPage
) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream from `head` on."""
    path = "/v1/sidecars/self/invalidations/stream"
    headers = {
        "Authorization": f"Sidecar {party.proof('GET', path, b'')}",
        "Last-Event-ID": f"{head.epoch}:{head.head_seq}",
    }
    async with http.stream("GET", path, headers=headers, timeout=20) as response:
        assert response.status_code == 200
        yield response.aiter_lines()


class Impatient(Connection):
    """Cuts off at once who does not read."""

    unread_s = 0.05


async def test_who_does_not_read_its_stream_is_cut_off_and_who_does_is_not(
    service: Service,
) -> None:
    slow, quick = await enrolled(service), await enrolled(service, name="node-2")
    head = await slow.log()
    path = "/v1/sidecars/self/invalidations/stream"
    runtime = service.runtime
    async with listening(service, Impatient) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, (host, int(port)))
            request = (
                f"GET {path} HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Sidecar {slow.proof('GET', path, b'')}\r\n"
                f"Last-Event-ID: {head.epoch}:{head.head_seq}\r\n\r\n"
            )
            await loop.sock_sendall(raw, request.encode())
            async with (
                httpx.AsyncClient(base_url=url) as http,
                follow(http, quick, head) as lines,
            ):
                async with asyncio.timeout(10):
                    while len(runtime.desk.followers) < 2:
                        await asyncio.sleep(0.01)
                read = asyncio.Event()

                async def reading() -> int:
                    count = 0
                    async for line in lines:
                        count += line.startswith("data:")
                        if count == ENTRIES * ROUNDS:
                            read.set()
                    return count

                async with asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(reading())
                    for _ in range(ROUNDS):
                        async with runtime.changes.begin(SYSTEM) as change:
                            for _ in range(ENTRIES):
                                await change.invalidate(
                                    kind=InvalidationKind.COMPONENTS,
                                    components=[new_component_id() for _ in range(500)],
                                )
                    async with asyncio.timeout(20):
                        while slow.id in runtime.desk.followers:
                            await asyncio.sleep(0.01)
                        await read.wait()
                    # Its place is free again, and the one that reads has everything.
                    assert set(runtime.desk.followers) == {quick.id}
                    task.cancel()


ENTRIES = 20
"""Of some 25 kB: together far more than sockets and buffers hold."""
ROUNDS = 12
