"""What the demo says at the end: a table for people and `build/demo.json` for machines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.demo.processes import DemoFailure


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what was done, what was seen, whether it is what must be."""

    name: str
    seen: str
    passed: bool


@dataclass(slots=True)
class Report:
    """Collects steps and figures; writes them however far the demo came."""

    console: Console
    steps: list[Step] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, passed: bool, seen: str) -> None:
        """Record a step and say it at once. A failed one does not end the demo by itself."""
        self.steps.append(Step(name, seen, passed))
        mark = "[green]ok  [/]" if passed else "[red]FAIL[/]"
        self.console.print(f"{mark} {name}: [dim]{seen}[/]")

    def require(self, passed: bool, what: str) -> None:
        """End the demo when going on would make no sense."""
        if not passed:
            raise DemoFailure(what)

    @property
    def passed(self) -> bool:
        return bool(self.steps) and all(step.passed for step in self.steps)

    def write(self, out: Path) -> None:
        """Write the figures and steps as JSON."""
        out.parent.mkdir(parents=True, exist_ok=True)
        message = self.figures | {
            "passed": self.passed,
            "steps": [
                {"name": step.name, "passed": step.passed, "seen": step.seen} for step in self.steps
            ],
        }
        out.write_text(json.dumps(message, indent=2, ensure_ascii=False) + "\n")

    def show(self) -> None:
        """Print the table of steps."""
        table = Table(title="Strongroom demo", show_lines=False)
        table.add_column("step")
        table.add_column("seen")
        table.add_column("", justify="center")
        for step in self.steps:
            mark = "[green]ok[/]" if step.passed else "[red]FAIL[/]"
            table.add_row(step.name, step.seen, mark)
        self.console.print(table)
