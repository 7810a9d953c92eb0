"""The numbers of `growth.py` as tables and as a figure, and the exponents by which costs grow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Point = dict[str, Any]

METHODS = {"dlcft-exact": ("#c2410c", "o"), "dlcft": ("#15803d", "^")}  # colour and mark, as in other figures
SCENARIOS = {"data-il": "-", "task-il": "--"}
# what all points of a table share, for the heads of its first columns
BASES = {
    "tasks": "tasks before; 64 images of 2 classes, `depth_features=1000`",
    "classes": "classes; 256 images, 4,207 features",
    "features": "features; 256 images after 1,000, 10 classes",
    "size": "pixels of a side; 64 images of 10 classes, 4,207 features",
    "samples": "images of the task; 10 classes, 4,207 features",
}
COSTS = {"learn": "learn", "solve": "solve", "predict": "predict", "disk": "disk, MB", "memory": "peak, MB"}
PANELS = {
    "learn": "learn one more task,\nin forward passes",
    "predict": "predict an image,\nin forward passes",
    "disk": "on disk, MB",
    "memory": "peak memory\nof learning, MB",
}
TITLES = {
    "tasks": "tasks learned before",
    "classes": "classes",
    "features": "features",
    "size": "pixels of a side",
    "samples": "images of the task",
}


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """The least-squares slope of log cost against log quantity, over the upper half of the points, two at least.

    Raises:
        ValueError: when these are not two different points.
    """
    upper = max(0, min(len(values) // 2, len(values) - 2))
    x, y = ([math.log(v) for v in given[upper:]] for given in (values, costs))
    middle, height = sum(x) / len(x), sum(y) / len(y)
    spread = sum((v - middle) ** 2 for v in x)
    if not spread:
        raise ValueError(f"quantities are {list(values)}; two different ones in their upper half are needed.")
    return sum((v - middle) * (c - height) for v, c in zip(x, y, strict=True)) / spread


def cost(point: Point, name: str) -> float:
    """A number of a point: times in units, sizes in MB."""
    return point[name] / 1e6 if name in ("disk", "memory") else point[name]["median"]


def series(points: Sequence[Point], method: str, scenario: str) -> list[Point]:
    return [point for point in points if (point["method"], point["scenario"]) == (method, scenario)]


def tables(figures: dict[str, Any]) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Name, title, header and rows of the table of each quantity."""
    for quantity in (name for name in BASES if name in figures):
        points = figures[quantity]
        columns = _columns(points)
        header = [BASES[quantity], *(_head(method, name) for method, name in columns)]
        rows = [row for scenario in SCENARIOS for row in _rows(points, scenario, columns)]
        yield quantity, f"One more task by {TITLES[quantity]}", header, rows


def _head(method: str, name: str) -> str:
    return "plain forward pass" if method == "plain" else f"{method}: {COSTS[name]}"


def _columns(points: Sequence[Point]) -> list[tuple[str, str]]:
    """The plain pass where it was measured, then the costs of each method."""
    found = [("plain", "learn")] if "plain" in points[0] else []
    for method in METHODS:
        of_method = [point for point in points if point["method"] == method]
        found += [(method, name) for name in COSTS if of_method and name in of_method[0]]
    return found


def _rows(points: Sequence[Point], scenario: str, columns: Sequence[tuple[str, str]]) -> Iterator[list[str]]:
    lines = {method: series(points, method, scenario) for method in METHODS}
    lines["plain"] = [{**point, "learn": point["plain"]} for point in lines["dlcft"] if "plain" in point]
    values = [point["value"] for point in lines["dlcft-exact"]]
    if not values:
        return
    note = ", a head each" if scenario == "task-il" else ""
    for index, value in enumerate(values):
        yield [f"{value:,}{note}", *(shown(cost(lines[method][index], name)) for method, name in columns)]
    slopes = [exponent(values, [cost(point, name) for point in lines[method]]) for method, name in columns]
    yield [f"exponent{note}", *(f"**{slope:.2f}**".replace("-", "−") for slope in slopes)]


def shown(value: float) -> str:
    """Three digits, or the whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value < 10 else 1}f}"


def drawn(figures: dict[str, Any], picture: Path) -> None:
    """Small multiples: a column for each quantity, a row for each cost."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "growth"})
    names = [name for name in BASES if name in figures]
    figure, axes = plt.subplots(
        len(PANELS), len(names), figsize=(2.1 * len(names), 1.8 * len(PANELS)), layout="constrained", squeeze=False
    )
    for column, quantity in enumerate(names):
        for row, (name, title) in enumerate(PANELS.items()):
            axis = axes[row, column]
            for method, scenario in ((m, s) for m in METHODS for s in SCENARIOS):
                _line(axis, series(figures[quantity], method, scenario), name)
            if name == "learn" and "plain" in figures[quantity][0]:
                _line(axis, series(figures[quantity], "dlcft", "data-il"), "plain")
            axis.set(xscale="log", yscale="log")
            axis.grid(color="#dddddd", lw=0.5)
            _ticks(axis, [point["value"] for point in figures[quantity]])
            if column == 0:
                axis.set_ylabel(title)
        axes[-1, column].set_xlabel(TITLES[quantity])
    for row in axes:  # one scale for a cost
        low, high = min(a.get_ylim()[0] for a in row), max(a.get_ylim()[1] for a in row)
        for axis in row:
            axis.set_ylim(low, high)
            axis.yaxis.set_major_formatter(_plainly)
            axis.yaxis.set_minor_formatter(lambda *_: "")
            axis.tick_params(labelleft=axis is row[0])
    handles = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    print(f"{picture}: {', '.join(names)}")


def _line(axis: Any, points: Sequence[Point], name: str) -> None:
    if not points:
        return
    method, scenario = points[0]["method"], points[0]["scenario"]
    (colour, mark), label = METHODS[method], method
    heights = [cost(point, name) for point in points]
    if name == "learn" and "solve" in points[0]:
        heights = [height + cost(point, "solve") for height, point in zip(heights, points, strict=True)]
    if name == "plain":
        colour, mark, label = "#777777", "", "a plain forward pass"
    if scenario == "task-il":
        label = f"{method}, a head for each task"
    values = [point["value"] for point in points]
    axis.plot(values, heights, marker=mark, ls=SCENARIOS[scenario], color=colour, label=label, ms=3.5, lw=1.2)


def _ticks(axis: Any, values: Sequence[int]) -> None:
    """Powers of ten; of a short range its ends and a middle."""
    low, high = min(values), max(values)
    if high / low < 100:
        places = sorted(set(values))
        axis.set_xticks([places[0], places[len(places) // 2], places[-1]], minor=False)
        axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter(_plainly)
    axis.xaxis.set_minor_formatter(lambda *_: "")


def _plainly(value: float, _: object) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
