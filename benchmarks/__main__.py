"""`python -m benchmarks`: measure, print, judge, and write JSON and plots.

Examples:

  python -m benchmarks                    every suite (half an hour, on an idle machine)
  python -m benchmarks host disk          two suites
  python -m benchmarks control            every suite of a group: storage, control
  python -m benchmarks --quick            the same rows with fewer rounds and smaller sets
  python -m benchmarks lookup --rounds 3  one suite, three rounds
  python -m benchmarks --list             what each suite measures, and what it lacks here

Each row holds both sides, taken in turn in one run: quote the ratios, absolute figures move with
the machine. docs/performance.md says how each row is taken. Rows of suites that are not run now
stay in the file as an earlier run left them; each group of suites has a file of its own.

Exit code: 0 when every bound is reached, 1 when one is missed or a suite could not run
(--no-bounds: 0 as long as nothing breaks).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import plots
from benchmarks.rows import Row
from benchmarks.scale import FULL, QUICK, TINY, Scale
from benchmarks.suite import Bench, Suite
from benchmarks.suites import SUITES

FULL_OUT = Path("build/bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.list:
        _list(console)
        return 0
    asked = set(options.suites)
    chosen = [each for each in SUITES if not asked or asked & {each.name, each.group}]
    scale = _scale(options)
    out = options.out or (FULL_OUT if scale.name == FULL.name else FULL_OUT / scale.name)
    if options.markdown:
        files = [out / name for name in dict.fromkeys(suite.file for suite in chosen)]
        print("\n\n".join(_markdown(json.loads(f.read_text())) for f in files if f.exists()))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    rows, left_out = _run(chosen, scale, out, console)
    console.print(_table(rows))
    for row in rows:
        if row.note:
            console.print(f"[dim]{row.name}: {row.note}[/]")
    for name in dict.fromkeys(suite.file for suite in chosen):
        mine = {row for suite in chosen if suite.file == name for row in suite.rows}
        _write(out / name, [row for row in rows if row.name in mine])
        console.print(f"rows in {out / name}, one plot a suite beside it")
    return _judge(rows, left_out, bounds=not options.no_bounds, console=console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*dict.fromkeys(name for suite in SUITES for name in (suite.name, suite.group))]
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"which to run: {', '.join(names)} (all)"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each row (9; --quick: 3)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer rounds, smaller sets")
    size.add_argument("--tiny", action="store_true", help="as the tests do: figures mean nothing")
    parser.add_argument(
        "--no-bounds", action="store_true", help="exit with 0 also when a bound is missed"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for results (build/bench; --quick: build/bench/quick, so that quick figures "
        "never pass for full ones)",
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the rows of the last run as a table for the docs",
    )
    parser.add_argument("--list", action="store_true", help="list the suites and stop")
    return _checked(parser, names)


def _checked(parser: argparse.ArgumentParser, names: Sequence[str]) -> argparse.ArgumentParser:
    """Names are checked by hand: `choices` does not allow an empty list."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"no suite {text!r}; there are: {', '.join(names)}")
        return text

    for action in parser._actions:
        if action.dest == "suites":
            action.type = name
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else TINY if options.tiny else FULL
    if options.rounds is None:
        return scale
    if options.rounds < 1:
        sys.exit("--rounds must be at least 1")
    return dataclasses.replace(scale, rounds=options.rounds)


def _run(
    chosen: Sequence[Suite], scale: Scale, out: Path, console: Console
) -> tuple[list[Row], list[str]]:
    """Rows, and what was left out and why."""
    rows: list[Row] = []
    left_out: list[str] = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("benchmarks", total=len(chosen))
        for suite in chosen:
            lacking = suite.lacks()
            if lacking:
                left_out.append(f"{suite.name}: {lacking}")
                progress.advance(task)
                continue

            def say(text: str) -> None:
                progress.update(task, description=text)

            found = suite.measure(Bench(scale, out / "scratch", say))
            plots.draw(suite.summary, found, out / f"{suite.name}.png")
            rows += found
            progress.advance(task)
        progress.update(task, description="done")
    return rows, left_out


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Replace these rows in the file; the others stay."""
    kept: list[dict[str, object]] = []
    if path.exists():
        new = {row.name for row in rows}
        kept = [row for row in json.loads(path.read_text()) if row["name"] not in new]
    everything = kept + [asdict(row) for row in rows]
    path.write_text(json.dumps(everything, indent=2) + "\n")


def _table(rows: Sequence[Row]) -> Table:
    table = Table("row", "value", "bound", "spread", "ours", "reference", "unit")
    table.columns[0].no_wrap = True
    for row in rows:
        style = "" if row.bound is None else "green" if row.ok else "bold red"
        table.add_row(
            row.name,
            f"[{style}]{row.value:g}[/]" if style else f"{row.value:g}",
            "" if row.bound is None else f"{row.sense} {row.bound:g}",
            f"{row.low:g} to {row.high:g}",
            f"{row.ours:g}",
            f"{row.reference:g}",
            row.unit,
        )
    return table


def _markdown(rows: Sequence[dict[str, object]]) -> str:
    """Rows of a file as docs/performance.md shows them."""
    lines = [
        "| row | bound | value | spread | ours | reference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        bound = "-" if row["bound"] is None else f"{row['sense']} {row['bound']:g}"
        lines.append(
            f"| `{row['name']}` | {bound} | {row['value']:g} | {row['low']:g} to {row['high']:g} "
            f"| {row['ours']:g} {row['unit']} | {row['reference']:g} {row['unit']} |"
        )
    return "\n".join(lines)


def _judge(rows: Sequence[Row], left_out: Sequence[str], *, bounds: bool, console: Console) -> int:
    missed = [row for row in rows if not row.ok]
    for row in missed:
        console.print(
            f"[bold red]missed[/] {row.name}: {row.value:g}, bound {row.sense} {row.bound:g}"
        )
    for reason in left_out:
        console.print(f"[bold red]not run[/] {reason}")
    if not missed and not left_out:
        console.print("[green]every bound is reached[/]")
    return 1 if bounds and (missed or left_out) else 0


def _list(console: Console) -> None:
    table = Table("suite", "measures", "rows", "lacks")
    for suite in SUITES:
        table.add_row(suite.name, suite.summary, "\n".join(suite.rows), suite.lacks())
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
