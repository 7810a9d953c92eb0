"""Results in the paper's tables and figures beside its numbers, and in sections of their own. Accuracies in percent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dlcft.bench import paper
from dlcft.bench.choices import SCALES
from dlcft.bench.experiment import Result
from dlcft.bench.paper import ARTEFACTS
from dlcft.bench.report import claims, summary
from dlcft.bench.report.summary import CURVES, SMALL_DISTANCE, Points, Row, Spread, settings_text
from dlcft.bench.spectrum import Trace

MISSING = "–"
UNCONVERGED = "†"
UNTUNED = "‡"
MARKS = (UNCONVERGED, UNTUNED)
STAND_IN = "At this scale handwritten digits in a few tasks stand in for the paper's streams."
TRACED = ("train_loss", "test_loss", "eigenvalue")

_APART = f"are less than {100 * SMALL_DISTANCE:.0f} points apart."
NOTES = {  # by the column that they are about, or else by a name
    "claims": "Points: the difference that a claim is about, mean over the seeds that all of its rows have, with its "
    f"standard error over seeds. Holds: above zero by more than {claims.ERRORS} standard errors, or at its bound; "
    "level: within them.",
    "accuracy": "Accuracy in percent after the last task, mean ± standard deviation over seeds.",
    "shares": "Recovered: (method − None)/(Joint − None), None and Joint of the same model and loss; "
    f"mixed: with the nonlinear None, as in the paper. Left out where these two {_APART}",
    "ours": "Ours: mean ± standard deviation over seeds, in parentheses how many; percent, differences in points.",
    "recovered": "Recovered: (method − None)/(Joint − None) in percent, None and Joint of the same model and loss "
    "/ with the nonlinear None, as in the paper; closed form, which has no None, with the nonlinear Joint too. "
    f"Left out where None and Joint {_APART}",
    "seconds": "Seconds: of training and remembering; of closed form, all sums and one solve. "
    "MB: the saved state, network and memory.",
    "curve": "Percent after so many tasks, mean over seeds. Joint has learned all at once.",
    "eigenvalue": "Largest eigenvalue of the Fisher matrix of the mean loss, from a part of the training images.",
    UNTUNED: f"{UNTUNED} with the scale's settings, where others were tuned.",
    UNCONVERGED: f"{UNCONVERGED} training had not converged: the last epochs still lowered the loss by 1 % or more of "
    "the first ones'.",
}


@dataclass(frozen=True)
class Entry:
    """A cell of an artefact, with the results over seeds; None where there are none."""

    cell: paper.Cell
    row: Row | None
    compared: bool = False  # whether its difference from the paper's number says anything

    @property
    def tuned(self) -> bool:
        return self.row is not None and self.row.results[0].tuned

    @property
    def points(self) -> Points:
        """The points of a curve."""
        return [] if self.row is None or self.cell.metric not in CURVES else CURVES[self.cell.metric](self.row)

    @property
    def ours(self) -> Spread | None:
        """The results in percent; of curves, the last point."""
        if self.row is None:
            return None
        spread = self.row.bwt if self.cell.metric == "bwt" else self.row.accuracy
        if self.cell.metric in CURVES:
            spread = self.points[-1][1] if self.points else None
        return None if spread is None else spread.times(100)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        if not self.compared or self.ours is None or self.cell.paper is None:
            return None
        return self.ours.mean - self.cell.paper

    @property
    def recovered(self) -> tuple[float | None, float | None]:
        """Shares of the distance from None to Joint: of the same model and loss, and as the paper counts."""
        return self._beside("recovered"), self._beside("recovered_mixed")

    def _beside(self, name: str) -> Any:
        """A figure of the row, beside accuracies only: it is not shown again beside BWT."""
        return getattr(self.row, name, None) if self.cell.metric in ("accuracy", "acc") else None

    def figures(self, *, best: bool = False, others_tuned: bool = False) -> dict[str, Cell]:
        """The cells of a table, with marks: training had not converged, or others' settings were tuned."""
        row, spread = self.row, self.ours
        ours = Cell(MISSING)
        if row is not None and spread is not None:
            untuned = others_tuned and not self.tuned and row.converged is not None
            text = f"{_spread(spread).text} ({len(row.results)}){UNCONVERGED * bool(row.unconverged)}"
            ours = Cell(text + UNTUNED * untuned, spread.mean, row, best)
        own, mixed = (None if share is None else 100 * share for share in self.recovered)
        both = MISSING if own is None and mixed is None else f"{number(own, 0)} / {number(mixed, 0)}"
        return {
            "ours": ours,
            "paper": _number(self.cell.paper),
            "difference": Cell(number(self.difference, sign=True), self.difference),
            "recovered": Cell(both, mixed if own is None else own),
            "seconds": _spread(self._beside("seconds"), 1, 0, deviation=False),
            "MB": _spread(self._beside("state_bytes"), 1e-6, 1, deviation=False),
        }


@dataclass(frozen=True)
class Reported:
    """An artefact at a scale: its cells row by row as in the paper, then ours; or curves of eigenvalues."""

    name: str
    scale: str
    entries: Sequence[Entry]
    traces: Sequence[Trace]
    notes: Sequence[str]  # why a column is empty, and whether digits stand in

    @property
    def title(self) -> str:
        return f"{ARTEFACTS[self.name].title} (scale {self.scale})"

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(entry.cell.label for entry in self.entries))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(entry.cell.column for entry in self.entries))

    @property
    def has_curves(self) -> bool:
        return any(entry.cell.metric in CURVES for entry in self.entries)

    def entry(self, label: str, column: str) -> Entry | None:
        """The cell there, if there is one."""
        found = (entry for entry in self.entries if (entry.cell.label, entry.cell.column) == (label, column))
        return next(found, None)


def reported(rows: Sequence[Row], traces: Sequence[Trace] = ()) -> list[Reported]:
    """The artefacts of which there is at least one result, scale by scale.

    Results carry the row that they were run for; of several with other settings, tuned ones are shown, and of these
    those with most seeds.
    """
    known: dict[tuple[str | None, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row.results[0].tuned, len(row.results))):
        known[row.results[0].row, summary.stream_of(row.experiment)] = row
    found = []
    for scale, size in SCALES.items():
        streams = {name: summary.stream_of(experiment) for name, experiment in size.streams.items()}
        spectra = [replace(base, loss=loss) for base in size.spectra for loss in ("cross-entropy", "mse")]
        ours = [one for one in traces if replace(one.spectrum, seed=0) in spectra]
        for name, artefact in ARTEFACTS.items():
            entries, notes = [], [STAND_IN] * (scale == "smoke")
            there = paper.cells_at(name, scale)
            for cell in artefact.cells:
                shown = paper.titled(cell, scale)
                if cell.stream not in streams:
                    notes.append(f"{shown.column} is empty: {size.missing[cell.stream]}")
                elif cell not in there:
                    continue
                shown = replace(shown, paper=None) if scale == "smoke" else shown  # digits compare with nothing
                behind = known.get((cell.row, streams.get(cell.stream, "")))
                entries.append(Entry(shown, behind, compared=scale == "paper"))
            belonging = ours if name == "vanishing-curvature" else []
            if belonging or any(entry.row is not None for entry in entries):
                found.append(Reported(name, scale, entries, belonging, list(dict.fromkeys(notes))))
    return found


class Cell(NamedTuple):
    """A figure in a table: its text, the number to sort by, the results behind it, whether it is the best."""

    text: str
    value: float | None = None
    row: Row | None = None
    strong: bool = False


class Line(NamedTuple):
    """A line of a table: its name, a cell for each column, and settings of its own."""

    name: str
    cells: Sequence[Cell]
    settings: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.settings}" if self.settings else self.name


Figures = tuple[list[str], dict[str, dict[str, Cell]]]  # names of columns, and the cells of each line by them


@dataclass(frozen=True)
class Table:
    """A table, for every format; `groups` are names that stand over several columns each, with how many."""

    title: str
    head: Sequence[str]
    lines: Sequence[Line]
    notes: Sequence[str]
    groups: Sequence[tuple[str, int]] = ()
    subtitle: str = ""

    @property
    def starts(self) -> list[int]:
        """The first column of each group."""
        return [sum(span for _, span in self.groups[:place]) for place in range(len(self.groups))]


def number(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """As tables show it, with a true minus sign."""
    return MISSING if value is None else f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def _number(value: float | None, scale: float = 1, digits: int = 2) -> Cell:
    shown = None if value is None else scale * value
    return Cell(number(shown, digits), shown)


def _spread(spread: Spread | None, scale: float = 1, digits: int = 2, *, deviation: bool = True) -> Cell:
    if spread is None:
        return Cell(MISSING)
    after = f" ± {number(scale * spread.sd, digits)}" if deviation and spread.sd is not None else ""
    return Cell(number(scale * spread.mean, digits) + after, scale * spread.mean)


def _filled(lines: Collection[Mapping[str, Cell]], always: str = "") -> list[str]:
    """The names of the columns in which there is a number."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [name for name in names if name == always or any(line[name].value is not None for line in lines)]


def artefact_table(one: Reported) -> Table:
    """One of the paper's tables; of a figure, the numbers that are drawn."""
    if one.traces:
        return _trace_table(one)
    lines: dict[str, list[Cell]] = {label: [] for label in one.labels}
    groups, head = [], []
    tuned = any(entry.tuned for entry in one.entries)
    for column in one.columns:
        entries = {entry.cell.label: entry for entry in one.entries if entry.cell.column == column}
        names, figures = _curve_cells(entries) if one.has_curves else _cells(entries, tuned)
        groups.append((f"{column}, after" if one.has_curves else column, len(names)))
        head += names
        for label, cells in lines.items():
            cells += [figures[label][name] if label in figures else Cell("") for name in names]
    shown = [
        Line(*line) for line in lines.items() if not one.has_curves or any(cell.value is not None for cell in line[1])
    ]
    notes = [*one.notes, *([NOTES["curve"]] if one.has_curves else [])]
    notes += [NOTES[name] for name in dict.fromkeys(head) if name in NOTES]
    notes += [NOTES[mark] for mark in MARKS if any(mark in cell.text for line in shown for cell in line.cells)]
    return Table(one.title, head, shown, notes, groups)


def _cells(entries: Mapping[str, Entry], tuned: bool) -> Figures:
    """The names and the cells of the columns that have a number."""
    known = [entry for entry in entries.values() if entry.ours and entry.row and not entry.row.experiment.joint]
    best = max(known, key=lambda entry: entry.ours.mean if entry.ours else 0, default=None)
    figures = {label: entry.figures(best=entry is best, others_tuned=tuned) for label, entry in entries.items()}
    return _filled(figures.values(), always="ours"), figures


def _curve_cells(entries: Mapping[str, Entry]) -> Figures:
    points = {label: dict(entry.points) for label, entry in entries.items()}
    last = max((task for known in points.values() for task in known), default=1)
    for label, entry in entries.items():
        if points[label] and entry.row is not None and entry.row.experiment.joint:
            points[label] = {last: entry.points[-1][1]}  # learned at once: it stands beside the last task
    tasks = sorted({task for known in points.values() for task in known})
    figures = {
        label: {str(task): _number(known[task].mean if task in known else None, 100, 1) for task in tasks}
        for label, known in points.items()
    }
    return [str(task) for task in tasks], figures


def _trace_table(one: Reported) -> Table:
    lines = []
    for trace in one.traces:
        for record in trace.records:
            loss, seed = trace.spectrum.loss, trace.spectrum.seed
            name = f"{network_name(trace)}, {loss}, seed {seed}, {record['epochs']:.1f} epochs"
            lines.append(Line(name, [Cell(f"{record[key]:.4g}", record[key]) for key in TRACED]))
    head = [name.replace("_", " ") for name in TRACED]
    return Table(one.title, head, lines, [*one.notes, NOTES["eigenvalue"]])


def network_name(trace: Trace) -> str:
    """The network and its data set."""
    return f"{trace.spectrum.network} on {trace.spectrum.dataset}"


def section_table(section: Sequence[Row]) -> Table:
    """A method a line, with the columns for which at least one has a figure."""
    # joint training sees all data at once, and is no rival
    best = max((row for row in section if not row.experiment.joint), key=lambda row: row.accuracy.mean, default=None)
    figures = [_figures(row) for row in section]
    head = _filled(figures)
    lines = []
    for row, label, cells in zip(section, summary.labels(section), figures, strict=True):
        shown = [cells[name]._replace(row=row, strong=name == "accuracy" and row is best) for name in head]
        lines.append(Line(label + UNCONVERGED * bool(row.unconverged), shown, summary.own_settings(row, section)))
    notes = [NOTES["accuracy"]] + [NOTES["shares"]] * any(name.startswith("recovered") for name in head)
    notes += [NOTES[UNCONVERGED]] * any(row.unconverged for row in section)
    settings = settings_text(summary.common_settings(section))
    subtitle = summary.conditions(section[0]) + (f"; settings in common: {settings}" if settings else "")
    return Table(summary.heading(section[0]), head, lines, notes, subtitle=subtitle)


def _figures(row: Row) -> dict[str, Cell]:
    return {
        "seeds": _number(len(row.results), 1, 0),
        "accuracy": _spread(row.accuracy, 100),
        "BWT": _spread(row.bwt, 100),
        "forgetting": _spread(row.forgetting, 100),
        "recovered": _number(row.recovered, 100, 0),
        "recovered, mixed": _number(row.recovered_mixed, 100, 0),
        "seconds": _spread(row.seconds, 1, digits=1),
        "state, MB": _spread(row.state_bytes, 1e-6, deviation=False),
        "peak, MB": _number(row.peak_bytes, 1e-6, 0),
    }


CLAIMED = "The paper's claims"


def claims_tables(artefacts: Iterable[Reported], sections: Iterable[Sequence[Row]]) -> list[Table]:
    """The claims at each scale that has artefacts."""
    rows, scales = [row for section in sections for row in section], dict[str, list[Trace]]()
    for one in artefacts:
        scales.setdefault(one.scale, []).extend(one.traces)
    found = [_claims_table(rows, traces, scale) for scale, traces in scales.items() if scale != "smoke"]
    return [table for table in found if table.lines]


def _claims_table(rows: Sequence[Row], traces: Sequence[Trace], scale: str) -> Table:
    """Every claim that the results of a scale can be held against."""
    streams = {summary.stream_of(experiment): name for name, experiment in SCALES[scale].streams.items()}
    known: dict[str, dict[str, Sequence[Result]]] = {}
    for row in sorted(rows, key=lambda row: (row.results[0].tuned, len(row.results))):
        stream, name = streams.get(summary.stream_of(row.experiment)), row.results[0].row
        if stream is not None and name is not None:
            known.setdefault(stream, {})[name] = row.results
    found = [claims.judged(claim, known.get(claim.stream, {})) for claim in claims.CLAIMS]
    lines = [_claim_line(one, scale) for one in found if one is not None]
    for trace in traces:
        left = 100 * claims.share_left(trace)
        what = f"{network_name(trace)}, {trace.spectrum.loss}, seed {trace.spectrum.seed}"
        name = f"e, largest eigenvalue in the end, percent of its height: {what}"
        lines.append(Line(name, [_number(left, 1, 0), Cell(MISSING), Cell("1", 1), Cell(MISSING)]))
    head = ["points", "standard error", "seeds", "verdict"]
    meanings = "; ".join(f"{letter}: {meaning}" for letter, meaning in claims.LETTERS.items())
    return Table(f"{CLAIMED} (scale {scale})", head, lines, [f"Claims: {meanings}.", NOTES["claims"]])


def _claim_line(one: claims.Judged, scale: str) -> Line:
    claim = one.claim
    stream = SCALES[scale].streams[claim.stream]
    figures = [Cell(number(one.mean, sign=True), one.mean), _number(one.error), _number(len(one.values), 1, 0)]
    return Line(f"{claim.letter}, {stream.scenario}, {stream.tasks} tasks: {claim.text}", [*figures, Cell(one.verdict)])


def contents(results: Iterable[Result], traces: Sequence[Trace]) -> tuple[list[Reported], list[list[Row]]]:
    """The artefacts and the sections of a report; refused when there is nothing to report."""
    rows = summary.summarise(results)
    if not rows and not traces:
        raise ValueError("there are no results to report.")
    return reported(rows, traces), summary.sections(rows)
