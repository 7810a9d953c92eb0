"""Figures as SVG to stand inside a page: transparent, text in the page's colour, other colours for light and dark."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Each has a contrast of at least 3 with a white page and with a nearly black one.
PALETTE = ("#3b82d6", "#dd6128", "#2e9a59", "#cf4b86", "#8a6fd6", "#a87f12", "#17969f", "#d14545", "#a3684b", "#6b8e23")
LEVEL = "#7d8590"
INK = "#010203"  # replaced by the page's colour of text


def bars(
    names: Sequence[str],
    parts: Sequence[tuple[Sequence[float], str | Sequence[str]]],
    write: Callable[[float], str],
    identity: str,
    *,
    axis: str,
    label: str,
) -> str:
    """A bar for each name, of one or several parts (values and their colour or colours), with its sum beside it."""
    with drawing():
        figure, axes = bar_axes(names)
        left = [0.0] * len(names)
        for values, colour in parts:
            axes.barh(range(len(names)), values, left=left, color=colour, height=0.66)
            left = [start + value for start, value in zip(left, values, strict=True)]
        for place, value in enumerate(left):
            axes.annotate(write(value), (value, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_xlabel(axis)
        axes.locator_params(axis="x", nbins=5, integer=all(value.is_integer() for value in left))
        return to_svg(figure, identity, label)


def bar_axes(names: Sequence[str], right: float = 0.85) -> tuple[Figure, Axes]:
    """Axes for one horizontal bar a name, from the top."""
    short = [name if len(name) < 29 else f"{name[:27]}…" for name in names]
    height = 0.55 + 0.25 * len(names)
    left = min(0.05 + 0.0165 * max(map(len, short)), 0.5)
    figure, axes = plot_axes(4.6, height, left=left, right=right, bottom=0.46 / height)
    axes.set_yticks(range(len(names)), short)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def drawing(size: float = 9) -> AbstractContextManager[Any]:
    """While a figure is drawn: its colours and letters, of this size in points."""
    import matplotlib as mpl

    return mpl.rc_context(
        {
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.linewidth": 0.7,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "font.family": ["DejaVu Sans"],
            "font.size": size,
            "svg.fonttype": "none",
            "svg.hashsalt": "dlcft",
            "text.color": INK,
            "text.parse_math": False,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def plot_axes(
    width: float, height: float, *, left: float = 0.13, right: float = 0.98, bottom: float = 0.15, top: float = 0.97
) -> tuple[Figure, Axes]:
    """A figure of so many inches with one pair of axes, and the shares of it at which they end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=left, right=right, bottom=bottom, top=top)
    return figure, figure.add_subplot()


def plain_numbers(*axes: Axis) -> None:
    """Numbers of a logarithmic axis as text, not as formulas."""
    for axis in axes:
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")


def to_svg(figure: Figure, identity: str, label: str) -> str:
    """As an element of a page: names unique in it, nothing that points out of it."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # text stays text: the reader's fonts have it
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("xlink:href", "href").replace(INK, "currentColor")
    text = re.sub(r'(\sid="|href="#|url\(#)(?!' + re.escape(identity) + ")", rf"\g<1>{identity}-", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    name = html.escape(label, quote=True)
    return re.sub(r"^<svg[^>]*>", lambda _: f'<svg {box[0]} role="img" aria-label="{name}">', text)
