"""The picture of a comparison: how accurate each method is, against its size on disk and its time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlcft.pages import in_bytes, in_seconds
from dlcft.pages.drawing import LEVEL, PALETTE, drawing
from dlcft.update.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("svg", "png")
_CLOSED, _TRAINED, _CHOICE = PALETTE[0], PALETTE[1], PALETTE[2]
_LINE = 0.052  # of the axes' height: how far apart names stand at least


def picture(found: Comparison, kind: str) -> bytes:
    """The picture as a file of a kind in `FORMATS`."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.2, 4.2), facecolor="white")
        left, right = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(left=0.075, right=0.985, bottom=0.13, top=0.83, wspace=0.06)
        _panel(left, found, [row.bytes for row in found.rows], "on disk")
        _panel(right, found, [row.seconds for row in found.rows], f"to learn all {found.total:,} samples")
        left.set_ylabel("right answers to samples not learned, %")
        left.xaxis.set_major_formatter(lambda value, _: in_bytes(value))
        right.xaxis.set_major_formatter(lambda value, _: in_seconds(value))
        figure.suptitle(f"Recommended: {found.recommended}", x=0.075, y=0.97, ha="left", weight="bold")
        figure.text(0.075, 0.88, _said(found), color="#59636e")
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        return file.getvalue()


def _said(found: Comparison) -> str:
    words = f"{found.samples:,} of {found.total:,} samples, {found.folds} folds, ± one standard error"
    closed = "   ● closed form" if any(row.closed_form for row in found.rows) else ""
    return words + closed + ("   ◆ trained, one fold" if not all(row.closed_form for row in found.rows) else "")


def _panel(axes: Axes, found: Comparison, places: Sequence[float], name: str) -> None:
    axes.set_xscale("log")
    for row, x in zip(found.rows, places, strict=True):
        colour = _CHOICE if row.method == found.recommended else _CLOSED if row.closed_form else _TRAINED
        shape = "o" if row.closed_form else "D"
        axes.errorbar(
            x, 100 * row.accuracy, 100 * row.error, fmt=shape, color=colour, markersize=6, elinewidth=1.2, capsize=2.5
        )
    low = min(100 * (row.accuracy - row.error) for row in found.rows)
    high = max(100 * (row.accuracy + row.error) for row in found.rows)
    room = 0.06 * max(high - low, 1.0)
    axes.set_ylim(low - room, high + room)
    axes.set_xlim(min(places) / 1.8, max(places) * max(4.0, (max(places) / min(places)) ** 0.4))
    heights = _apart([100 * row.accuracy for row in found.rows], _LINE * (high - low + 2 * room))
    for row, x, height in zip(found.rows, places, heights, strict=True):
        choice = row.method == found.recommended
        axes.annotate(
            row.method,
            (x, 100 * row.accuracy),
            xytext=(1.02 * x, height),
            textcoords="data",
            va="center",
            weight="bold" if choice else "normal",
            annotation_clip=False,
        )
    axes.grid(color=LEVEL, alpha=0.2, linewidth=0.6)
    axes.set_xlabel(name)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights, from the highest on, moved down until no two are nearer than `least`."""
    found: list[float] = []
    for height in heights:
        found.append(height if not found else min(height, found[-1] - least))
    return found
