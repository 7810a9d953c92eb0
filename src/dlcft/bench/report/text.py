"""Tables as text: Markdown, CSV and LaTeX. Accuracies in percent."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlcft.bench.experiment import Result
from dlcft.bench.paper import Tuned
from dlcft.bench.report.artefacts import CURVES, Reported, reported
from dlcft.bench.report.summary import Row, Spread
from dlcft.bench.report.tables import (
    TRACED,
    UNCONVERGED,
    UNTUNED,
    Table,
    artefact_table,
    found_sections,
    network_name,
    section_table,
)
from dlcft.bench.spectrum import Trace


def to_markdown(
    results: Iterable[Result], *, traces: Sequence[Trace] = (), tuned: Mapping[str, Tuned] | None = None
) -> str:
    """A heading and a table for each of the paper's artefacts, then for each section.

    Args:
        results: see `read_results`.
        traces: see `read_traces`.
        tuned: see `read_tuned`.
    """
    return "\n\n".join(_markdown_table(table) for table in _every_table(results, traces, tuned)) + "\n"


def to_latex(
    results: Iterable[Result], *, traces: Sequence[Trace] = (), tuned: Mapping[str, Tuned] | None = None
) -> str:
    r"""A `table` for each of the paper's artefacts, then for each section, with the package booktabs.

    Args:
        results: see `read_results`.
        traces: see `read_traces`.
        tuned: see `read_tuned`.
    """
    return "\n\n".join(_latex_table(table) for table in _every_table(results, traces, tuned)) + "\n"


def to_csv(results: Iterable[Result], *, traces: Sequence[Trace] = (), tuned: Mapping[str, Tuned] | None = None) -> str:
    """One line a figure: of the paper's artefacts (curves point by point), then of rows that belong to none.

    Nothing is rounded; conditions and settings are JSON.

    Args:
        results: see `read_results`.
        traces: see `read_traces`.
        tuned: see `read_tuned`.
    """
    rows = [row for section in found_sections(results, traces) for row in section]
    lines = [line for one in reported(rows, traces, tuned) for line in _artefact_records(one)]
    shown = {line["file"] for line in lines}
    lines += [{"ours": 100 * row.accuracy.mean, **_record(row)} for row in rows if row.experiment.file not in shown]
    text = io.StringIO()
    names = list(dict.fromkeys([*_PLACE, *(name for line in lines for name in line)]))
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _every_table(results: Iterable[Result], traces: Sequence[Trace], tuned: Mapping[str, Tuned] | None) -> list[Table]:
    found = found_sections(results, traces)
    rows = [row for section in found for row in section]
    return [*map(artefact_table, reported(rows, traces, tuned)), *map(section_table, found)]


def _markdown_table(table: Table) -> str:
    groups = [name for name, span in table.groups for _ in range(span)]
    head = [f"{group}: {name}" for group, name in zip(groups, table.head, strict=True)] if groups else table.head
    lines = [
        f"### {_markdown(table.title)}",
        "",
        *([_markdown(table.subtitle), ""] if table.subtitle else []),
        f"| | {' | '.join(map(_markdown, head))} |",
        f"|---|{'---:|' * len(head)}",
    ]
    for label, cells in table.lines:
        texts = [f"**{_markdown(cell.text)}**" if cell.strong else _markdown(cell.text) for cell in cells]
        lines.append(f"| {' | '.join([_markdown(label), *texts])} |")
    return "\n".join([*lines, "", *(f"{_markdown(note)}  " for note in table.notes)])


def _latex_table(table: Table) -> str:
    body = []
    for label, cells in table.lines:
        texts = [rf"\textbf{{{_latex(cell.text)}}}" if cell.strong else _latex(cell.text) for cell in cells]
        body.append(" & ".join([_latex(label), *texts]) + r" \\")
    spans = "".join(rf" & \multicolumn{{{span}}}{{c}}{{{_latex(name)}}}" for name, span in table.groups)
    above = f"{table.title} ({table.subtitle})" if table.subtitle else table.title
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(f'{above}. ' + ' '.join(table.notes))}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.head)}}}",
        r"\toprule",
        *([rf"{spans} \\"] if spans else []),
        rf" & {' & '.join(map(_latex, table.head))} \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _record(row: Row) -> dict[str, Any]:
    experiment = row.experiment.to_dict()
    own = {"seed": None, "method": None, "settings": None}
    record: dict[str, Any] = {
        **{name: value for name, value in experiment.items() if name not in own},
        "weights": row.results[0].environment.get("backbone"),
        "method": experiment["method"],
        "settings": json.dumps(experiment["settings"]),
        "seeds": " ".join(str(result.experiment.seed) for result in row.results),
    }
    spreads = {
        "accuracy_percent": (row.accuracy, 100),
        "bwt_points": (row.bwt, 100),
        "forgetting_points": (row.forgetting, 100),
        "seconds": (row.seconds, 1),
        "state_bytes": (row.state_bytes, 1),
    }
    for name, (spread, scale) in spreads.items():
        record[name] = None if spread is None else scale * spread.mean
        record[f"{name}_sd"] = None if spread is None or spread.sd is None else scale * spread.sd
    record |= {
        "recovered": row.recovered,
        "recovered_mixed": row.recovered_mixed,
        "converged": row.converged,
        "unconverged_seeds": " ".join(map(str, row.unconverged)),
        "peak_bytes": row.peak_bytes,
        "file": row.experiment.file,
    }
    return record


_PLACE = ("artefact", "scale", "row", "column", "metric", "after", "ours", "ours_sd", "paper", "difference", "tuned")


def _artefact_records(one: Reported) -> list[dict[str, Any]]:
    """A line a cell, a point of a curve, or a point of a spectrum; percent and points, but losses and eigenvalues."""
    lines: list[dict[str, Any]] = []
    for entry in one.entries:
        place = {"artefact": one.name, "scale": one.scale, "row": entry.label, "column": entry.column}
        own = {"file": ""} if entry.row is None else _record(entry.row)
        line = {**place, "metric": entry.metric, "paper": entry.paper, "tuned": entry.tuned, **own}
        if entry.metric in CURVES and entry.row is not None:
            lines += [{**line, "after": n, **_mean(spread, 100)} for n, spread in CURVES[entry.metric](entry.row)]
        else:
            lines.append({**line, "difference": entry.difference, **_mean(entry.ours, 1)})
    for trace in one.traces:
        place = {"artefact": one.name, "scale": one.scale, "row": network_name(trace), "column": trace.spectrum.loss}
        own = {"seeds": trace.spectrum.seed, "file": trace.spectrum.file}
        lines += [
            {**place, **own, "metric": name, "after": record["epochs"], "ours": record[name]}
            for record in trace.records
            for name in TRACED
        ]
    return lines


def _mean(spread: Spread | None, scale: float) -> dict[str, float | None]:
    if spread is None:
        return {"ours": None, "ours_sd": None}
    return {"ours": scale * spread.mean, "ours_sd": None if spread.sd is None else scale * spread.sd}


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    UNCONVERGED: r"$^\dagger$",
    UNTUNED: r"$^\ddagger$",
    "λ": r"$\lambda$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
