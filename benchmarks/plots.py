"""One picture a suite: every row's value with its spread, and its bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.rows import Row

_REACHED = "#2a7f62"
_MISSED = "#b03a2e"
_FREE = "#5d6d7e"


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: values as a share of their bounds, so that unlike units stand side by side.

    A row without a bound is drawn against its own value.
    """
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        scale = row.bound or row.value or 1.0
        low, high = sorted((row.low / scale, row.high / scale))
        axes.barh(place, row.value / scale, color=_colour(row), height=0.6)
        axes.plot([low, high], [place, place], color="black", linewidth=1.5)
        axes.annotate(
            _text(row),
            (0, place),
            xytext=(6, -3),
            textcoords="offset points",
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
        )
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share of the bound (dashed); the line is the spread over the rounds")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _colour(row: Row) -> str:
    if row.bound is None:
        return _FREE
    return _REACHED if row.ok else _MISSED


def _text(row: Row) -> str:
    bound = "" if row.bound is None else f"  (bound {row.sense} {row.bound:g})"
    return f"{row.value:g}{bound}"
