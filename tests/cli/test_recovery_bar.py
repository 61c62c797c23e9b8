"""The bar of a start: shown to a terminal, silent elsewhere, gone at the end."""

from __future__ import annotations

import io

from rich.console import Console

from cli.recovery_bar import RecoveryBar
from storage.tiers.recovery import RecoveryProgress

READING = RecoveryProgress(read_bytes=2**30, total_bytes=4 * 2**30, total_blocks=10)
INDEXING = RecoveryProgress(indexed_blocks=5000, total_blocks=20_000)


def told(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with RecoveryBar(console) as bar:
        bar(READING)
        bar._progress.refresh()
        bar(INDEXING)
        bar._progress.refresh()
    return out.getvalue()


def test_a_terminal_sees_bytes_and_then_blocks() -> None:
    shown = told(terminal=True)
    assert "NVMe tier, 4.0 GiB" in shown
    assert "index, 20,000 blocks" in shown
    assert "25%" in shown


def test_a_log_file_sees_nothing() -> None:
    assert not told(terminal=False).strip()
