"""The picture of a comparison: how accurate each method is, against its size on disk and its time."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlcft.comparison.compare import Comparison
from dlcft.pages import in_bytes
from dlcft.pages.drawing import LEVEL, PALETTE, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("svg", "png")
_CLOSED, _TRAINED, _CHOICE = PALETTE[0], PALETTE[1], PALETTE[2]
Point = tuple[float, float]
# shares of the axes: the height of a line, the width of a letter, and how far apart bars stand
_LINE, _LETTER, _STEP = 0.05, 0.017, 0.014


def picture(found: Comparison, kind: str) -> bytes:
    """The picture as a file of a kind in `FORMATS`."""
    with drawing():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

        figure = Figure(figsize=(9.2, 4.2), facecolor="white")
        left, right = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(left=0.075, right=0.985, bottom=0.13, top=0.83, wspace=0.06)
        _panel(left, found, [row.bytes for row in found.rows], "on disk")
        seconds = [max(row.seconds, 1e-3) for row in found.rows]
        _panel(right, found, seconds, f"to learn all {found.total:,} samples")
        left.xaxis.set_major_locator(LogLocator(numticks=6))
        left.xaxis.set_major_formatter(lambda value, _: in_bytes(value))
        right.xaxis.set_major_locator(FixedLocator(_ticks(right.get_xlim()[1])))
        right.xaxis.set_major_formatter(lambda value, _: _duration(value))
        for axes in (left, right):
            axes.xaxis.set_minor_formatter(NullFormatter())
        left.set_ylabel("right answers to samples not learned, %")
        figure.suptitle(f"Recommended: {found.recommended}", x=0.075, y=0.97, ha="left", weight="bold")
        figure.text(0.075, 0.88, _said(found), color="#59636e", size=8)
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        return file.getvalue()


def _said(found: Comparison) -> str:
    samples = f"{found.samples:,} of {found.total:,} samples, {found.folds} folds"
    bars = "bars: standard error of the difference to the recommended one, on the same samples"
    return f"{samples}; {bars}" + ("   ◆ trained" if not all(row.closed_form for row in found.rows) else "")


def _panel(axes: Axes, found: Comparison, places: Sequence[float], name: str) -> None:
    """One point a method: its difference to the recommended one stands at the accuracy of that one."""
    level = 100 * found.row(found.recommended).accuracy
    heights = [level + 100 * row.difference for row in found.rows]
    errors = [100 * row.difference_error for row in found.rows]
    low = min(height - error for height, error in zip(heights, errors, strict=True))
    high = max(height + error for height, error in zip(heights, errors, strict=True))
    room = max(0.08 * (high - low), 0.5)
    bottom, height = low - room, high - low + 2 * room
    left, width = math.log10(min(places)), max(1.0, 1.3 * math.log10(max(places) / min(places)))
    wide = [(math.log10(x) - left) / width for x in places]
    points = [(x, (y - bottom) / height) for x, y in zip(wide, heights, strict=True)]
    reach = [error / height for error in errors]
    points = _beside(points, reach)
    axes.set_xscale("log")
    axes.set(xlim=(10 ** (left - 0.05 * width), 10 ** (left + width)), ylim=(bottom, bottom + height), xlabel=name)
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 8.5}
    names = _names(points, reach, [row.method for row in found.rows])
    for row, (x, _), y, error, place in zip(found.rows, points, heights, errors, names, strict=True):
        choice, at = row.method == found.recommended, 10 ** (left + x * width)
        colour = _CHOICE if choice else _CLOSED if row.closed_form else _TRAINED
        options: dict[str, Any] = {"fmt": "o" if row.closed_form else "D", "color": colour, "markersize": 6}
        axes.errorbar(at, y, None if choice else error, elinewidth=1.2, capsize=2.5, **options)
        weight = "bold" if choice else "normal"
        axes.annotate(
            row.method,
            (at, bottom + place * height),
            xytext=(8, 0),
            annotation_clip=False,
            weight=weight,
            color=colour,
            **beside,
        )
    axes.axhline(level, color=_CHOICE, linewidth=0.8, alpha=0.5)
    axes.grid(color=LEVEL, alpha=0.2, linewidth=0.6)


def _beside(points: Sequence[Point], reach: Sequence[float]) -> list[Point]:
    """Points, in shares of the axes, moved to the right until no two bars, each of its reach, cross."""
    found: list[Point] = []
    for (x, y), own in zip(points, reach, strict=True):
        near = [other for other, far in zip(found, reach, strict=False) if abs(y - other[1]) < own + far + _STEP]
        while any(abs(x - other) < 0.9 * _STEP for other, _ in near):
            x += _STEP
        found.append((x, y))
    return found


def _names(points: Sequence[Point], reach: Sequence[float], names: Sequence[str]) -> list[float]:
    """The height of the name beside each point: as near as there is room between the bars and other names."""
    half = _LINE / 2
    taken = [(x - _STEP, x + _STEP, max(own, half), y) for (x, y), own in zip(points, reach, strict=True)]
    heights: list[float] = []
    for (x, y), name in zip(points, names, strict=True):
        start, end = x + 1.5 * _STEP, x + 1.5 * _STEP + _LETTER * len(name)
        crossing = [(own, height) for left, right, own, height in taken if left < end and start < right]
        steps = (sign * step * half for step in range(4 * len(points)) for sign in (-1, 1))
        free = (y + step for step in steps if all(abs(y + step - other) > half + own for own, other in crossing))
        height = next(free, y)
        taken.append((start, end, 0.98 * half, height))
        heights.append(height)
    return heights


def _ticks(most: float) -> list[float]:
    """Round durations, in seconds, that are whole in the unit that they are told in."""
    return [x for x in (0.01, 0.1, 1, 5, 20, 60, 300, 1200, 3600, 18000, 86400) if x <= most]


def _duration(seconds: float) -> str:
    unit, name = next((unit for unit in ((3600, "h"), (60, "min")) if seconds >= unit[0]), (1, "s"))
    return f"{seconds / unit:g} {name}"
