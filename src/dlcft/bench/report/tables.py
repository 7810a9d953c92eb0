"""Tables as text: Markdown, CSV and LaTeX. Accuracies in percent."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlcft.bench.experiment import Result
from dlcft.bench.report.summary import Row, Spread, conditions, heading, sections, summarise

Paper = Mapping[tuple[Any, ...], float]  # (scenario, tasks, method) or (dataset, scenario, tasks, method) -> percent
MISSING = "–"
UNCONVERGED = "†"

NOTES = {
    "accuracy": "Accuracy in percent after the last task, mean ± standard deviation over seeds.",
    "recovered": "Recovered: (method − None)/(Joint − None), None and Joint of the same model and loss; "
    "mixed: with the nonlinear None, as in the paper.",
    "unconverged": f"{UNCONVERGED} training had not converged: the last epoch still lowered the loss by 1 % or more.",
}


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        name: its heading.
        value: what to sort by and what CSV holds; None where there is none.
        text: what is shown.
        meaning: in a few words.
    """

    name: str
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]
    meaning: str


def columns(rows: Sequence[Row], paper: Paper | None = None) -> list[Column]:
    """Those for which at least one of the rows has a figure."""
    known = [
        Column("seeds", lambda row: len(row.results), lambda row: str(len(row.results)), "how many"),
        _spread("accuracy", lambda row: row.accuracy, 100, "in the end, percent"),
        _spread("BWT", lambda row: row.bwt, 100, "backward transfer, points; below 0: forgotten"),
        _spread("forgetting", lambda row: row.forgetting, 100, "from the best to the end, points"),
        _share("recovered", lambda row: row.recovered, "of the way from None to Joint, same model and loss, percent"),
        _share("recovered, mixed", lambda row: row.recovered_mixed, "the same from the nonlinear None, percent"),
        _spread("seconds", lambda row: row.seconds, 1, "training and remembering", digits=1),
        Column(
            "state, MB",
            lambda row: row.state_bytes.mean / 1e6,
            lambda row: f"{row.state_bytes.mean / 1e6:.2f}",
            "what is saved",
        ),
    ]
    if paper is not None:
        known += [
            Column(
                "paper",
                lambda row: published(row, paper),
                lambda row: number(published(row, paper)),
                "the paper's figure, percent",
            ),
            Column(
                "difference",
                lambda row: difference(row, paper),
                lambda row: number(difference(row, paper), sign=True),
                "ours minus the paper's, points",
            ),
        ]
    return [column for column in known if any(column.value(row) is not None for row in rows)]


def published(row: Row, paper: Paper) -> float | None:
    """The paper's number for a row: one for its data set, else one for any."""
    key = (row.experiment.scenario, row.experiment.tasks, row.experiment.method)
    return paper.get((row.experiment.dataset, *key), paper.get(key))


def difference(row: Row, paper: Paper) -> float | None:
    """Ours minus the paper's, in points."""
    theirs = published(row, paper)
    return None if theirs is None else 100 * row.accuracy.mean - theirs


def number(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """As tables show it, with a minus that is one."""
    if value is None:
        return MISSING
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.replace("-", "−")


def best(section: Sequence[Row]) -> Row | None:
    """The most accurate of those that do not see all data at once."""
    return max((row for row in section if not row.experiment.joint), key=lambda row: row.accuracy.mean, default=None)


def notes(section: Sequence[Row]) -> list[str]:
    """What the reader of a table must know."""
    shown = [NOTES["accuracy"]]
    if any(row.recovered is not None or row.recovered_mixed is not None for row in section):
        shown.append(NOTES["recovered"])
    if any(row.unconverged for row in section):
        shown.append(NOTES["unconverged"])
    return shown


def to_markdown(results: Iterable[Result], *, paper: Paper | None = None) -> str:
    """A heading and a table for each section.

    Args:
        results: see `read_results`.
        paper: the paper's accuracies in percent, see `Paper`.
    """
    parts = []
    for section in found_sections(results):
        shown, top = columns(section, paper), best(section)
        lines = [
            f"### {_markdown(heading(section[0]))}",
            "",
            f"{_markdown(conditions(section[0]))}",
            "",
            f"| method | settings | {' | '.join(column.name for column in shown)} |",
            f"|---|---|{'---:|' * len(shown)}",
        ]
        for row in section:
            cells = [f"**{c.text(row)}**" if c.name == "accuracy" and row is top else c.text(row) for c in shown]
            name = _markdown(row.experiment.method) + UNCONVERGED * bool(row.unconverged)
            lines.append(f"| {' | '.join([name, _markdown(row.settings), *cells])} |")
        parts.append("\n".join([*lines, "", *(f"{note}  " for note in notes(section))]))
    return "\n\n".join(parts) + "\n"


def to_csv(results: Iterable[Result], *, paper: Paper | None = None) -> str:
    """One line a row, all sections in one table, figures unrounded; conditions and settings as JSON.

    Args:
        results: see `read_results`.
        paper: the paper's accuracies in percent, see `Paper`.
    """
    rows = [row for section in found_sections(results) for row in section]
    text = io.StringIO()
    lines = [_record(row, paper) for row in rows]
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def to_latex(results: Iterable[Result], *, paper: Paper | None = None) -> str:
    r"""A `table` for each section, with the package booktabs.

    Args:
        results: see `read_results`.
        paper: the paper's accuracies in percent, see `Paper`.
    """
    parts = []
    for section in found_sections(results):
        shown, top = columns(section, paper), best(section)
        body = []
        for row in section:
            cells = [_latex(column.text(row)) for column in shown]
            cells = [
                rf"\textbf{{{cell}}}" if column.name == "accuracy" and row is top else cell
                for column, cell in zip(shown, cells, strict=True)
            ]
            name = _latex(row.experiment.method + UNCONVERGED * bool(row.unconverged))
            body.append(" & ".join([name, _latex(row.settings), *cells]) + r" \\")
        caption = f"{heading(section[0])} ({conditions(section[0])}). {' '.join(notes(section))}"
        head = " & ".join(["method", "settings", *(_latex(column.name) for column in shown)])
        parts.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{_latex(caption)}}}",
                    rf"\begin{{tabular}}{{ll{'r' * len(shown)}}}",
                    r"\toprule",
                    rf"{head} \\",
                    r"\midrule",
                    *body,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def found_sections(results: Iterable[Result]) -> list[list[Row]]:
    """The sections of a report.

    Raises:
        ValueError: when there is nothing to report.
    """
    found = sections(summarise(results))
    if not found:
        raise ValueError("there are no results to report.")
    return found


def _spread(name: str, value: Callable[[Row], Spread | None], scale: float, meaning: str, *, digits: int = 2) -> Column:
    def mean(row: Row) -> float | None:
        spread = value(row)
        return None if spread is None else scale * spread.mean

    def text(row: Row) -> str:
        spread = value(row)
        deviation = "" if spread is None or spread.sd is None else f" ± {number(scale * spread.sd, digits)}"
        return number(mean(row), digits) + deviation

    return Column(name, mean, text, meaning)


def _share(name: str, value: Callable[[Row], float | None], meaning: str) -> Column:
    def percent(row: Row) -> float | None:
        share = value(row)
        return None if share is None else 100 * share

    return Column(name, percent, lambda row: number(percent(row), 0), meaning)


def _record(row: Row, paper: Paper | None) -> dict[str, Any]:
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
    }
    if paper is not None:
        record |= {"paper_percent": published(row, paper), "difference_points": difference(row, paper)}
    return record


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
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
