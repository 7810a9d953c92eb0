"""The figures of a report: accuracy over tasks, accuracy matrices, and what memories predict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dlcft.bench.report.artefacts import Points
from dlcft.bench.report.summary import Row, Spread
from dlcft.bench.spectrum import Trace
from dlcft.pages.drawing import INK, LEVEL, PALETTE, drawing, plain_numbers, plot_axes, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
LOSS_COLOURS = {"cross-entropy": PALETTE[1], "mse": PALETTE[0]}
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


def curves(points: Sequence[Points], styles: Sequence[Style | None], identity: str, *, axis: str, label: str) -> str:
    """Figures over tasks: the mean over seeds and a band of one standard deviation; Joint as a level."""
    with drawing(size=10):
        figure, axes = plot_axes(5.2, 3.3)
        last = 1
        for index, (known, drawn) in enumerate(zip(points, styles, strict=True)):
            if known and drawn:
                last = max(last, known[-1][0])
                _curve(axes, known, drawn, f"{identity}-row-{index}")
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(axis)
        _whole_numbers(axes, last)
        axes.grid(axis="y", color="#808080", alpha=0.25, linewidth=0.6)
        return to_svg(figure, identity, label)


def eigenvalues(traces: Sequence[Trace], identity: str, label: str) -> str:
    """The largest eigenvalue while a network is trained by each loss, and below it the losses; mean over seeds."""
    with drawing():
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator

        figure = Figure(figsize=(4.6, 4.4))
        figure.subplots_adjust(left=0.17, right=0.98, bottom=0.11, top=0.98, hspace=0.12)
        above, below = figure.subplots(2, 1, sharex=True)
        for loss, colour in LOSS_COLOURS.items():
            some = [trace.records for trace in traces if trace.spectrum.loss == loss]
            if not some:
                continue
            epochs = [record["epochs"] for record in some[0]]

            def means(name: str, some: list[list[dict[str, float]]] = some) -> list[float]:
                return [
                    sum(values) / len(values) for values in zip(*([r[name] for r in one] for one in some), strict=True)
                ]

            above.plot(epochs, means("eigenvalue"), color=colour, marker="o", markersize=3, linewidth=1.6)
            below.plot(epochs, means("train_loss"), color=colour, linewidth=1.6)
            below.plot(epochs, means("test_loss"), color=colour, linewidth=1.4, linestyle=(0, (4, 2)))
        for axes, name in ((above, "largest eigenvalue"), (below, "loss")):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            plain_numbers(axes.yaxis)
            axes.set_ylabel(name)
            axes.yaxis.set_label_coords(-0.13, 0.5)
            axes.grid(axis="y", color="#808080", alpha=0.25, linewidth=0.6)
        below.set_xlabel("epochs")
        return to_svg(figure, identity, label)


def heat_map(matrix: Tensor, identity: str, label: str) -> str:
    """An accuracy matrix: a row for each task learned, a column for each task tested; empty where it was not."""
    tasks = len(matrix)
    with drawing():
        from matplotlib import colormaps

        figure, axes = plot_axes(2.1, 2.1, left=0.17, right=0.95, bottom=0.17, top=0.95)
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
        return to_svg(figure, identity, label)


def increases(section: Sequence[Row], styles: Sequence[Style], identity: str, label: str) -> str | None:
    """What each row's memory predicted against what was measured; None where no row has both."""
    measured = [increase(row, in_loss=has_losses(section)) for row in section]
    if not any(measured):
        return None
    with drawing():
        figure, axes = plot_axes(4.6, 3.1, left=0.17)
        for pairs, drawn in zip(measured, styles, strict=True):
            x, y = [x for x, _ in pairs], [y for _, y in pairs]
            axes.plot(x, y, drawn.marker, color=drawn.colour, markersize=5, markerfacecolor=drawn.fill)
        predicted, found = ([pair[side] for pairs in measured for pair in pairs] for side in (0, 1))
        if has_losses(section):
            ends = min(predicted + found), max(predicted + found)
            axes.plot(ends, ends, color=INK, alpha=0.5, linewidth=0.8)
            if _wide(predicted + found):
                axes.set(xscale="log", yscale="log")
                plain_numbers(axes.xaxis, axes.yaxis)
            elif _spread_out(predicted + found):
                far = max(map(abs, predicted + found))
                for axis in (axes.set_xscale, axes.set_yscale):
                    axis("symlog", linthresh=10.0 ** (math.floor(math.log10(far)) - 1))
                plain_numbers(axes.xaxis, axes.yaxis)
        elif _wide(predicted):
            axes.set(xscale="log")
            plain_numbers(axes.xaxis)
        axes.set_xlabel("predicted rise of the old tasks' loss")
        axes.set_ylabel("measured rise" if has_losses(section) else "measured drop of accuracy, points")
        axes.grid(color="#808080", alpha=0.25, linewidth=0.6)
        return to_svg(figure, identity, label)


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


def _whole_numbers(axes: Axes, tasks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    axes.set_xlim(1 - 0.03 * tasks, tasks + 0.03 * tasks)


def _spread_out(values: Sequence[float]) -> bool:
    """Whether values of both signs ask for an axis that is logarithmic away from zero."""
    sizes = [abs(value) for value in values if value]
    return bool(sizes) and max(sizes) > 30 * statistics.median(sizes)


def _wide(values: Sequence[float]) -> bool:
    """Whether values ask for a logarithmic axis and allow it."""
    return min(values) > 0 and max(values) > 30 * min(values)
