"""Figures as SVG to stand inside a page: no ground of their own, ink in the page's colour, middle tones else."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dlcft.bench.report.summary import Row, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Each has a contrast of at least 3 with a white page and with a nearly black one.
PALETTE = ("#3b82d6", "#dd6128", "#2e9a59", "#cf4b86", "#8a6fd6", "#a87f12", "#17969f", "#d14545", "#a3684b", "#6b8e23")
LEVEL = "#7d8590"
# matplotlib's name of a marker, and the same in a legend's box of 24 × 12
MARKERS = {
    "o": "M12 2.5a3.5 3.5 0 1 0 .01 0z",
    "s": "M9 3h6v6h-6z",
    "^": "M12 2l4 7.5h-8z",
    "D": "M12 1.5l4.5 4.5-4.5 4.5-4.5-4.5z",
    "v": "M12 10l4-7.5h-8z",
    "X": "M8.5 4l1.5-1.5 2 2 2-2 1.5 1.5-2 2 2 2-1.5 1.5-2-2-2 2-1.5-1.5 2-2z",
}
TRAINING, REMEMBERING = PALETTE[0], PALETTE[1]
_INK = "#010203"  # replaced by the page's colour of text
_FEW = 6  # tasks: a heat map of so many shows its numbers
_SHARP = 20  # tasks: cells of a larger heat map become a picture


@dataclass(frozen=True)
class Style:
    """How a row is drawn, the same in every figure of a section.

    Attributes:
        colour: one of `PALETTE`, or `LEVEL`.
        marker: one of `MARKERS`.
        dashes: of a level that all tasks together reach; none for a curve.
        hollow: training had not converged.
    """

    colour: str
    marker: str
    dashes: tuple[float, ...]
    hollow: bool

    @property
    def fill(self) -> str:
        """The marker's inside."""
        return "none" if self.hollow else self.colour

    @property
    def outline(self) -> str:
        """The marker for a legend."""
        return MARKERS[self.marker]


def style(row: Row, place: int, variant: int) -> Style:
    """Of a row whose method has this place among the methods of a report, and this one among its variants."""
    marker = list(MARKERS)[(place + variant) % len(MARKERS)]
    if row.experiment.joint:
        return Style(LEVEL, marker, (1.5, 2) if row.recipe.linear else (6, 3), bool(row.unconverged))
    return Style(PALETTE[place % len(PALETTE)], marker, (), bool(row.unconverged))


def curves(
    section: Sequence[Row],
    styles: Sequence[Style],
    points: Callable[[Row], list[tuple[int, Spread]]],
    identity: str,
    *,
    axis: str,
    label: str,
) -> str:
    """Accuracy over tasks: the mean over seeds and a band of one standard deviation; Joint as a level."""
    with _drawing(size=10):
        figure, axes = _axes(5.2, 3.3)
        last = 1
        for index, (row, drawn) in enumerate(zip(section, styles, strict=True)):
            known = points(row)
            if known:
                last = max(last, known[-1][0])
                _curve(axes, known, drawn, f"{identity}-row-{index}")
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(axis)
        _whole_numbers(axes, last)
        axes.grid(axis="y", color="#808080", alpha=0.25, linewidth=0.6)
        return _svg(figure, identity, label)


def heat_map(matrix: Tensor, identity: str, label: str) -> str:
    """An accuracy matrix: a row for each task learned, a column for each task tested; empty where it was not."""
    tasks = len(matrix)
    with _drawing():
        from matplotlib import colormaps

        figure, axes = _axes(2.1, 2.1, left=0.17, right=0.95, bottom=0.17, top=0.95)
        shown = np.ma.masked_invalid(matrix.numpy())
        axes.pcolormesh(shown, cmap="viridis", vmin=0, vmax=1, edgecolors="none", rasterized=tasks > _SHARP)
        for row, column in (~matrix.isnan()).nonzero().tolist() if tasks <= _FEW else []:
            value = float(matrix[row, column])
            red, green, blue, _ = colormaps["viridis"](value)
            ink = "#111111" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "#ffffff"
            place = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(column + 0.5, row + 0.5, f"{100 * value:.0f}", color=ink, **place)  # type: ignore[arg-type]
        ticks = [0, tasks - 1] if tasks > _FEW else list(range(tasks))
        axes.set_xticks([tick + 0.5 for tick in ticks], [str(tick + 1) for tick in ticks])
        axes.set_yticks([tick + 0.5 for tick in ticks], [str(tick + 1) for tick in ticks])
        axes.set_xlabel("tested on task", labelpad=1)
        axes.set_ylabel("after task")
        axes.yaxis.set_label_coords(-0.12, 0.5)  # whatever the width of the numbers
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        return _svg(figure, identity, label)


def bars(
    names: Sequence[str],
    parts: Sequence[tuple[Sequence[float], str]],
    write: Callable[[float], str],
    identity: str,
    *,
    axis: str,
    label: str,
) -> str:
    """A bar for each name, of one or several parts (values and colour), with its sum written beside it."""
    with _drawing():
        height = 0.55 + 0.25 * len(names)
        longest = max(len(name) for name in names)
        figure, axes = _axes(4.6, height, left=min(0.05 + 0.0165 * longest, 0.5), right=0.85, bottom=0.46 / height)
        left = [0.0] * len(names)
        for values, colour in parts:
            axes.barh(range(len(names)), values, left=left, color=colour, height=0.66)
            left = [start + value for start, value in zip(left, values, strict=True)]
        for place, value in enumerate(left):
            axes.annotate(write(value), (value, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(names)), [name if len(name) < 29 else f"{name[:27]}…" for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(axis)
        axes.tick_params(axis="y", length=0)
        axes.locator_params(axis="x", nbins=5)
        return _svg(figure, identity, label)


def increases(section: Sequence[Row], styles: Sequence[Style], identity: str, label: str) -> str | None:
    """What each row's memory predicted against what was measured; None where no row has both."""
    measured = [increase(row, in_loss=has_losses(section)) for row in section]
    if not any(measured):
        return None
    with _drawing():
        figure, axes = _axes(4.6, 3.1, left=0.17)
        for pairs, drawn in zip(measured, styles, strict=True):
            x, y = [x for x, _ in pairs], [y for _, y in pairs]
            axes.plot(x, y, drawn.marker, color=drawn.colour, markersize=5, markerfacecolor=drawn.fill)
        predicted, found = ([pair[side] for pairs in measured for pair in pairs] for side in (0, 1))
        if has_losses(section):
            ends = min(predicted + found), max(predicted + found)
            axes.plot(ends, ends, color=_INK, alpha=0.5, linewidth=0.8)
            if _wide(predicted + found):
                axes.set(xscale="log", yscale="log")
                _plain(axes.xaxis, axes.yaxis)
        elif _wide(predicted):
            axes.set(xscale="log")
            _plain(axes.xaxis)
        axes.set_xlabel("predicted rise of the old tasks' loss")
        axes.set_ylabel("measured rise" if has_losses(section) else "measured drop of accuracy, points")
        axes.grid(color="#808080", alpha=0.25, linewidth=0.6)
        return _svg(figure, identity, label)


def curve(row: Row) -> list[tuple[int, Spread]]:
    """Accuracy after so many tasks over seeds, where every seed was tested."""
    return _over_seeds([result.curve for result in row.results])


def probe(row: Row) -> list[tuple[int, Spread]]:
    """The same of the features' nearest neighbours."""
    return _over_seeds([result.knn for result in row.results])


def mean_matrix(row: Row) -> Tensor | None:
    """The accuracy matrix, the mean over seeds."""
    matrices = [result.matrix for result in row.results]
    known = [matrix for matrix in matrices if matrix is not None]
    return torch.stack(known).mean(0) if known and len(known) == len(matrices) else None


def has_losses(section: Sequence[Row]) -> bool:
    """Whether the rise of the loss itself was measured."""
    return any("measured_increase" in entry for row in section for result in row.results for entry in result.history)


def increase(row: Row, *, in_loss: bool) -> list[tuple[float, float]]:
    """Predicted and measured after each task: the old tasks' rise of loss, or their mean drop of accuracy in points."""
    found = []
    for result in row.results:
        matrix = result.matrix
        for task, entry in enumerate(result.history):
            predicted = entry.get("predicted_increase")
            measured = entry.get("measured_increase") if in_loss else None
            if not in_loss and matrix is not None and task:
                measured = 100 * float((matrix[task - 1] - matrix[task])[:task].mean())
            if predicted is not None and measured is not None and math.isfinite(predicted + measured):
                found.append((predicted, measured))
    return found


def _over_seeds(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, Spread]]:
    every = [dict(one) for one in curves]
    spreads = [(task, Spread.of(values.get(task) for values in every)) for task in every[0]]
    return [(task, spread) for task, spread in spreads if spread is not None]


def _curve(axes: Axes, points: Sequence[tuple[int, Spread]], drawn: Style, name: str) -> None:
    tasks, means = [task for task, _ in points], [100 * spread.mean for _, spread in points]
    if drawn.dashes:
        axes.axhline(means[-1], color=drawn.colour, linestyle=(0, drawn.dashes), linewidth=1.6, gid=name)
        return
    axes.plot(
        tasks,
        means,
        color=drawn.colour,
        linewidth=1.6,
        marker=drawn.marker,
        markersize=5,
        markerfacecolor=drawn.fill,
        markevery=math.ceil(len(tasks) / 20),
        gid=name,
    )
    if all(spread.sd is not None for _, spread in points):
        low, high = ([100 * (spread.mean + side * (spread.sd or 0)) for _, spread in points] for side in (-1, 1))
        axes.fill_between(tasks, low, high, color=drawn.colour, alpha=0.14, linewidth=0, gid=f"{name}-band")


def _drawing(size: float = 9) -> AbstractContextManager[Any]:
    import matplotlib as mpl

    return mpl.rc_context(
        {
            "axes.edgecolor": _INK,
            "axes.labelcolor": _INK,
            "axes.linewidth": 0.7,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "font.family": ["DejaVu Sans"],
            "font.size": size,
            "svg.fonttype": "none",
            "svg.hashsalt": "dlcft",
            "text.color": _INK,
            "text.parse_math": False,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
    )


def _axes(
    width: float, height: float, *, left: float = 0.13, right: float = 0.98, bottom: float = 0.15, top: float = 0.97
) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=left, right=right, bottom=bottom, top=top)
    return figure, figure.add_subplot()


def _whole_numbers(axes: Axes, tasks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.set_xlim(1 - 0.03 * tasks, tasks + 0.03 * tasks)


def _wide(values: Sequence[float]) -> bool:
    """Whether values ask for a logarithmic axis and allow it."""
    return min(values) > 0 and max(values) > 30 * min(values)


def _plain(*axes: Axis) -> None:
    """Numbers of a logarithmic axis as text, not as formulas."""
    for axis in axes:
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")


def _svg(figure: Figure, identity: str, label: str) -> str:
    """As an element of a page: names unique in it, nothing that points out of it."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("xlink:href", "href").replace(_INK, "currentColor")
    text = re.sub(r'(\sid="|href="#|url\(#)(?!' + re.escape(identity) + ")", rf"\g<1>{identity}-", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    name = html.escape(label, quote=True)
    return re.sub(r"^<svg[^>]*>", f'<svg {box[0]} role="img" aria-label="{name}">', text)
