"""One page with all of a report: tables, figures, and the configuration and runs behind each number."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from dlcft.bench.experiment import Result
from dlcft.bench.report import figures, tables
from dlcft.bench.report.figures import LOSS_COLOURS, MARKERS, REMEMBERING, TRAINING, Style
from dlcft.bench.report.summary import Row, conditions, curve, heading, labels, method_order, probe
from dlcft.bench.report.tables import Reported, network_name
from dlcft.bench.spectrum import Trace
from dlcft.pages import in_bytes, in_seconds, render
from dlcft.pages.drawing import PALETTE, bars

Places = dict[tuple[bool, int, str], int]  # of each method among those of the page, see `method_order`


def to_html(
    results: Iterable[Result], *, traces: Sequence[Trace] = (), title: str = "Results", warnings: Sequence[str] = ()
) -> str:
    """A self-contained page: it loads nothing, fits a telephone, and follows the reader's choice of light or dark.

    `warnings` are sentences to show, such as those of `read_results` about foreign files.
    """
    every = list(results)
    artefacts, sections = tables.contents(every, traces)
    # the most accurate first: the table, the legend and the bars then have one order
    found = [sorted(rows, key=lambda row: -row.accuracy.mean) for rows in sections]
    # joint training last: it is drawn as a level and needs no colour of its own
    used = sorted({method_order(row.experiment) for section in found for row in section})
    places = {method: place for place, method in enumerate(used)}
    return render(
        "bench/report/page.html.jinja",
        title=title,
        warnings=warnings,
        count=len(every) + len(traces),
        origin=_origin([*every, *traces]),
        training=TRAINING,
        remembering=REMEMBERING,
        losses=LOSS_COLOURS,
        markers=MARKERS,
        anchors={row: f"s{n}-{place}" for n, rows in enumerate(found, 1) for place, row in enumerate(rows)},
        artefacts=[
            *(_claims(table, f"c{place}") for place, table in enumerate(tables.claims_tables(artefacts, sections), 1)),
            *(_artefact(one, f"a{place}", places) for place, one in enumerate(artefacts, 1)),
        ],
        sections=[_section(rows, f"s{place}", places) for place, rows in enumerate(found, 1)],
    )


def _claims(table: tables.Table, identity: str) -> dict[str, Any]:
    """A table without figures."""
    return {"id": identity, "name": "claims", "table": table, "figures": [], "traced": False, "legend": []}


def _artefact(one: Reported, identity: str, places: Places) -> dict[str, Any]:
    """A table, or the figures of its columns (or of its networks) with one legend."""
    rows = [next((e.row for e in one.entries if e.cell.label == label and e.row), None) for label in one.labels]
    styles, drawn = _styles(rows, places), []
    if one.traces:
        for place, network in enumerate(dict.fromkeys(map(network_name, one.traces))):
            some = [trace for trace in one.traces if network_name(trace) == network]
            svg = figures.eigenvalues(some, f"{identity}-{place}", f"Largest eigenvalue and losses, {network}")
            drawn.append((network, svg))
    elif one.has_curves:
        axis = "k-NN accuracy, %" if one.name == "knn" else "accuracy, %"
        for place, column in enumerate(one.columns):
            points = [entry.points if entry else [] for entry in (one.entry(label, column) for label in one.labels)]
            if any(points):
                svg = figures.curves(points, styles, f"{identity}-{place}", axis, f"{one.title}, {column}")
                drawn.append((column, svg))
    return {
        "id": identity,
        "name": one.name,
        "table": tables.artefact_table(one),
        "figures": drawn,
        "traced": bool(one.traces),
        "figure_ids": " ".join(f"{identity}-{place}" for place in range(len(drawn))),
        "legend": list(zip(one.labels, styles, strict=True)) if drawn and not one.traces else [],
    }


def _section(rows: Sequence[Row], identity: str, places: Places) -> dict[str, Any]:
    names, styles, name = labels(rows), _styles(rows, places), heading(rows[0])
    final = "; ".join(f"{label} {100 * row.accuracy.mean:.1f} %" for label, row in zip(names, rows, strict=True))
    said = f"Accuracy over tasks, {name}. In the end: {final}"
    curves = figures.curves([curve(row) for row in rows], styles, f"{identity}-curves", "accuracy, %", said)
    probes, said = [probe(row) for row in rows], f"Accuracy of the features' nearest neighbours over tasks, {name}"
    probed = figures.curves(probes, styles, f"{identity}-probe", "k-NN accuracy, %", said) if any(probes) else None
    maps = []
    for place, (label, row) in enumerate(zip(names, rows, strict=True)):
        matrix, said = figures.mean_matrix(row), f"Accuracy matrix of {label}, {name}"
        if matrix is not None:
            maps.append((label, figures.heat_map(matrix, f"{identity}-map-{place}", said)))
    said = f"Predicted rise of the loss against the measured one, {name}"
    increases = figures.increases(rows, styles, f"{identity}-rise", said)
    trained = [statistics.fmean(map(_seconds_training, row.results)) for row in rows]
    remembered = [row.seconds.mean - seconds for row, seconds in zip(rows, trained, strict=True)]
    times = [(trained, TRAINING), (remembered, REMEMBERING)]
    said = f"Seconds of training and remembering for each method, {name}"
    time = bars(names, times, in_seconds, f"{identity}-time", axis="seconds", label=said)
    sizes, said = [row.state_bytes.mean / 1e6 for row in rows], f"Size of the saved state of each method, {name}"
    size = bars(names, [(sizes, PALETTE[6])], _megabytes, f"{identity}-size", axis="MB", label=said)
    return {
        "id": identity,
        "conditions": conditions(rows[0]),
        "table": tables.section_table(rows),
        "validate": rows[0].experiment.validate,
        "rows": list(zip(rows, names, styles, map(_behind, rows), strict=True)),
        "one_test": all(result.matrix is None for row in rows for result in row.results),
        "losses": figures.has_losses(rows),
        **{"curves": curves, "probe": probed, "heat_maps": maps, "increases": increases, "time": time, "size": size},
    }


def _megabytes(size: float) -> str:
    return in_bytes(1e6 * size)


def _styles(rows: Sequence[Row | None], places: Places) -> list[Style | None]:
    """A style for each row: a method has its colour throughout the page, its variants have other markers."""
    methods = [None if row is None else method_order(row.experiment) for row in rows]
    return [
        None if row is None or method is None else figures.style(row, places[method], methods[:place].count(method))
        for place, (row, method) in enumerate(zip(rows, methods, strict=True))
    ]


def _seconds_training(result: Result) -> float:
    return float(sum(entry.get("seconds_training") or 0 for entry in result.history))


def _behind(row: Row) -> str:
    """The experiment, the recipe with its settings applied, and the figures and the environment of each seed."""
    shown = ("accuracy", "seconds_learning", "seconds", "converged", "environment")
    runs = [{"seed": r.experiment.seed, **{name: getattr(r, name) for name in shown}} for r in row.results]
    experiment = {name: value for name, value in row.experiment.to_dict().items() if name != "seed"}
    content = {"experiment": experiment, "recipe": row.results[0].recipe, "runs": runs}
    return json.dumps(content, indent=2, ensure_ascii=False)


def _origin(results: Sequence[Result | Trace]) -> list[tuple[str, str]]:
    """The versions and machines behind all numbers."""
    wanted = ("dlcft", "commit", "torch", "python", "machine", "cores", "threads", "gpu")
    values = {name: sorted({str(r.environment[name]) for r in results if r.environment.get(name)}) for name in wanted}
    return [(name, ", ".join(found)) for name, found in values.items() if found]
