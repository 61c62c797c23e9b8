"""Heads kept elsewhere are never written over, and show a log that was cut or changed."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete, select, update

from policy.audit_heads import verify_head
from service.audit import merkle
from service.audit.keeping import Bucket, Folder, HeadKeeper, name_of, open_bucket
from service.audit.models import AuditCounter, AuditHead, AuditReference, AuditRow
from service.audit.upkeep import Forked, Kept, Unchanged, Upkeep
from service.auth.actor import SYSTEM
from service.db.session import Database
from strongroom.errors import Corrupt, Misuse, Unavailable
from tests.service.evidence import Evidence, start


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that speaks S3."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "bucket"])
async def keeper(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HeadKeeper:
    if request.param == "folder":
        return Folder(tmp_path / "heads")
    import httpx

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    url: str = request.getfixturevalue("endpoint")
    bucket = f"heads-{abs(hash(tmp_path)) % 10**9}"
    async with httpx.AsyncClient() as http:
        assert (await http.put(f"{url}/{bucket}")).is_success
    return open_bucket(f"s3://{bucket}/audit", url)


async def test_a_kept_head_is_never_written_over(keeper: HeadKeeper) -> None:
    assert await keeper.latest() is None
    await keeper.put(7, "head-of-7")
    await keeper.put(7, "head-of-7")
    await keeper.put(1000, "head-of-1000")
    await keeper.put(99, "head-of-99")
    with pytest.raises(Corrupt, match="forked"):
        await keeper.put(7, "another")
    assert await keeper.latest() == "head-of-1000"


async def test_a_folder_holds_whole_files_that_nobody_writes(tmp_path: Path) -> None:
    await Folder(tmp_path / "heads").put(7, "head")
    [file] = (tmp_path / "heads").iterdir()
    assert (file.name, file.read_text()) == (name_of(7), "head")
    assert file.stat().st_mode & 0o777 == 0o400


async def test_a_bucket_that_is_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    from obstore.store import S3Store

    away = Bucket(
        S3Store(
            "nowhere",
            config={"endpoint": "http://127.0.0.1:9", "region": "us-east-1"},
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
    )
    with pytest.raises(Unavailable):
        await away.put(1, "x")
    with pytest.raises(Unavailable):
        await away.latest()


def test_only_a_bucket_is_a_bucket() -> None:
    with pytest.raises(Misuse):
        open_bucket("https://example.org/heads")


@pytest.fixture
async def evidence(database: Database, tmp_path: Path) -> AsyncIterator[Evidence]:
    started = await start(database, tmp_path / "journal" / "log.jws")
    await event(started)
    yield started
    await started.journal.close()


async def event(evidence: Evidence) -> None:
    async with evidence.changes.begin(SYSTEM) as change:
        await change.audit("test.event", subject="alice")


def upkeep(evidence: Evidence, *keepers: HeadKeeper) -> Upkeep:
    return Upkeep(
        evidence.database, evidence.changes, evidence.signer, evidence.verifier, keepers, None
    )


async def test_a_head_is_kept_when_the_tree_has_grown(
    evidence: Evidence, keeper: HeadKeeper
) -> None:
    keeping = upkeep(evidence, keeper)
    first = await keeping.keep_head()
    assert isinstance(first, Kept)
    assert await keeping.keep_head() == Unchanged()
    await event(evidence)
    second = await keeping.keep_head()
    assert second == Kept(first.size + 1)
    latest = await keeper.latest()
    assert latest is not None
    assert verify_head(latest, evidence.verifier).size == first.size + 1


async def _cut(evidence: Evidence) -> None:
    """The last event goes, and counter and heads are made to fit: nothing inside can tell."""
    async with evidence.database.writers() as session, session.begin():
        rows = (await session.scalars(select(AuditRow).order_by(AuditRow.seq))).all()
        kept = rows[:-1]
        await session.execute(delete(AuditReference).where(AuditReference.seq == rows[-1].seq))
        await session.execute(delete(AuditRow).where(AuditRow.seq == rows[-1].seq))
        await session.execute(delete(AuditHead))
        peaks = merkle.extend(0, [], [bytes.fromhex(row.hash) for row in kept])
        values = {"size": len(kept), "hash": kept[-1].hash, "peaks": b"".join(peaks).hex()}
        await session.execute(update(AuditCounter).values(**values))


@pytest.mark.parametrize("regrown", [False, True], ids=["cut", "cut and grown again"])
async def test_a_log_that_does_not_continue_a_kept_head_raises_an_alarm(
    evidence: Evidence, tmp_path: Path, regrown: bool
) -> None:
    folder = Folder(tmp_path / "heads")
    await event(evidence)
    assert isinstance(await upkeep(evidence, folder).keep_head(), Kept)
    kept = await folder.latest()
    await _cut(evidence)
    for _ in range(3 if regrown else 0):
        await event(evidence)
    keeping = upkeep(evidence, folder)
    assert isinstance(await keeping.keep_head(), Forked)
    assert isinstance(await keeping.keep_head(), Forked)
    assert await folder.latest() == kept
    async with evidence.database.readers() as session:
        alarms = (
            await session.scalars(select(AuditRow.kind).where(AuditRow.outcome == "alarm"))
        ).all()
    assert list(alarms) == ["alarm.audit_forked"]


async def test_a_kept_head_of_another_service_is_no_head(
    evidence: Evidence, tmp_path: Path
) -> None:
    from tests.service.evidence import new_signer

    folder = Folder(tmp_path / "heads")
    claims = b'{"at":"","hash":"","root":"","size":1}'
    await folder.put(1, new_signer("thief").sign("strongroom-audit-head+jws", claims))
    with pytest.raises(Corrupt):
        await upkeep(evidence, folder).keep_head()
