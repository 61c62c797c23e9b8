"""`python -m benchmarks.simulate`: compare ways to decide on a hit, on traces of requests.

What decides is the production code: `sidecar.cost`, appraisal, model, backlog and decision,
`storage.admission`, `storage.index` and its eviction. Costs are fitted to restores that are
measured on this machine; engines and disks are scaled from there. The judged traces have other
seeds and other parameters than those that thresholds were tuned on.

Judged are P50, P95 and P99 of the time to first token and goodput (requests within the SLO a
second): ours must be the best or within 2% of the best policy in each of them, on every case. A
case pools five traces of 800 requests and more (fewer for agents), since the P99 of one of them
moves by more than 2% with the luck of a single request. Exits with 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.simulation.cases import JUDGED, TUNING, Case
from benchmarks.simulation.fit import RECORDED, Fit, measure
from benchmarks.simulation.replay import Policy, Result, simulate

WITHIN: Final = 1.02
"""How far from the best ours may be."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric of one trace: `ratio` is how much worse ours is than the best policy."""

    trace: str
    metric: str
    ours: float
    best: float
    best_policy: str
    ratio: float

    @property
    def holds(self) -> bool:
        return self.ratio <= WITHIN


def judge(results: Sequence[Result]) -> list[Verdict]:
    """Ours against the best policy, for each trace and judged metric."""
    return [verdict for name in _names(results) for verdict in _judge_trace(name, results)]


def run(case: Case, policy: Policy, fit: Fit) -> Result:
    """One case under one policy."""
    return simulate(case.traces(), case.machine(fit), policy, slo_s=case.slo_s)


def main() -> None:
    """Parse the command line, run, print, write and plot."""
    options = _options()
    console = Console()
    fit = RECORDED
    if options.costs == "measured":
        with console.status("measuring restores from host memory and NVMe ..."):
            fit = measure(options.disk)
    console.print(
        f"restore: host {fit.host.bytes_s / 1e9:.1f} GB/s + {fit.host.fixed_s * 1e3:.2f} ms, "
        f"NVMe {fit.nvme.bytes_s / 1e9:.1f} GB/s + {fit.nvme.fixed_s * 1e3:.2f} ms "
        f"({'measured now' if fit.measured else 'recorded'})"
    )
    cases = [case for case in (TUNING if options.tuning else JUDGED) if _wanted(case, options)]
    results = _run_all(cases, fit, options.processes, console)
    verdicts = judge(results)
    _print(console, results, verdicts)
    path = _write(options.out, fit, results, verdicts)
    plot = _plot(options.out, results)
    console.print(f"written to {path}" + (f" and {plot}" if plot else ""))
    if not all(verdict.holds for verdict in verdicts):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where files go")
    parser.add_argument("--traces", default="", help="only these, by name, comma between them")
    parser.add_argument("--tuning", action="store_true", help="the tuning set, not the judged one")
    parser.add_argument(
        "--costs",
        choices=("measured", "recorded"),
        default="measured",
        help="measure this machine first, or use what was recorded once (repeats exactly)",
    )
    parser.add_argument(
        "--disk", type=Path, default=Path("build"), help="a folder on the disk to be measured"
    )
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="side by side"
    )
    return parser.parse_args()


def _wanted(case: Case, options: argparse.Namespace) -> bool:
    return not options.traces or case.name in options.traces.split(",")


def _run_all(cases: Sequence[Case], fit: Fit, processes: int, console: Console) -> list[Result]:
    """Every case under every policy, in the order of the cases."""
    wanted = [(case, policy) for case in cases for policy in Policy]
    done: dict[tuple[str, Policy], Result] = {}
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        ProcessPoolExecutor(max_workers=max(1, processes)) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(wanted))
        futures = {pool.submit(run, case, policy, fit): (case, policy) for case, policy in wanted}
        for future in as_completed(futures):
            case, policy = futures[future]
            done[case.name, policy] = future.result()
            progress.update(task, advance=1, description=f"{case.name}, {policy}")
    return [done[case.name, policy] for case, policy in wanted]


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.trace for result in results))


def _judge_trace(name: str, results: Sequence[Result]) -> Iterator[Verdict]:
    of_trace = [result for result in results if result.trace == name]
    ours = next(result for result in of_trace if result.policy == Policy.OURS)
    for metric in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s"):
        best = min(of_trace, key=lambda result: float(getattr(result, metric)))
        value, least = float(getattr(ours, metric)), float(getattr(best, metric))
        yield Verdict(name, metric, value, least, best.policy, value / least)
    best = max(of_trace, key=lambda result: result.goodput_per_s)
    most = best.goodput_per_s
    ratio = most / ours.goodput_per_s if ours.goodput_per_s else (1.0 if not most else 1e9)
    yield Verdict(name, "goodput_per_s", ours.goodput_per_s, most, best.policy, ratio)


def _print(console: Console, results: Sequence[Result], verdicts: Sequence[Verdict]) -> None:
    table = Table("trace", "policy", "P50 s", "P95 s", "P99 s", "goodput/s", "hit", "restored")
    for name in _names(results):
        for result in results:
            if result.trace == name:
                table.add_row(
                    name,
                    result.policy,
                    f"{result.ttft_p50_s:.3f}",
                    f"{result.ttft_p95_s:.3f}",
                    f"{result.ttft_p99_s:.3f}",
                    f"{result.goodput_per_s:.3f}",
                    f"{result.hit_share:.2f}",
                    f"{result.restored_share:.2f}",
                    style="bold" if result.policy == Policy.OURS else None,
                )
        table.add_section()
    console.print(table)
    lost = [verdict for verdict in verdicts if not verdict.holds]
    for verdict in lost:
        console.print(
            f"[red]{verdict.trace}: {verdict.metric} {verdict.ours:.3f}, "
            f"{verdict.best_policy} has {verdict.best:.3f} ({verdict.ratio:.3f})"
        )
    worst = max(verdicts, key=lambda verdict: verdict.ratio)
    console.print(
        f"{len(verdicts) - len(lost)} of {len(verdicts)} bounds hold; the furthest from the best "
        f"is {worst.trace} {worst.metric} at {worst.ratio:.3f} of it"
    )


def _write(out: Path, fit: Fit, results: Sequence[Result], verdicts: Sequence[Verdict]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "simulate.json"
    content = {
        "fit": asdict(fit),
        "within": WITHIN,
        "results": [asdict(result) for result in results],
        "verdicts": [{**asdict(verdict), "holds": verdict.holds} for verdict in verdicts],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _plot(out: Path, results: Sequence[Result]) -> Path | None:
    """P50, P95 and P99 by trace; None where matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - of the development group
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names, policies = _names(results), list(Policy)
    figure, axes = plt.subplots(1, 3, figsize=(18, 0.5 * len(names) + 2), sharey=True)
    for axis, metric in zip(axes, ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s"), strict=True):
        for offset, policy in enumerate(policies):
            values = [
                getattr(result, metric)
                for name in names
                for result in results
                if result.trace == name and result.policy == policy
            ]
            places = [number + offset * 0.2 for number in range(len(names))]
            axis.barh(places, values, height=0.19, label=policy.value)
        axis.set_xscale("log")
        axis.set_xlabel(f"{metric[5:8].upper()} of the time to first token, seconds (log)")
        axis.grid(visible=True, axis="x", alpha=0.3)
    axes[0].set_yticks([number + 0.3 for number in range(len(names))], names)
    axes[0].invert_yaxis()
    axes[0].legend(loc="best", fontsize="small")
    figure.tight_layout()
    path = out / "simulate.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
