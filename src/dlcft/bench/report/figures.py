"""The figures of a report: accuracy over tasks, accuracy matrices, and the predictions of memories."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dlcft.bench.report.summary import Points, Row
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
GRID: dict[str, Any] = {"color": "#808080", "alpha": 0.25, "linewidth": 0.6}
LOSS_COLOURS = {"cross-entropy": PALETTE[1], "mse": PALETTE[0]}
_FEW = 6  # tasks: a heat map of so many shows its numbers
_BRIGHT = 0.539  # accuracy: the colours above it need dark numbers
_SHARP = 20  # tasks: cells of a larger heat map become a picture


@dataclass(frozen=True)
class Style:
    """How a row is drawn, the same in every figure of a section."""

    colour: str
    marker: str  # one of `MARKERS`
    dashes: tuple[float, ...]  # of a level that all tasks together reach; none for a curve
    hollow: bool  # training had not converged

    @property
    def plotted(self) -> dict[str, Any]:
        """Arguments for matplotlib."""
        fill = "none" if self.hollow else self.colour
        return {"color": self.colour, "marker": self.marker, "markersize": 5, "markerfacecolor": fill}


def style(row: Row, place: int, variant: int) -> Style:
    """Of a row whose method has this place among the methods of a report, and this one among its variants."""
    marker = list(MARKERS)[(place + variant) % len(MARKERS)]
    if row.experiment.joint:
        return Style(LEVEL, marker, (1.5, 2) if row.recipe.linear else (6, 3), bool(row.unconverged))
    return Style(PALETTE[place % len(PALETTE)], marker, (), bool(row.unconverged))


def curves(points: Sequence[Points], styles: Sequence[Style | None], identity: str, axis: str, label: str) -> str:
    """Figures over tasks: the mean over seeds and a band of one standard deviation; Joint as a level."""
    with drawing(size=10):
        from matplotlib.ticker import MaxNLocator

        figure, axes = plot_axes(5.2, 3.3)
        for index, (known, drawn) in enumerate(zip(points, styles, strict=True)):
            if known and drawn:
                _curve(axes, known, drawn, f"{identity}-row-{index}")
        last = max(task for known in points for task, _ in known)
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(axis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
        axes.set_xlim(1 - 0.03 * last, last + 0.03 * last)
        axes.grid(axis="y", **GRID)
        return to_svg(figure, identity, label)


def _curve(axes: Axes, points: Points, drawn: Style, name: str) -> None:
    tasks, means = [task for task, _ in points], [100 * spread.mean for _, spread in points]
    if drawn.dashes:
        axes.axhline(means[-1], color=drawn.colour, linestyle=(0, drawn.dashes), linewidth=1.6, gid=name)
        return
    axes.plot(tasks, means, linewidth=1.6, markevery=math.ceil(len(tasks) / 20), gid=name, **drawn.plotted)
    if all(spread.sd is not None for _, spread in points):
        low, high = ([100 * (spread.mean + side * (spread.sd or 0)) for _, spread in points] for side in (-1, 1))
        axes.fill_between(tasks, low, high, color=drawn.colour, alpha=0.14, linewidth=0, gid=f"{name}-band")


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
            names = ("epochs", "eigenvalue", "train_loss", "test_loss")
            means = {name: np.mean([[record[name] for record in one] for one in some], axis=0) for name in names}
            style: dict[str, Any] = {"color": colour, "linewidth": 1.6}
            above.plot(means["epochs"], means["eigenvalue"], marker="o", markersize=3, **style)
            below.plot(means["epochs"], means["train_loss"], **style)
            below.plot(means["epochs"], means["test_loss"], linestyle=(0, (4, 2)), **style)
        for axes, name in ((above, "largest eigenvalue"), (below, "loss")):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            plain_numbers(axes.yaxis)
            axes.set_ylabel(name)
            axes.yaxis.set_label_coords(-0.13, 0.5)
            axes.grid(axis="y", **GRID)
        below.set_xlabel("epochs")
        return to_svg(figure, identity, label)


def heat_map(matrix: Tensor, identity: str, label: str) -> str:
    """An accuracy matrix: a row for each task learned, a column for each task tested; empty where it was not."""
    tasks = len(matrix)
    with drawing():
        figure, axes = plot_axes(2.1, 2.1, left=0.17, right=0.95, bottom=0.17, top=0.95)
        shown = np.ma.masked_invalid(matrix.numpy())
        axes.pcolormesh(shown, cmap="viridis", vmin=0, vmax=1, edgecolors="none", rasterized=tasks > _SHARP)
        for row, column in (~matrix.isnan()).nonzero().tolist() if tasks <= _FEW else []:
            value = float(matrix[row, column])
            ink = "#111111" if value > _BRIGHT else "#ffffff"
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


def increases(section: Sequence[Row], styles: Sequence[Style | None], identity: str, label: str) -> str | None:
    """The rise of loss that each row's memory predicted, and the measured one; None where no row has both."""
    in_loss = has_losses(section)
    measured = [increase(row, in_loss=in_loss) for row in section]
    if not any(measured):
        return None
    with drawing():
        figure, axes = plot_axes(4.6, 3.1, left=0.17)
        for pairs, style in zip(measured, styles, strict=True):
            assert style is not None
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], linestyle="none", **style.plotted)
        predicted, found = ([pair[side] for pairs in measured for pair in pairs] for side in (0, 1))
        if in_loss:
            ends = min(predicted + found), max(predicted + found)
            axes.plot(ends, ends, color=INK, alpha=0.5, linewidth=0.8)
        scale = _scale(predicted + found if in_loss else predicted)
        if scale:
            axes.set_xscale(**scale)
            plain_numbers(axes.xaxis)
            if in_loss:
                axes.set_yscale(**scale)
                plain_numbers(axes.yaxis)
        axes.set_xlabel("predicted rise of the old tasks' loss")
        axes.set_ylabel("measured rise" if in_loss else "measured drop of accuracy, points")
        axes.grid(**GRID)
        return to_svg(figure, identity, label)


def _scale(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis where values differ by much; where they have both signs, linear around zero."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes or sizes[-1] <= 30 * (sizes[0] if min(values) > 0 else statistics.median(sizes)):
        return {}
    if min(values) > 0:
        return {"value": "log"}
    return {"value": "symlog", "linthresh": 10.0 ** (math.floor(math.log10(sizes[-1])) - 1)}


def mean_matrix(row: Row) -> Tensor | None:
    """The accuracy matrix, the mean over seeds."""
    matrices = [matrix for matrix in (result.matrix for result in row.results) if matrix is not None]
    return torch.stack(matrices).mean(0) if matrices else None


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
