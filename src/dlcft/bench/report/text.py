"""Tables as text: Markdown, CSV and LaTeX. Accuracies in percent."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dlcft.bench.experiment import Result
from dlcft.bench.report import tables
from dlcft.bench.report.summary import CURVES, Row, Spread
from dlcft.bench.report.tables import TRACED, UNCONVERGED, UNTUNED, Reported, Table
from dlcft.bench.spectrum import Trace

_PLACE = ("artefact", "scale", "row", "column", "metric", "after", "ours", "ours_sd", "paper", "difference", "tuned")
_SPREADS = {"accuracy": "percent", "bwt": "points", "forgetting": "points", "seconds": "", "state_bytes": ""}
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


def to_markdown(results: Iterable[Result], *, traces: Sequence[Trace] = ()) -> str:
    """A heading and a table for each of the paper's artefacts, then for each section."""
    return "\n\n".join(map(_markdown_table, _every_table(results, traces))) + "\n"


def to_latex(results: Iterable[Result], *, traces: Sequence[Trace] = ()) -> str:
    """A `table` for each of the paper's artefacts, then for each section, with the package booktabs."""
    return "\n\n".join(map(_latex_table, _every_table(results, traces))) + "\n"


def to_csv(results: Iterable[Result], *, traces: Sequence[Trace] = ()) -> str:
    """One line a figure: of the paper's artefacts (curves point by point), then of rows that belong to none.

    Nothing is rounded; conditions and settings are JSON.
    """
    artefacts, sections = tables.contents(results, traces)
    lines = [line for one in artefacts for line in _artefact_records(one)]
    shown = {line["file"] for line in lines}
    others = [row for section in sections for row in section if row.experiment.file not in shown]
    lines += [{"ours": 100 * row.accuracy.mean, **_record(row)} for row in others]
    text = io.StringIO()
    names = list(dict.fromkeys([*_PLACE, *(name for line in lines for name in line)]))
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _every_table(results: Iterable[Result], traces: Sequence[Trace]) -> list[Table]:
    artefacts, sections = tables.contents(results, traces)
    claimed = tables.claims_tables(artefacts, sections)
    return [*claimed, *map(tables.artefact_table, artefacts), *map(tables.section_table, sections)]


def _markdown_table(table: Table) -> str:
    groups = [f"{name}: " for name, span in table.groups for _ in range(span)] or [""] * len(table.head)
    head = [_markdown(group + name) for group, name in zip(groups, table.head, strict=True)]
    lines = [f"### {_markdown(table.title)}", ""]
    lines += [_markdown(table.subtitle), ""] if table.subtitle else []
    lines += [f"| | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
    for line in table.lines:
        texts = [f"**{_markdown(cell.text)}**" if cell.strong else _markdown(cell.text) for cell in line.cells]
        lines.append(f"| {' | '.join([_markdown(line.title), *texts])} |")
    notes = (textwrap.fill(_markdown(note), 118, break_long_words=False) for note in table.notes)
    return "\n".join([*lines, "", *(f"{note}  " for note in notes)])


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def _latex_table(table: Table) -> str:
    above = f"{table.title} ({table.subtitle})" if table.subtitle else table.title
    spans = "".join(rf" & \multicolumn{{{span}}}{{c}}{{{_latex(name)}}}" for name, span in table.groups)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(f'{above}. ' + ' '.join(table.notes))}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table.head)}}}", r"\toprule", *([rf"{spans} \\"] if spans else [])]
    lines += [rf" & {' & '.join(map(_latex, table.head))} \\", r"\midrule"]
    for line in table.lines:
        texts = [rf"\textbf{{{_latex(cell.text)}}}" if cell.strong else _latex(cell.text) for cell in line.cells]
        lines.append(" & ".join([_latex(line.title), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _record(row: Row) -> dict[str, Any]:
    record = row.experiment.to_dict()
    del record["seed"]
    record |= {"settings": json.dumps(record["settings"]), "weights": row.weights}
    record["seeds"] = " ".join(str(result.experiment.seed) for result in row.results)
    for name, unit in _SPREADS.items():
        spread, column = getattr(row, name), f"{name}_{unit}" if unit else name
        record |= _mean(spread and spread.times(100 if unit else 1), column)
    record |= {name: getattr(row, name) for name in ("recovered", "recovered_mixed", "converged", "peak_bytes")}
    return {**record, "unconverged_seeds": " ".join(map(str, row.unconverged)), "file": row.experiment.file}


def _artefact_records(one: Reported) -> Iterator[dict[str, Any]]:
    """A line a cell, a point of a curve, or a point of a spectrum; percent and points, but losses and eigenvalues."""
    artefact = {"artefact": one.name, "scale": one.scale}
    for entry in one.entries:
        cell, own = entry.cell, {"file": ""} if entry.row is None else _record(entry.row)
        line: dict[str, Any] = {**artefact, "row": cell.label, "column": cell.column, "metric": cell.metric}
        line |= {"paper": cell.paper, "tuned": entry.tuned, **own}
        if cell.metric in CURVES and entry.row is not None:
            for after, spread in entry.points:
                yield {**line, "after": after, **_mean(spread.times(100), "ours")}
        else:
            yield {**line, "difference": entry.difference, **_mean(entry.ours, "ours")}
    for trace in one.traces:
        line = {**artefact, "row": tables.network_name(trace), "column": trace.spectrum.loss}
        line |= {"seeds": trace.spectrum.seed, "file": trace.spectrum.file}
        for record in trace.records:
            yield from ({**line, "metric": name, "after": record["epochs"], "ours": record[name]} for name in TRACED)


def _mean(spread: Spread | None, name: str) -> dict[str, float | None]:
    return {name: None if spread is None else spread.mean, f"{name}_sd": None if spread is None else spread.sd}
