"""One page that carries all of a report: tables, figures, and what stands behind each number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dlcft.bench.experiment import Result
from dlcft.bench.report import figures
from dlcft.bench.report.figures import REMEMBERING, TRAINING, Style
from dlcft.bench.report.summary import Row, conditions, heading, labels
from dlcft.bench.report.tables import Paper, best, columns, found_sections, number
from dlcft.pages import in_bytes, in_seconds, render
from dlcft.pages.drawing import PALETTE, bars
from dlcft.recipes import RECIPES


def to_html(
    results: Iterable[Result], *, title: str = "Results", paper: Paper | None = None, warnings: Sequence[str] = ()
) -> str:
    """A self-contained page: it loads nothing, fits a telephone, and follows the reader's choice of light or dark.

    Args:
        results: see `read_results`.
        title: of the page.
        paper: the paper's accuracies in percent, see `Paper`.
        warnings: sentences to show, such as those that `read_results` gives about foreign files.
    """
    every = list(results)
    found = found_sections(every)
    used = {row.experiment.method for section in found for row in section}
    places = {method: place for place, method in enumerate(sorted(used, key=_order))}
    return render(
        "bench/report/page.html.jinja",
        title=title,
        warnings=warnings,
        count=len(every),
        origin=_origin(every),
        training=TRAINING,
        remembering=REMEMBERING,
        sections=[_section(rows, f"s{place}", places, paper) for place, rows in enumerate(found, 1)],
    )


def _section(rows: Sequence[Row], identity: str, places: dict[str, int], paper: Paper | None) -> dict[str, Any]:
    # the most accurate first: the table, the legend and the bars then have one order
    rows = sorted(rows, key=lambda row: -row.accuracy.mean)
    names, top = labels(rows), best(rows)
    methods = [row.experiment.method for row in rows]
    styles = [
        figures.style(row, places[method], methods[:place].count(method))
        for place, (row, method) in enumerate(zip(rows, methods, strict=True))
    ]
    shown = columns(rows, paper)
    name = heading(rows[0])
    entries = [
        {
            "name": label,
            "settings": row.settings,
            "style": drawn,
            "best": row is top,
            "unconverged": row.unconverged,
            "converged": row.converged,
            "cells": [(column.name, column.value(row), column.text(row)) for column in shown],
            "accuracy": number(100 * row.accuracy.mean, 1),
            "configuration": _configuration(row),
            "runs": _runs(row),
        }
        for row, label, drawn in zip(rows, names, styles, strict=True)
    ]
    return {
        "id": identity,
        "name": name,
        "conditions": conditions(rows[0]),
        "validate": rows[0].experiment.validate,
        "columns": shown,
        "rows": entries,
        "shared": all(row.matrix is None for row in (result for r in rows for result in r.results)),
        **_figures(rows, names, styles, identity, name),
    }


def _figures(
    rows: Sequence[Row], names: Sequence[str], styles: Sequence[Style], identity: str, name: str
) -> dict[str, Any]:
    final = "; ".join(f"{label} {100 * row.accuracy.mean:.1f} %" for label, row in zip(names, rows, strict=True))
    matrices = [(label, figures.mean_matrix(row)) for label, row in zip(names, rows, strict=True)]
    trained, remembered = (
        [sum(_total(result, part) for result in row.results) / len(row.results) for row in rows]
        for part in ("seconds_training", "seconds_remembering")
    )
    sizes = [row.state_bytes.mean for row in rows]
    return {
        "curves": figures.curves(
            rows,
            styles,
            figures.curve,
            f"{identity}-curves",
            axis="accuracy, %",
            label=f"Accuracy over tasks, {name}. In the end: {final}",
        ),
        "probe": figures.curves(
            rows,
            styles,
            figures.probe,
            f"{identity}-probe",
            axis="k-NN accuracy, %",
            label=f"Accuracy of the features' nearest neighbours over tasks, {name}",
        )
        if any(figures.probe(row) for row in rows)
        else None,
        "heat_maps": [
            (label, figures.heat_map(matrix, f"{identity}-map-{place}", f"Accuracy matrix of {label}, {name}"))
            for place, (label, matrix) in enumerate(matrices)
            if matrix is not None
        ],
        "increases": figures.increases(
            rows, styles, f"{identity}-rise", f"Predicted rise of the loss against what was measured, {name}"
        ),
        "losses": figures.has_losses(rows),
        "time": bars(
            names,
            [(trained, TRAINING), (remembered, REMEMBERING)],
            in_seconds,
            f"{identity}-time",
            axis="seconds",
            label=f"Seconds of training and remembering for each method, {name}",
        ),
        "size": bars(
            names,
            [([size / 1e6 for size in sizes], PALETTE[6])],
            lambda size: in_bytes(1e6 * size),
            f"{identity}-size",
            axis="MB",
            label=f"Size of the saved state of each method, {name}",
        ),
    }


def _order(method: str) -> tuple[bool, int]:
    """Joint training last: it is drawn as a level and needs no colour of its own."""
    return method.startswith("joint"), list(RECIPES).index(method)


def _total(result: Result, part: str) -> float:
    return float(sum(entry.get(part) or 0 for entry in result.history))


def _configuration(row: Row) -> str:
    """The experiment and the recipe with its settings applied."""
    experiment = {name: value for name, value in row.experiment.to_dict().items() if name != "seed"}
    return json.dumps({"experiment": experiment, "recipe": asdict(row.recipe)}, indent=2, ensure_ascii=False)


def _runs(row: Row) -> tuple[list[str], list[list[str]]]:
    """What came out of each seed, and where."""
    names = sorted({name for result in row.results for name in result.environment})
    head = ["seed", "accuracy, %", "seconds", "seconds in all", "state, bytes", "converged", *names]
    words = {True: "yes", False: "no", None: "not trained"}
    lines = [
        [
            str(result.experiment.seed),
            f"{100 * result.accuracy:.2f}",
            f"{result.seconds_learning:.1f}",
            f"{result.seconds:.1f}",
            str(result.state_bytes),
            words[result.converged],
            *(str(result.environment.get(name, "–")) for name in names),
        ]
        for result in row.results
    ]
    return head, lines


def _origin(results: Sequence[Result]) -> list[tuple[str, str]]:
    """What all the numbers come from, in short."""
    wanted = ("dlcft", "commit", "torch", "python", "machine", "cores", "threads", "gpu")
    values = {name: sorted({str(r.environment[name]) for r in results if r.environment.get(name)}) for name in wanted}
    return [(name, ", ".join(found)) for name, found in values.items() if found]
