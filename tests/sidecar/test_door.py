"""The socket: who may come in, what garbage does, and what happens when an engine dies."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.compose import running
from sidecar.engines.connection import Connection, Later
from strongroom.blocks import pack_tokens
from strongroom.errors import Conflict, Misuse
from strongroom.limits import FRAME_BYTES_MAX
from strongroom.spool import FIRST_COUNT
from strongroom.wire.frames import (
    Cancel,
    Copied,
    EngineFrame,
    Failure,
    Filled,
    Finish,
    Load,
    LoadFailed,
    Open,
    Part,
    Ping,
    Pong,
    Save,
    Slots,
    Unhint,
    Verdict,
)
from strongroom.wire.framing import PREFIX_BYTES, body_length, decode_sidecar_frame, encode_frame
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import DIGESTS, FORMAT, RefusedHello, Wire, World, harness, layout


async def refusal(world: World, role: str = "worker", **changes: object) -> Failure:
    with pytest.raises(RefusedHello) as caught:
        await world.connect(role, **changes)
    assert isinstance(caught.value.frame, Failure)
    return caught.value.frame


async def test_the_right_token_opens_a_session_and_any_other_does_not(world: World) -> None:
    wire = await world.connect("worker")
    assert wire.welcome is not None
    assert wire.welcome.staging_bytes >= 1024 * 1024
    assert wire.welcome.tokens_per_block == 64
    await wire.close()
    told = set()
    for changes in (
        {"token": "wrong"},
        {"token": ""},
        {"engine": "unknown"},
        {"engine": "../tokens/engine-a"},
        {"engine": ""},
    ):
        told.add(await refusal(world, **changes))
    # Unknown engine, wrong token and bad name are one and the same answer.
    assert [failure.code for failure in told] == ["refused"]


async def test_a_uid_that_is_not_on_the_list_is_refused(tmp_path: Path) -> None:
    control = FakeControlPlane()
    async with harness(tmp_path, control, allowed_uids=frozenset((os.getuid() + 1,))) as world:
        assert (await refusal(world)).code == "refused"
    async with harness(tmp_path, control) as world:
        await (await world.connect("worker")).close()


async def test_a_token_file_that_others_can_read_opens_nothing(world: World) -> None:
    world.token_path.chmod(0o644)
    assert (await refusal(world)).code == "refused"
    world.token_path.chmod(0o600)
    await (await world.connect("worker")).close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"role": "admin"}, "role"),
        ({"digests": msgspec.structs.replace(DIGESTS, model="short")}, "digests.model"),
        ({"format": msgspec.structs.replace(FORMAT, layers=3)}, "layout"),
        ({"format": msgspec.structs.replace(FORMAT, layers=0)}, "layers"),
        ({"layout": layout(page_tokens=48)}, "tokens_per_block"),
        ({"layout": layout(page_tokens=0)}, "page_tokens"),
        ({"layout": layout(tp_size=1, tp_rank=1)}, "tp_rank"),
        (
            {"layout": msgspec.structs.replace(layout(), page_bytes=(2**31, 2**31))},
            "layout",
        ),
        (
            {"layout": msgspec.structs.replace(layout(), page_bytes=(2**20, 2**20))},
            "layout",
        ),
    ],
)
async def test_a_declaration_that_blocks_cannot_be_cut_from_names_its_field(
    world: World, changes: dict[str, object], field: str
) -> None:
    assert (await refusal(world, **changes)).field == field  # type: ignore[arg-type]


async def test_connections_of_one_engine_must_declare_the_same(world: World) -> None:
    engine = await world.engine()
    assert engine.scheduler.welcome is not None
    other = msgspec.structs.replace(DIGESTS, model="cd" * 32)
    assert (await refusal(world, digests=other)).code == "conflict"
    assert (await refusal(world, layout=layout(tp_size=2))).code == "conflict"
    again = await world.connect("worker")
    assert again.welcome is not None
    assert again.welcome.session == engine.scheduler.welcome.session
    await again.close()


async def test_the_socket_and_its_folder_are_ours_alone(world: World) -> None:
    assert world.socket_path.stat().st_mode & 0o777 == 0o600
    assert world.socket_path.parent.stat().st_mode & 0o777 == 0o700
    state = world.sidecar.settings.state_directory
    assert state.stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o077 for path in state.rglob("*")}
    assert modes == {0}


async def test_a_second_sidecar_on_the_same_state_or_socket_is_a_conflict(world: World) -> None:
    settings = world.sidecar.settings
    with pytest.raises(Conflict):
        async with running(settings, transport=world.control):
            pass
    elsewhere = settings.model_copy(
        update={"state_directory": world.directory / "other", "nvme_path": None}
    )
    with pytest.raises(Conflict):
        async with running(elsewhere, transport=world.control):
            pass


async def test_a_socket_left_by_a_dead_process_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    code = f"import socket; socket.socket(socket.AF_UNIX).bind({str(run / 's.sock')!r})"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True)
    async with harness(tmp_path) as world:
        await (await world.connect("worker")).close()


async def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(Misuse) as caught:
        async with harness(tmp_path):
            pass
    assert caught.value.limit == "0700"


async def test_ping_is_answered(world: World) -> None:
    wire = await world.connect("worker")
    wire.send(Ping(42))
    assert (await wire.expect(Pong)).number == 42
    await wire.close()


async def ending(wire: Wire) -> Failure:
    """The one failure, and then the end of the stream."""
    failure = await wire.expect(Failure)
    with pytest.raises(asyncio.IncompleteReadError):
        await wire.receive()
    await wire.close()
    return failure


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", FRAME_BYTES_MAX + 1),
        struct.pack("<I", 0),
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 15) + msgspec.msgpack.encode({"type": "unheard"}).ljust(15, b"\xc0"),
        encode_frame(Load("r", 1, 5, 6)),
        encode_frame(Load("r", 1, 64, 64)),
        encode_frame(Load("r", -1, 0, 64)),
        encode_frame(Save("r", 1, 5)),
        encode_frame(Finish("r")),
    ],
)
async def test_a_frame_that_breaks_the_protocol_ends_its_own_connection_only(
    stored: Stored, data: bytes
) -> None:
    wire = stored.engine.workers[0]
    wire.writer.write(data)
    assert (await ending(wire)).code == "protocol"
    stored.engine.workers[0] = await stored.world.connect("worker")
    assert await stored.hits("good", stored.grant()) == 288
    assert (await stored.engine.load("good", 0, 288)).ok


async def test_a_workers_frame_on_a_schedulers_connection_is_a_violation(world: World) -> None:
    wire = await world.connect("scheduler")
    wire.send(Load("r", 1, 0, 64))
    assert (await ending(wire)).code == "protocol"


async def test_no_hello_in_time_and_no_hello_at_all_are_refused(tmp_path: Path) -> None:
    async with harness(tmp_path, hello_timeout_s=0.05) as world:
        reader, writer = await asyncio.open_unix_connection(str(world.socket_path))
        length = body_length(await reader.readexactly(PREFIX_BYTES))
        frame = decode_sidecar_frame(await reader.readexactly(length))
        assert isinstance(frame, Failure)
        writer.close()
        reader, writer = await asyncio.open_unix_connection(str(world.socket_path))
        writer.write(encode_frame(Ping(1)))
        length = body_length(await reader.readexactly(PREFIX_BYTES))
        frame = decode_sidecar_frame(await reader.readexactly(length))
        assert isinstance(frame, Failure)
        assert frame.code == "protocol"
        writer.close()
        await (await world.connect("worker")).close()


FRAMES = st.one_of(
    st.builds(Open, request=st.text(max_size=300), grant=st.text(max_size=50),
              salt=st.text(max_size=200), tokens=st.binary(max_size=64),
              adapter=st.text(max_size=8), extras=st.binary(max_size=16)),
    st.builds(Load, request=st.text(max_size=8), load=st.integers(-2, 2**70),
              start=st.integers(-64, 512), end=st.integers(-64, 512)),
    st.builds(Save, request=st.text(max_size=8), save=st.integers(-2, 5),
              end=st.integers(-64, 512)),
    st.builds(Copied, load=st.integers(-2, 5), offset=st.integers(-2, 5000)),
    st.builds(Filled, save=st.integers(-2, 5), offset=st.integers(-2, 5000), ok=st.booleans()),
    st.builds(Cancel, request=st.text(max_size=8)),
    st.builds(Finish, request=st.text(max_size=8)),
)  # fmt: skip


@st.composite
def garbage(draw: st.DrawFn) -> bytes:
    pieces = []
    for _ in range(draw(st.integers(1, 5))):
        match draw(st.integers(0, 3)):
            case 0:
                pieces.append(draw(st.binary(max_size=200)))
            case 1:
                body = draw(st.binary(min_size=1, max_size=100))
                pieces.append(struct.pack("<I", len(body)) + body)
            case _:
                try:
                    whole = encode_frame(draw(FRAMES))
                except (OverflowError, ValueError):
                    continue
                pieces.append(whole[: draw(st.integers(0, len(whole)))])
                if draw(st.booleans()):
                    pieces[-1] = whole
    return b"".join(pieces)


async def test_no_garbage_ever_kills_the_server(stored: Stored) -> None:
    """One server and one good engine stand through every example."""
    world = stored.world
    (world.token_path.parent / "bad.token").touch(mode=0o600)
    (world.token_path.parent / "bad.token").write_text("bad")
    loop = asyncio.get_running_loop()

    async def throw(role: str, data: bytes) -> None:
        if role == "nobody":
            _, writer = await asyncio.open_unix_connection(str(world.socket_path))
            writer.write(data)
            writer.write_eof()
            writer.close()
            return
        wire = await world.connect(role, engine="bad", token="bad")
        wire.writer.write(data)
        if wire.writer.can_write_eof():
            wire.writer.write_eof()
        while await wire.reader.read(65536):
            pass
        await wire.close()

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(role=st.sampled_from(["nobody", "worker", "scheduler"]), data=garbage())
    def every(role: str, data: bytes) -> None:
        asyncio.run_coroutine_threadsafe(throw(role, data), loop).result(30)

    await asyncio.to_thread(every)
    statistics = world.sidecar.statistics()
    assert statistics.connections_crashed == 0
    assert await stored.hits("good", stored.grant()) == 288
    assert (await stored.engine.load("good", 0, 288)).ok


async def test_an_engine_that_dies_with_staging_in_use_leaves_nothing_behind(
    stored: Stored,
) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    await stored.hits("r", stored.grant())
    wire.send(Load("r", 1, 0, 128))
    await wire.expect(Part)
    prompt = list(range(7000, 7064))
    await stored.engine.open("w", world.control.grant(world.tenant, prompt))
    wire.send(Save("w", 2, 64))
    assert (await wire.expect(Slots)).slots
    staging = wire.staging
    assert staging is not None
    assert any(staging[:])
    wire.writer.transport.abort()
    while world.sidecar.sessions._sets["engine-a"].members > 1:
        await asyncio.sleep(0)
    assert not any(staging[:])
    assert world.sidecar.statistics().saves_in_flight == 0
    # Without its worker the engine gets no hits; with a new one everything works again.
    assert await stored.hits("without", stored.grant()) == 0
    stored.engine.workers[0] = await world.connect("worker")
    assert await stored.hits("again", stored.grant()) == 288
    assert (await stored.engine.load("again", 0, 288)).ok


async def test_a_schedulers_end_cancels_its_requests(stored: Stored) -> None:
    await stored.hits("r", stored.grant())
    assert (await stored.engine.load("r", 0, 64)).ok
    await stored.engine.scheduler.close()
    while stored.world.sidecar.sessions._sets["engine-a"].scheduler is not None:
        await asyncio.sleep(0)
    assert not (await stored.engine.load("r", 0, 64)).ok
    stored.engine.scheduler = await stored.world.connect("scheduler")
    assert await stored.hits("new", stored.grant()) == 288


async def test_a_load_beyond_the_verdict_fails(stored: Stored) -> None:
    await stored.hits("r", stored.grant())
    wire = stored.engine.workers[0]
    wire.send(Load("r", 1, 0, 304))
    assert (await wire.expect(LoadFailed)).start == 0
    wire.send(Save("r", 1, 320))
    assert (await wire.expect(Slots)).slots == ()


async def test_an_engine_that_does_not_read_is_cut_off_alone(tmp_path: Path) -> None:
    async with harness(tmp_path, send_queue_max=8, send_timeout_s=0.2) as world:
        deaf = await world.connect("scheduler")
        deaf.writer.transport.set_write_buffer_limits(2**30)
        for number in range(200_000):
            deaf.send(Ping(number))
        while world.sidecar.server.counts.connections:
            await asyncio.sleep(0.01)
        engine = await world.engine()
        assert (await engine.open("r", world.control.grant(world.tenant, PROMPT))).allowed
        deaf.writer.transport.abort()


async def test_a_connection_is_closed_also_when_its_last_frames_are_never_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        connection = Connection(ours, queue_max=4096, send_timeout_s=1)
        for number in range(1000):  # more than the socket takes
            connection.send(Pong(number))
        assert connection._outgoing
        connection.close()
        await connection.serve(unexpected)
        assert not connection._outgoing
        assert ours.fileno() == -1


async def test_what_is_queued_for_an_engine_is_bounded() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = Connection(ours, queue_max=8, send_timeout_s=60)
        for number in range(5000):
            connection.send(Pong(number))
        assert len(connection._outgoing) == 8
        assert connection.failure is not None
        assert connection.failure.code == "overloaded"
        theirs.close()
        await connection.serve(unexpected)


async def test_a_frame_is_handled_in_the_step_in_which_it_arrives_and_waits_for_nothing_else() -> (
    None
):
    """Each turn of the loop in between is a time at which restores may take the interpreter."""
    ours, theirs = socket.socketpair()
    tasks: list[object] = []
    arrived = asyncio.Event()

    def handle(frame: EngineFrame) -> None:
        tasks.append(asyncio.current_task())
        if len(tasks) == 3:
            connection.close()
        arrived.set()

    with ours, theirs:
        ours.setblocking(False)
        connection = Connection(ours, queue_max=8, send_timeout_s=60)
        async with asyncio.TaskGroup() as group:
            group.create_task(connection.serve(handle))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the reader has found nothing, and waits
            theirs.sendall(encode_frame(Unhint("whole"))[:7])
            await asyncio.sleep(0)
            theirs.sendall(encode_frame(Unhint("whole"))[7:] + encode_frame(Unhint("behind")))
            await arrived.wait()
            assert tasks == [None, None], "both were handled by the socket's own callback"
            theirs.sendall(encode_frame(Unhint("later")))
    assert tasks == [None] * 3
    assert connection.frames_in == 3


async def test_no_frame_is_handled_while_the_one_before_it_waits() -> None:
    ours, theirs = socket.socketpair()
    handled: list[str] = []
    waits, go_on = asyncio.Event(), asyncio.Event()

    def handle(frame: EngineFrame) -> Later | None:
        assert isinstance(frame, Unhint)
        handled.append(frame.hint)
        if frame.hint == "last":
            connection.close()
        return wait if frame.hint == "waits" else None

    async def wait() -> None:
        waits.set()
        await go_on.wait()
        handled.append("waited")

    with ours, theirs:
        ours.setblocking(False)
        connection = Connection(ours, queue_max=8, send_timeout_s=60)
        async with asyncio.TaskGroup() as group:
            group.create_task(connection.serve(handle))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            theirs.sendall(encode_frame(Unhint("waits")) + encode_frame(Unhint("behind")))
            await waits.wait()
            theirs.sendall(encode_frame(Unhint("last")))
            for _ in range(10):
                await asyncio.sleep(0)
            assert handled == ["waits"]
            go_on.set()
    assert handled == ["waits", "waited", "behind", "last"]


async def test_a_fault_in_a_handler_ends_its_connection_and_says_so() -> None:
    """Also where the handler is called by the socket's callback, which has nobody to raise to."""
    ours, theirs = socket.socketpair()

    def handle(frame: EngineFrame) -> None:
        raise ZeroDivisionError

    with ours, theirs:
        ours.setblocking(False)
        connection = Connection(ours, queue_max=8, send_timeout_s=60)
        theirs.sendall(encode_frame(Unhint("x")))
        with pytest.raises(ExceptionGroup) as caught:
            await connection.serve(handle)
        assert caught.group_contains(ZeroDivisionError)


async def test_two_tenants_engines_that_ask_much_at_once_are_answered_in_turn(
    tmp_path: Path,
) -> None:
    """A verdict is given at once, so what an engine sent behind it has to give way to others."""
    async with harness(tmp_path) as world:
        grants = [
            world.control.grant(tenant, PROMPT) for tenant in (world.tenant, world.control.tenant())
        ]
        path = world.directory / "tokens" / "engine-b.token"
        path.touch(mode=0o600)
        path.write_text("b" * 43)
        other = await world.engine(engine="engine-b", token=path.read_text())
        engines = [await world.engine(), other]
        asked = 12
        for engine, granted in zip(engines, grants, strict=True):
            await engine.open("warm", granted)  # its keys are here
        for engine, granted in zip(engines, grants, strict=True):
            for number in range(asked):
                engine.scheduler.send(
                    Open(f"r{number}", granted.token, granted.salt, pack_tokens(PROMPT), "none")
                )
        for engine in engines:
            for _ in range(asked):
                assert (await engine.scheduler.expect(Verdict)).allowed
        events = await world.sidecar.spool.read(FIRST_COUNT, 100)
        order = [each.engine for each in events if each.request != "warm"]
        assert order.count(order[0]) == asked
        first_of_other = next(at for at, name in enumerate(order) if name != order[0])
        assert first_of_other < asked, "one engine was answered whole before the other"


def unexpected(frame: object) -> None:
    raise AssertionError(frame)


async def test_too_many_connections_are_refused_clearly(tmp_path: Path) -> None:
    async with harness(tmp_path, connections_max=1) as world:
        first = await world.connect("worker")
        assert (await refusal(world, "scheduler")).code == "overloaded"
        await first.close()
