"""Results as the paper's tables and figures: to which cell each belongs, at which scale, beside the paper's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlcft.bench.experiment import Experiment
from dlcft.bench.paper import ARTEFACTS, SCALES, Metric, Tuned, cells, variant
from dlcft.bench.report.summary import Row, Spread, curve, probe
from dlcft.bench.reproduction import noted
from dlcft.bench.spectrum import Trace
from dlcft.bench.tune import FOLDER, tunings

Points = list[tuple[int, Spread]]
CURVES: dict[str, Callable[[Row], Points]] = {"curve": curve, "knn": probe}
STAND_IN = "Columns name the paper's streams; at this scale handwritten digits in a few tasks stand in for them."


@dataclass(frozen=True)
class Entry:
    """A cell of an artefact, as far as it was measured.

    Attributes:
        label: its row.
        column: its column.
        metric: what of the results is shown.
        paper: the paper's number in percent; None where it has none, or digits stand in.
        row: the results over seeds; None where there is none.
        tuned: whether their settings were tuned.
    """

    label: str
    column: str
    metric: Metric
    paper: float | None
    row: Row | None
    tuned: bool

    @property
    def ours(self) -> Spread | None:
        """In percent; of curves, where they end."""
        if self.row is None:
            return None
        spread = self.row.bwt if self.metric == "bwt" else self.row.accuracy
        if self.metric in CURVES:
            points = CURVES[self.metric](self.row)
            spread = points[-1][1] if points else None
        if spread is None:
            return None
        return Spread(100 * spread.mean, None if spread.sd is None else 100 * spread.sd)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper

    @property
    def recovered(self) -> tuple[float | None, float | None]:
        """Of the way from None to Joint, of the same model and loss, and as the paper has it; of accuracies only."""
        if self.row is None or self.metric not in ("accuracy", "acc"):
            return None, None
        return self.row.recovered, self.row.recovered_mixed

    @property
    def costs(self) -> bool:
        """Whether time and size belong beside it: they are known, and do not stand beside its accuracy already."""
        return self.row is not None and self.metric in ("accuracy", "acc")


@dataclass(frozen=True)
class Reported:
    """An artefact at a scale.

    Attributes:
        name: in `ARTEFACTS`.
        scale: in `SCALES`.
        entries: its cells, row by row as in the paper, then ours.
        traces: of the figure of eigenvalues.
        notes: why a column is empty, and what else must be known.
    """

    name: str
    scale: str
    entries: tuple[Entry, ...]
    traces: tuple[Trace, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The artefact's own, and the scale."""
        return f"{ARTEFACTS[self.name].title} (scale {self.scale})"

    @property
    def labels(self) -> list[str]:
        """Its rows, in order."""
        return list(dict.fromkeys(entry.label for entry in self.entries))

    @property
    def columns(self) -> list[str]:
        """Its columns, in order."""
        return list(dict.fromkeys(entry.column for entry in self.entries))

    def entry(self, label: str, column: str) -> Entry | None:
        """The cell there, if there is one."""
        found = [entry for entry in self.entries if (entry.label, entry.column) == (label, column)]
        return found[0] if found else None


def reported(
    rows: Sequence[Row], traces: Sequence[Trace] = (), tuned: Mapping[str, Tuned] | None = None
) -> list[Reported]:
    """The artefacts of which there is at least one result, scale by scale.

    Args:
        rows: see `summary.summarise`.
        traces: curves of eigenvalues.
        tuned: the settings that were chosen, by scale, see `read_tuned`. A cell shows results with these, and if there
            is none, those of the open choices.
    """
    known: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: len(row.results)):  # of several with other weights, that with most seeds
        known[replace(row.experiment, seed=0).key] = row
    found = []
    for scale in SCALES:
        entries = _entries(scale, known, (tuned or {}).get(scale, {}))
        spectra = {
            replace(base, loss=loss, seed=0) for base in SCALES[scale].spectra for loss in ("cross-entropy", "mse")
        }
        ours = tuple(one for one in traces if replace(one.spectrum, seed=0) in spectra)
        for name in ARTEFACTS:
            belonging = ours if name == "vanishing-curvature" else ()
            if belonging or any(entry.row is not None for entry in entries[name]):
                found.append(Reported(name, scale, tuple(entries[name]), belonging, _notes(name, scale)))
    return found


def read_tuned(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    """What `tuning` has chosen for results in a folder, by scale.

    Raises:
        ValueError: when a record is damaged.
    """
    if not (folder / FOLDER).is_dir():
        return {}
    return {scale: noted(tunings("all", scale), folder) for scale in SCALES}


def _entries(scale: str, known: Mapping[str, Row], tuned: Tuned) -> dict[str, list[Entry]]:
    """Of every artefact, all cells, also of streams that the scale has not."""
    planned = [
        {(one.artefact, one.label, one.column): one.experiment for one in cells("all", scale, 1, chosen)}
        for chosen in (tuned, {})
    ]
    entries: dict[str, list[Entry]] = {}
    for name, artefact in ARTEFACTS.items():
        entries[name] = []
        for cell in artefact.cells:
            best, usual = (experiments.get((name, cell.label, cell.column)) for experiments in planned)
            row, was_tuned = None, False
            if isinstance(best, Experiment) and isinstance(usual, Experiment):
                row = known.get(best.key, known.get(usual.key))
                was_tuned = best.key in known and variant(usual) in tuned
            paper = None if scale == "smoke" else cell.paper
            entries[name].append(Entry(cell.label, cell.column, cell.metric, paper, row, was_tuned))
    return entries


def _notes(name: str, scale: str) -> tuple[str, ...]:
    missing = {cell.column: cell.stream for cell in ARTEFACTS[name].cells if cell.stream not in SCALES[scale].streams}
    notes = [f"{column} is empty: {SCALES[scale].missing[stream]}" for column, stream in missing.items()]
    return tuple([STAND_IN] * (scale == "smoke") + notes)
