"""One page that carries all of a report: tables, figures, and what stands behind each number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dlcft.bench.experiment import Result
from dlcft.bench.paper import Tuned
from dlcft.bench.report import figures
from dlcft.bench.report.artefacts import CURVES, Reported, reported
from dlcft.bench.report.figures import LOSS_COLOURS, REMEMBERING, TRAINING, Style
from dlcft.bench.report.summary import Row, conditions, curve, heading, labels, own_settings, probe
from dlcft.bench.report.tables import artefact_table, best, columns, found_sections, network_name, number, shared
from dlcft.bench.spectrum import Trace
from dlcft.methods.recipes import RECIPES
from dlcft.pages import in_bytes, in_seconds, render
from dlcft.pages.drawing import PALETTE, bars


def to_html(
    results: Iterable[Result],
    *,
    traces: Sequence[Trace] = (),
    tuned: Mapping[str, Tuned] | None = None,
    title: str = "Results",
    warnings: Sequence[str] = (),
) -> str:
    """A self-contained page: it loads nothing, fits a telephone, and follows the reader's choice of light or dark.

    Args:
        results: see `read_results`.
        traces: see `read_traces`.
        tuned: see `read_tuned`.
        title: of the page.
        warnings: sentences to show, such as those that `read_results` gives about foreign files.
    """
    every = list(results)
    # the most accurate first: the table, the legend and the bars then have one order
    found = [sorted(rows, key=lambda row: -row.accuracy.mean) for rows in found_sections(every, traces)]
    used = {row.experiment.method for section in found for row in section}
    places = {method: place for place, method in enumerate(sorted(used, key=_order))}
    anchors = {id(row): f"s{n}-{place}" for n, rows in enumerate(found, 1) for place, row in enumerate(rows)}
    artefacts = reported([row for rows in found for row in rows], traces, tuned)
    return render(
        "bench/report/page.html.jinja",
        title=title,
        warnings=warnings,
        count=len(every) + len(traces),
        origin=_origin([*every, *traces]),
        training=TRAINING,
        remembering=REMEMBERING,
        losses=LOSS_COLOURS,
        artefacts=[_artefact(one, f"a{place}", places, anchors) for place, one in enumerate(artefacts, 1)],
        sections=[_section(rows, f"s{place}", places) for place, rows in enumerate(found, 1)],
    )


def _artefact(one: Reported, identity: str, places: dict[str, int], anchors: dict[int, str]) -> dict[str, Any]:
    """A table, or the figures of its columns (or of its networks) with one legend."""
    table = artefact_table(one)
    lines = [
        (label, [(cell, None if cell.row is None else anchors[id(cell.row)]) for cell in cells])
        for label, cells in table.lines
    ]
    rows = [
        next((entry.row for entry in one.entries if entry.label == label and entry.row), None) for label in one.labels
    ]
    methods = [None if row is None else row.experiment.method for row in rows]
    styles = [
        None
        if row is None
        else figures.style(row, places[row.experiment.method], methods[:place].count(methods[place]))
        for place, row in enumerate(rows)
    ]
    drawn = []
    if one.traces:
        for place, network in enumerate(dict.fromkeys(map(network_name, one.traces))):
            some = [trace for trace in one.traces if network_name(trace) == network]
            svg = figures.eigenvalues(some, f"{identity}-{place}", f"Largest eigenvalue and losses, {network}")
            drawn.append((network, svg))
    elif any(entry.metric in CURVES for entry in one.entries):
        for place, column in enumerate(one.columns):
            entries = [one.entry(label, column) for label in one.labels]
            points = [CURVES[entry.metric](entry.row) if entry and entry.row else [] for entry in entries]
            if any(points):
                axis = "k-NN accuracy, %" if one.name == "knn" else "accuracy, %"
                label = f"{one.title}, {column}"
                drawn.append((column, figures.curves(points, styles, f"{identity}-{place}", axis=axis, label=label)))
    return {
        "id": identity,
        "name": one.name,
        "table": table,
        "lines": lines,
        "starts": [sum(span for _, span in table.groups[:place]) for place in range(len(table.groups))],
        "figures": drawn,
        "traced": bool(one.traces),
        "figure_ids": " ".join(f"{identity}-{place}" for place in range(len(drawn))),
        "legend": [
            (place, label, drawn_as) for place, (label, drawn_as) in enumerate(zip(one.labels, styles, strict=True))
        ]
        if drawn and not one.traces
        else [],
    }


def _section(rows: Sequence[Row], identity: str, places: dict[str, int]) -> dict[str, Any]:
    names, top = labels(rows), best(rows)
    methods = [row.experiment.method for row in rows]
    styles = [
        figures.style(row, places[method], methods[:place].count(method))
        for place, (row, method) in enumerate(zip(rows, methods, strict=True))
    ]
    shown = columns(rows)
    name = heading(rows[0])
    entries = [
        {
            "name": label,
            "settings": own_settings(row, rows),
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
        "shared": shared(rows),
        "validate": rows[0].experiment.validate,
        "columns": shown,
        "rows": entries,
        "one_test": all(result.matrix is None for row in rows for result in row.results),
        **_figures(rows, names, styles, identity, name),
    }


def _figures(
    rows: Sequence[Row], names: Sequence[str], styles: Sequence[Style], identity: str, name: str
) -> dict[str, Any]:
    final = "; ".join(f"{label} {100 * row.accuracy.mean:.1f} %" for label, row in zip(names, rows, strict=True))
    matrices = [(label, figures.mean_matrix(row)) for label, row in zip(names, rows, strict=True)]
    trained = [sum(_seconds_training(result) for result in row.results) / len(row.results) for row in rows]
    remembered = [row.seconds.mean - seconds for row, seconds in zip(rows, trained, strict=True)]
    sizes = [row.state_bytes.mean for row in rows]
    return {
        "curves": figures.curves(
            [curve(row) for row in rows],
            styles,
            f"{identity}-curves",
            axis="accuracy, %",
            label=f"Accuracy over tasks, {name}. In the end: {final}",
        ),
        "probe": figures.curves(
            [probe(row) for row in rows],
            styles,
            f"{identity}-probe",
            axis="k-NN accuracy, %",
            label=f"Accuracy of the features' nearest neighbours over tasks, {name}",
        )
        if any(probe(row) for row in rows)
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


def _seconds_training(result: Result) -> float:
    return float(sum(entry.get("seconds_training") or 0 for entry in result.history))


def _configuration(row: Row) -> str:
    """The experiment and the recipe with its settings applied."""
    experiment = {name: value for name, value in row.experiment.to_dict().items() if name != "seed"}
    recipe = row.results[0].recipe
    if recipe is None:  # an older result does not tell what the data set has set: its augmentation
        own = row.experiment.settings
        recipe = {name: v for name, v in asdict(row.recipe).items() if name != "augment" or name in own}
    return json.dumps({"experiment": experiment, "recipe": recipe}, indent=2, ensure_ascii=False)


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


def _origin(results: Sequence[Result | Trace]) -> list[tuple[str, str]]:
    """What all the numbers come from, in short."""
    wanted = ("dlcft", "commit", "torch", "python", "machine", "cores", "threads", "gpu")
    values = {name: sorted({str(r.environment[name]) for r in results if r.environment.get(name)}) for name in wanted}
    return [(name, ", ".join(found)) for name, found in values.items() if found]
