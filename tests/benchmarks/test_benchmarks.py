"""Each suite runs in a tiny mode: names, fields and files are checked, speed is not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import engine, profile
from benchmarks.__main__ import main
from benchmarks.bare import apart
from benchmarks.flood import Broken, Pair, Side, both_sides
from benchmarks.lookup import Loaded, under_load
from benchmarks.rows import BOUNDS, Row, Sense, absolute, folded, ratio
from benchmarks.scale import MIB
from benchmarks.suite import Suite
from benchmarks.suites import SUITES

PROMISED = {
    "host_restore_vs_gcm": ">= 0.9",
    "host_restore_vs_memcpy": ">= 0.85",
    "host_restore_small_set_2_threads": ">= 1.7",
    "host_save_vs_gcm": ">= 0.85",
    "host_restore_vs_lmcache_plain": ">= 0.9",
    "disk_restore_vs_lmcache_encrypted": ">= 2",
    "disk_restore_vs_lmcache_encrypted_warm": ">= 1",
    "nvme_read_vs_fio": ">= 0.85",
    "nvme_write_vs_fio": ">= 0.85",
    "lookup_32k_tokens_us_p50": "<= 600",
    "lookup_32k_tokens_us_p99_loaded": "<= 3000",
    "flood_p99_vs_equal_share": "<= 1.3",
    "engine_overhead": ">= 0.97",
    "revoke_scaling": "<= 3",
    "recovery_1m_s": "<= 60",
    "recovery_1m_block_bytes": "<= 400",
    "scaling": "<= 1.5",
    "decide_cached_us_p50": "<= 10",
    "decide_uncached_ms_p50": "<= 1",
    "decide_uncached_ms_p99": "<= 5",
    "decide_vs_pycasbin": ">= 100",
    "tenant_reload_other_p99": "<= 2",
    "shed_vs_delete": "<= 0.01",
    "revoke_commit_scaling": "<= 2",
    "propagation_ms_p99": "<= 500",
    "grants_per_s_vs_floor": ">= 0.5",
    "audit_append_per_s": ">= 5000",
    "audit_verify_per_s": ">= 50000",
    "audit_query_ms_p95": "<= 500",
}


@pytest.fixture
def out() -> Iterator[Path]:
    """On the checkout's file system, since some file systems have no O_DIRECT."""
    build = Path(__file__).resolve().parents[2] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-test-", dir=build) as name:
        yield Path(name)


def suites() -> Iterator[object]:
    for suite in SUITES:
        marks = [pytest.mark.timeout(600)]
        if suite is engine.SUITE:
            marks.append(pytest.mark.e2e)
        yield pytest.param(suite, id=suite.name, marks=marks)


@pytest.mark.parametrize("suite", list(suites()))
def test_a_suite_writes_its_rows_and_a_plot(suite: Suite, out: Path) -> None:
    lacking = suite.lacks()
    if lacking:
        pytest.skip(lacking)
    assert main([suite.name, "--tiny", "--no-bounds", "--out", str(out)]) == 0
    rows = json.loads((out / suite.file).read_text())
    assert [row["name"] for row in rows] == list(suite.rows)
    for row in rows:
        assert set(row) == {field.name for field in fields(Row)}
        assert row["low"] <= row["value"] <= row["high"]
        assert row["ours"] > 0
        assert row["reference"] > 0
        bound = BOUNDS.get(row["name"])
        assert row["bound"] == (None if bound is None else bound.limit)
    assert (out / f"{suite.name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("scratch/*"))


def test_every_promised_row_is_some_suites_row_with_its_bound() -> None:
    measured = [name for suite in SUITES for name in suite.rows]
    assert len(measured) == len(set(measured))
    assert set(PROMISED) <= set(measured)
    assert {n: f"{b.sense} {b.limit:g}" for n, b in BOUNDS.items()} == PROMISED


def test_rows_of_suites_that_do_not_run_stay_as_they_were(out: Path) -> None:
    other = {"name": "another_row", "value": 1.0}
    stale = {"name": "nvme_read_vs_fio", "value": -1.0}
    (out / "storage.json").write_text(json.dumps([other, stale]))
    main(["disk", "--tiny", "--no-bounds", "--out", str(out)])
    rows = {row["name"]: row for row in json.loads((out / "storage.json").read_text())}
    assert rows["another_row"] == other
    assert rows["nvme_read_vs_fio"]["value"] > 0


def test_a_missed_bound_is_named_and_is_exit_code_1(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def suite(value: float) -> Suite:
        row = ratio("nvme_read_vs_fio", "GB/s", [(value, 1.0)])
        return Suite("disk", "a disk", (row.name,), lambda _: [row])

    def run(value: float, *more: str) -> tuple[int, str]:
        monkeypatch.setattr("benchmarks.__main__.SUITES", (suite(value),))
        code = main(["disk", "--tiny", "--out", str(out), *more])
        return code, capsys.readouterr().out

    code, text = run(0.84)
    assert code == 1
    assert "missed nvme_read_vs_fio: 0.84, bound >= 0.85" in text
    assert run(0.84, "--no-bounds")[0] == 0
    code, text = run(0.86)
    assert code == 0
    assert "missed" not in text


def test_a_suite_that_lacks_its_peer_is_said_and_is_exit_code_1(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Suite("peer", "a peer", (), lambda _: [], lacks=lambda: "make peers")
    monkeypatch.setattr("benchmarks.__main__.SUITES", (absent,))
    assert main(["--tiny", "--out", str(out)]) == 1
    assert "not run peer: make peers" in capsys.readouterr().out


def test_a_group_is_all_of_its_suites_and_has_a_file_of_its_own(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suite(name: str, group: str) -> Suite:
        row = ratio(f"{name}_row", "s", [(1.0, 1.0)])
        return Suite(name, name, (row.name,), lambda _: [row], group=group)

    known = (suite("a", "storage"), suite("b", "control"), suite("c", "control"))
    monkeypatch.setattr("benchmarks.__main__.SUITES", known)
    assert main(["control", "--tiny", "--out", str(out)]) == 0
    assert [row["name"] for row in json.loads((out / "control.json").read_text())] == [
        "b_row",
        "c_row",
    ]
    assert not (out / "storage.json").exists()


@pytest.mark.parametrize("nbytes", [1, 8 * MIB + 128, 256 * MIB, 256 * MIB + 4096, 520 * MIB])
def test_the_halves_of_a_bare_set_lie_where_neither_pushes_the_other_out(nbytes: int) -> None:
    distance = apart(nbytes)
    assert distance >= nbytes
    assert 16 * MIB <= distance % (256 * MIB) <= 240 * MIB
    assert distance - nbytes <= 34 * MIB, "and no further than it takes"


def test_an_unknown_suite_is_refused_with_the_names_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["hots"])
    assert stopped.value.code == 2
    assert "no suite 'hots'; there are: host," in capsys.readouterr().err


def test_a_ratio_is_the_median_of_ratios_and_an_absolute_row_the_median_of_ours() -> None:
    pairs = [(1.0, 2.0), (3.0, 3.0), (9.0, 3.0)]
    row = ratio("x", "GB/s", pairs)
    assert (row.value, row.low, row.high, row.ours, row.reference) == (1.0, 0.5, 3.0, 3.0, 3.0)
    assert row.ok
    assert row.bound is None
    assert absolute("recovery_1m_s", "s", pairs).value == 3.0


def test_bounds_hold_on_their_own_side_and_an_excuse_is_explicit() -> None:
    slow = [(601.0, 1.0)]
    assert not absolute("lookup_32k_tokens_us_p50", "us", slow).ok
    assert absolute("lookup_32k_tokens_us_p50", "us", [(600.0, 1.0)]).ok
    assert not ratio("nvme_write_vs_fio", "GB/s", [(0.84, 1.0)]).ok
    assert folded("nvme_write_vs_fio", "GB/s", [0.84], [(0.84, 1.0)], excused=True).ok
    assert BOUNDS["scaling"].sense is Sense.AT_MOST


def test_the_bootstrap_interval_holds_the_median_and_narrows_with_agreement() -> None:
    wide = engine.bootstrap([0.9, 0.95, 1.0, 1.05, 1.1] * 6)
    narrow = engine.bootstrap([0.99, 1.0, 1.01] * 10)
    assert wide[0] <= 1.0 <= wide[1]
    assert wide[1] - wide[0] >= narrow[1] - narrow[0]


def test_a_profile_tells_encryption_and_io_from_the_rest(tmp_path: Path) -> None:
    source = tmp_path / "path.py"
    source.write_text("cipher.decrypt_into(a, b)\nos.preadv(f, v, 0)\nwork()\nqueue.get()\n")
    found = profile.shares(
        [
            f"main (m.py:1);run ({source}:1) 60",
            f"main (m.py:1);run ({source}:2) 20",
            f"main (m.py:1);run ({source}:3) 20",
            f"thread;idle ({source}:4) 900",
        ]
    )
    assert (found.samples, found.crypto, found.io) == (100, 0.6, 0.2)
    assert found.outside == pytest.approx(0.2)
    assert found.rest == [(f"run ({source}:3)", 0.2)]


def pair(*, flooded: int, throttled: int, missed: int, missed_without: int) -> Pair:
    """Samples of 1, 2, ... ms."""
    return Pair(
        1.0,
        Side([float(1 + at) for at in range(throttled)], missed=missed_without),
        Side([float(1 + at) for at in range(flooded)], missed=missed),
    )


def test_a_quiet_request_that_was_not_served_under_the_flood_took_without_end() -> None:
    whole = pair(flooded=1000, throttled=1000, missed=0, missed_without=0)
    assert both_sides([whole], 0.99) == (991.0, 991.0)
    # Nine of a thousand leave a P99, which is the longest of those that were served.
    some = pair(flooded=991, throttled=1000, missed=9, missed_without=0)
    assert both_sides([some], 0.99) == (991.0, 991.0)
    with pytest.raises(Broken, match="10 of 1000"):
        both_sides([pair(flooded=990, throttled=1000, missed=10, missed_without=10)], 0.99)
    # They make no reference longer, under which the flood would look well.
    calm = pair(flooded=1000, throttled=900, missed=0, missed_without=100)
    assert both_sides([calm], 0.99) == (991.0, 892.0)


def test_a_row_under_load_says_how_much_of_one_it_was_and_fails_where_it_was_none() -> None:
    name = "lookup_32k_tokens_us_p99_loaded"

    def row(name: str, speed: float) -> Row:
        return under_load(name, [(2000.0, 100.0)], [Loaded([], speed, 4.0)], "beside loads")

    assert row(name, 2.0).ok
    assert "2.0 GB/s restored meanwhile, 50% of what is restored alone" in row(name, 2.0).note
    assert not row(name, 1.9).ok
    assert "too little" in row(name, 1.9).note
    assert row(f"{name}_one_load", 0.1).ok, "it has no bound"
