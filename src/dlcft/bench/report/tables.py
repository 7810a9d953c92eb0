"""What stands in the tables of a report, whatever they are written as. Accuracies in percent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from dlcft.bench.experiment import Result
from dlcft.bench.report.artefacts import CURVES, Entry, Reported
from dlcft.bench.report.summary import (
    SMALL_DISTANCE,
    Row,
    Spread,
    common_settings,
    conditions,
    heading,
    own_settings,
    sections,
    settings_text,
    summarise,
)
from dlcft.bench.spectrum import Trace

MISSING = "–"
UNCONVERGED = "†"
UNTUNED = "‡"

NOTES = {
    "accuracy": "Accuracy in percent after the last task, mean ± standard deviation over seeds.",
    "recovered": "Recovered: (method − None)/(Joint − None), None and Joint of the same model and loss; "
    "mixed: with the nonlinear None, as in the paper. Left out where these two are less than "
    f"{100 * SMALL_DISTANCE:.0f} points apart.",
    "ours": "Ours: mean ± standard deviation over seeds, in parentheses how many; percent, differences in points.",
    "recovered pair": "Recovered: (method − None)/(Joint − None) in percent, None and Joint of the same model and loss "
    "/ with the nonlinear None, as in the paper; closed form, which has no None, with the nonlinear Joint too. "
    f"Left out where None and Joint are less than {100 * SMALL_DISTANCE:.0f} points apart.",
    "costs": "Seconds: of training and remembering; of closed form, all sums and one solve. "
    "MB: what is saved, network and memory.",
    "curve": "Percent after so many tasks, mean over seeds. Joint has learned all at once.",
    "eigenvalue": "Largest eigenvalue of the Fisher matrix of the mean loss, from a part of the training images.",
    "untuned": f"{UNTUNED} with the open choices' settings, where others were tuned.",
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


@dataclass(frozen=True)
class Cell:
    """A figure in a table.

    Attributes:
        text: what is shown.
        value: what to sort by.
        row: where the figure is from.
        strong: the best of its column.
    """

    text: str
    value: float | None = None
    row: Row | None = None
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table, whatever it is written as.

    Attributes:
        title: above it.
        subtitle: below that, or empty.
        groups: names that stand over several columns each, with how many; none for none.
        head: names of the columns.
        lines: a name and a cell for each column.
        notes: what the reader must know.
    """

    title: str
    subtitle: str
    groups: tuple[tuple[str, int], ...]
    head: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[str, ...]


def columns(rows: Sequence[Row]) -> list[Column]:
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
        Column(
            "peak, MB",
            lambda row: None if row.peak_bytes is None else row.peak_bytes / 1e6,
            lambda row: MISSING if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
            "the most memory that a run took",
        ),
    ]
    return [column for column in known if any(column.value(row) is not None for row in rows)]


def number(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """As tables show it, with a minus that is one."""
    if value is None:
        return MISSING
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.replace("-", "−")


def best(section: Sequence[Row]) -> Row | None:
    """The most accurate of those that do not see all data at once."""
    return max((row for row in section if not row.experiment.joint), key=lambda row: row.accuracy.mean, default=None)


def artefact_table(one: Reported) -> Table:
    """One of the paper's tables; of a figure, the numbers that are drawn."""
    if one.traces:
        return _trace_table(one)
    if any(entry.metric in CURVES for entry in one.entries):
        return _curve_table(one)
    groups, head, notes = [], [], [NOTES["ours"]]
    lines: dict[str, list[Cell]] = {label: [] for label in one.labels}
    tuned = any(entry.tuned for entry in one.entries)
    for column in one.columns:
        entries = {label: one.entry(label, column) for label in one.labels}
        there = [entry for entry in entries.values() if entry is not None]
        known = [entry for entry in there if entry.ours and not (entry.row and entry.row.experiment.joint)]
        top = max(known, key=lambda entry: entry.ours.mean if entry.ours else 0, default=None)
        parts: list[tuple[str, Callable[[Entry], Cell]]] = [("ours", partial(ours_cell, top=top, tuned=tuned))]
        parts += [("paper", paper_cell)] * any(entry.paper is not None for entry in there)
        parts += [("difference", difference_cell)] * any(entry.difference is not None for entry in there)
        if any(share is not None for entry in there for share in entry.recovered):
            parts += [("recovered", recovered_cell)]
            notes = [*notes, NOTES["recovered pair"]]
        if any(entry.costs for entry in there):
            parts += [("seconds", seconds_cell), ("MB", size_cell)]
            notes = [*notes, NOTES["costs"]]
        groups.append((column, len(parts)))
        head += [name for name, _ in parts]
        for label, entry in entries.items():
            lines[label] += [Cell("") if entry is None else write(entry) for _, write in parts]
    rows = [entry.row for entry in one.entries if entry.row is not None]
    notes += [NOTES["unconverged"]] * any(row.unconverged for row in rows)
    notes += [NOTES["untuned"]] * any(UNTUNED in cell.text for cells in lines.values() for cell in cells)
    shown = tuple((label, tuple(cells)) for label, cells in lines.items())
    return Table(one.title, "", tuple(groups), tuple(head), shown, (*one.notes, *dict.fromkeys(notes)))


def paper_cell(entry: Entry) -> Cell:
    """The paper's number."""
    return Cell(number(entry.paper), entry.paper)


def difference_cell(entry: Entry) -> Cell:
    """Ours minus the paper's."""
    return Cell(number(entry.difference, sign=True), entry.difference)


def ours_cell(entry: Entry, top: Entry | None = None, tuned: bool = False) -> Cell:
    """What was measured, marked where it is not all it should be; `tuned` says that others were."""
    spread, row = entry.ours, entry.row
    if spread is None or row is None:
        return Cell(MISSING)
    deviation = "" if spread.sd is None else f" ± {number(spread.sd)}"
    marks = UNCONVERGED * bool(row.unconverged) + UNTUNED * (tuned and not entry.tuned and row.converged is not None)
    return Cell(f"{number(spread.mean)}{deviation} ({len(row.results)}){marks}", spread.mean, row, entry is top)


def recovered_cell(entry: Entry) -> Cell:
    """Of the way from None to Joint, both ways of counting."""
    own, mixed = (None if share is None else 100 * share for share in entry.recovered)
    text = MISSING if own is None and mixed is None else f"{number(own, 0)} / {number(mixed, 0)}"
    return Cell(text, mixed if own is None else own)


def seconds_cell(entry: Entry) -> Cell:
    """How long it learned."""
    seconds = entry.row.seconds.mean if entry.costs and entry.row else None
    return Cell(number(seconds, 0), seconds)


def size_cell(entry: Entry) -> Cell:
    """How much it keeps."""
    size = entry.row.state_bytes.mean / 1e6 if entry.costs and entry.row else None
    return Cell(number(size, 1), size)


def _curve_table(one: Reported) -> Table:
    lines: dict[str, list[Cell]] = {label: [] for label in one.labels}
    groups, head = [], []
    for column in one.columns:
        points = {}
        for label in one.labels:
            entry = one.entry(label, column)
            points[label] = {} if entry is None or entry.row is None else dict(CURVES[entry.metric](entry.row))
        # Joint is learned at once: it stands beside the last task
        last = max((max(known) for known in points.values() if known), default=1)
        for label in one.labels:
            entry = one.entry(label, column)
            if entry is not None and entry.row is not None and entry.row.experiment.joint:
                points[label] = dict.fromkeys([last], *points[label].values())
        tasks = sorted({task for known in points.values() for task in known})
        groups.append((f"{column}, after", len(tasks)))
        head += [str(task) for task in tasks]
        for label, known in points.items():
            means = [100 * known[task].mean if task in known else None for task in tasks]
            lines[label] += [Cell(number(mean, 1), mean) for mean in means]
    shown = tuple((label, tuple(cells)) for label, cells in lines.items() if any(c.value is not None for c in cells))
    return Table(one.title, "", tuple(groups), tuple(head), shown, (*one.notes, NOTES["curve"]))


def _trace_table(one: Reported) -> Table:
    lines = []
    for trace in one.traces:
        for record in trace.records:
            loss, seed = trace.spectrum.loss, trace.spectrum.seed
            name = f"{network_name(trace)}, {loss}, seed {seed}, {record['epochs']:.1f} epochs"
            lines.append((name, tuple(Cell(f"{record[key]:.4g}", record[key]) for key in TRACED)))
    head = tuple(name.replace("_", " ") for name in TRACED)
    return Table(one.title, "", (), head, tuple(lines), (*one.notes, NOTES["eigenvalue"]))


TRACED = ("train_loss", "test_loss", "eigenvalue")


def network_name(trace: Trace) -> str:
    """What was trained on what."""
    return f"{trace.spectrum.network} on {trace.spectrum.dataset}"


def notes(section: Sequence[Row]) -> list[str]:
    """What the reader of a table must know."""
    shown = [NOTES["accuracy"]]
    if any(row.recovered is not None or row.recovered_mixed is not None for row in section):
        shown.append(NOTES["recovered"])
    if any(row.unconverged for row in section):
        shown.append(NOTES["unconverged"])
    return shown


def section_table(section: Sequence[Row]) -> Table:
    """A method a line."""
    shown, top = columns(section), best(section)
    lines = []
    for row in section:
        cells = [Cell(c.text(row), c.value(row), row, c.name == "accuracy" and row is top) for c in shown]
        name = row.experiment.method + UNCONVERGED * bool(row.unconverged)
        lines.append((name, (Cell(own_settings(row, section)), *cells)))
    head = ("settings", *(column.name for column in shown))
    return Table(heading(section[0]), shared(section), (), head, tuple(lines), tuple(notes(section)))


def shared(section: Sequence[Row]) -> str:
    """What all rows have in common."""
    settings = settings_text(common_settings(section))
    return f"{conditions(section[0])}; settings in common: {settings}" if settings else conditions(section[0])


def found_sections(results: Iterable[Result], traces: Sequence[Trace] = ()) -> list[list[Row]]:
    """The sections of a report.

    Raises:
        ValueError: when there is nothing to report.
    """
    found = sections(summarise(results))
    if not found and not traces:
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
