"""The paper's tables and figures by name: the experiment behind each cell, and the paper's own number beside it.

Settings that the paper leaves open are in `choices.OPEN_CHOICES`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dlcft.bench.choices import SCALES, WEIGHTS, Settings, open_settings
from dlcft.bench.experiment import Experiment, recipe_of
from dlcft.bench.spectrum import MLP, Spectrum
from dlcft.network.names import check_name

Metric = Literal["accuracy", "acc", "bwt", "curve", "knn", "eigenvalue"]


@dataclass(frozen=True)
class Row:
    """A row of the tables: an entry in `ROWS` is all that a new one needs."""

    method: str  # a name in `RECIPES`, or `module:Name`
    settings: Settings = field(default_factory=dict)  # those that make it this row
    joint: bool = False  # learn all tasks at once
    ours: bool = False  # it is not the paper's; it is in every table, below the paper's rows
    streams: tuple[str, ...] = ()  # the only streams that it is on; empty for all
    probed: bool = False  # it is in the figure of nearest neighbours: probed in the tables' runs, to run nothing twice

    def on(self, stream: str) -> bool:
        """Whether it is on a stream."""
        return not self.streams or stream in self.streams


_PAPERS, _ZERO = "dlcft-paper", {"head_start": "zero"}
_RECOVERED = ("data-10", "data-100", "class-10", "mit-4")  # the table of task-IL has no distance to recover
ROWS: dict[str, Row] = {
    "None": Row("none", probed=True),
    "LwF": Row("lwf", probed=True),
    "EWC": Row("ewc", probed=True),
    "MAS": Row("mas", probed=True),
    "OSLA": Row("osla", probed=True),
    "ER": Row("er"),
    "DER": Row("der"),
    "DER++": Row("derpp"),
    "K-FAC, nonlinear + SCE": Row("osla", {"buffer": 500}),
    "TK-FAC, nonlinear + SCE": Row("osla", {"curvature": "tkfac", "buffer": 500}),
    "DLCFT (diagonal)": Row(_PAPERS, {"curvature": "diagonal"}),
    "DLCFT (K-FAC)": Row(_PAPERS, {"curvature": "kfac"}, probed=True),
    "DLCFT (TK-FAC)": Row(_PAPERS, probed=True),
    "Joint": Row("none", joint=True),
    "DLCFT (exact TK)": Row(_PAPERS, {"curvature": "exact-tk"}, ours=True),
    # the ends of the distance that the paper's method can recover: its head starts at zero
    "None, linear": Row("none-linear", _ZERO, ours=True, streams=_RECOVERED),
    "Joint, linear": Row("none-linear", _ZERO, joint=True, ours=True, streams=_RECOVERED),
    "dlcft": Row("dlcft", ours=True, probed=True),
    "ridge": Row("ridge", ours=True, probed=True),
    "RanPAC": Row("ranpac", ours=True),
    "dlcft-exact": Row("dlcft-exact", ours=True),
    "DLCFT without buffer": Row(_PAPERS, {"buffer": 0}, ours=True, streams=("class-10",)),
    "dlcft-replay": Row("dlcft-replay", ours=True, streams=("class-10",)),
}
_PROBED_STREAMS = ("data-10", "data-100")
_PROBED = [name for name, row in ROWS.items() if row.probed]
# a buffer counts in class-IL only: elsewhere these are one row
_WITHOUT_BUFFER = {"K-FAC, nonlinear + SCE": "OSLA"}


@dataclass(frozen=True)
class Cell:
    """One number: a row of `ROWS` on a stream, and the paper's own in percent; None where it has none."""

    label: str
    column: str
    stream: str
    row: str
    metric: Metric
    paper: float | None = None


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper. The figure of eigenvalues has no cells: see `Scale.spectra`."""

    kind: Literal["table", "figure"]
    title: str
    cells: tuple[Cell, ...] = ()


Columns = Mapping[str, tuple[str, Metric]]


def _cells(columns: Columns, numbers: Mapping[str, Sequence[float | Literal["-"] | None]]) -> list[Cell]:
    """Row by row; None is a cell without a number, "-" no cell."""
    return [
        Cell(row, column, stream, row if stream == "class-10" else _WITHOUT_BUFFER.get(row, row), metric, number)
        for row, values in numbers.items()
        for (column, (stream, metric)), number in zip(columns.items(), values, strict=True)
        if number != "-"
    ]


def _ours(columns: Columns) -> list[Cell]:
    rows = {name: row for name, row in ROWS.items() if row.ours}
    return _cells(columns, {n: [None if row.on(at) else "-" for at, _ in columns.values()] for n, row in rows.items()})


def _table(title: str, columns: Columns, numbers: Mapping[str, Any]) -> Artefact:
    return Artefact("table", title, tuple(_cells(columns, numbers) + _ours(columns)))


def _figure(title: str, metric: Metric, rows: Iterable[str]) -> Artefact:
    columns: Columns = {"10 tasks": ("data-10", metric), "100 tasks": ("data-100", metric)}
    return Artefact("figure", title, tuple(_cells(columns, {row: [None, None] for row in rows})))


_DATA_IL = {
    "None": (78.74, 71.83, 63.48),
    "LwF": (80.25, 70.95, 67.21),
    "EWC": (78.88, 72.61, 63.68),
    "MAS": (75.24, 52.50, 62.49),
    "OSLA": (79.23, 73.10, 64.08),
    "DLCFT (K-FAC)": (81.95, 75.92, 70.55),
    "DLCFT (TK-FAC)": (82.70, 80.07, 70.52),
    "Joint": (83.57, 83.57, 74.40),
}

ARTEFACTS: dict[str, Artefact] = {
    "data-il": _table(
        "Data-incremental learning: final accuracy",
        {
            "Seq-CIFAR-100, 10 tasks": ("data-10", "accuracy"),
            "Seq-CIFAR-100, 100 tasks": ("data-100", "accuracy"),
            "Seq-MIT-67, 4 tasks": ("mit-4", "accuracy"),
        },
        _DATA_IL,
    ),
    "task-class-il": _table(
        "Task- and class-incremental learning, Seq-CIFAR-100, 10 tasks: ACC",
        {"Task-IL": ("task-10", "acc"), "Class-IL": ("class-10", "acc")},
        {
            "None": (None, None),
            "LwF": (92.16, "-"),
            "EWC": (77.44, "-"),
            "OSLA": (81.03, "-"),
            "ER": (79.14, 43.52),
            "DER": (91.47, 58.07),
            "DER++": (91.56, 53.29),
            "DLCFT (TK-FAC)": (95.79, 59.98),
            "Joint": (None, None),
        },
    ),
    "ablation": _table(
        "Ablations, Seq-CIFAR-100: final accuracy",
        {
            "Data-IL, 10 tasks": ("data-10", "accuracy"),
            "Data-IL, 100 tasks": ("data-100", "accuracy"),
            "Class-IL, 10 tasks": ("class-10", "acc"),
        },
        {
            "K-FAC, nonlinear + SCE": (79.23, 73.51, 44.93),
            "DLCFT (K-FAC)": (81.95, 75.92, 59.86),
            "TK-FAC, nonlinear + SCE": (79.58, 73.18, 44.66),
            "DLCFT (TK-FAC)": (82.70, 80.07, 59.98),
        },
    ),
    "curvatures": Artefact(
        "table",
        "Curvature methods, data-IL, Seq-CIFAR-100, 10 tasks: final accuracy",
        (
            Cell("EWC", "Nonlinear+SCE", "data-10", "EWC", "accuracy", 78.88),
            Cell("EWC", "Linear+MSE", "data-10", "DLCFT (diagonal)", "accuracy", 82.17),
            Cell("K-FAC", "Nonlinear+SCE", "data-10", "OSLA", "accuracy", 79.23),
            Cell("K-FAC", "Linear+MSE", "data-10", "DLCFT (K-FAC)", "accuracy", 81.95),
            Cell("TK-FAC", "Nonlinear+SCE", "data-10", "TK-FAC, nonlinear + SCE", "accuracy"),
            Cell("TK-FAC", "Linear+MSE", "data-10", "DLCFT (TK-FAC)", "accuracy", 82.70),
            *_ours({"Linear+MSE": ("data-10", "accuracy")}),
        ),
    ),
    "bwt": _table(
        "Task-incremental learning, Seq-CIFAR-100, 10 tasks: ACC and backward transfer",
        {"ACC": ("task-10", "acc"), "BWT": ("task-10", "bwt")},
        {"LwF": (92.16, 0.04), "EWC": (77.44, -21.63), "OSLA": (81.03, -18.21), "DLCFT (TK-FAC)": (95.79, -0.58)},
    ),
    "vanishing-curvature": Artefact("figure", "Largest eigenvalue of the Fisher matrix during training"),
    "data-il-curves": _figure(
        "Data-IL, Seq-CIFAR-100: accuracy after each task",
        "curve",
        [*_DATA_IL, *(name for name, row in ROWS.items() if row.ours and row.on("data-10"))],
    ),
    "knn": _figure("Data-IL, Seq-CIFAR-100: k-NN accuracy of the features", "knn", _PROBED),
}


@dataclass(frozen=True)
class Planned:
    """A cell at a scale with a seed."""

    artefact: str
    cell: Cell  # of the figure of eigenvalues, the network and the loss
    experiment: Experiment | Spectrum  # the run behind it; a `Spectrum` in the figure of eigenvalues
    weights: str | None = None  # the backbone's file
    tuned: bool = False  # whether settings were chosen by `tune`

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `only` accepts: the label, and the method's where it learns task by task."""
        if isinstance(self.experiment, Spectrum) or self.experiment.joint:
            return (self.cell.label,)
        return self.cell.label, self.experiment.method

    def __str__(self) -> str:
        return f"{self.artefact}, {self.cell.label}, {self.cell.column}, seed {self.experiment.seed}"


Tuned = Mapping[str, Settings]


def cells(
    artefact: str, scale: str, seeds: int | None = None, tuned: Tuned | None = None, only: Sequence[str] = ()
) -> list[Planned]:
    """Every cell of an artefact (or of "all") that the scale has, once a seed; several may have the same experiment.

    `tuned` has settings by `variant` or by `of_length`, in place of the open choices; `only` has rows to keep, by their
    name or their method's.
    """
    check_name("artefact", artefact, (*ARTEFACTS, "all"))
    check_name("scale", scale, SCALES)
    count = SCALES[scale].seeds if seeds is None else seeds
    if count < 1:
        raise ValueError(f"seeds is {count}; it must be at least 1.")
    planned = []
    for name, seed in itertools.product(ARTEFACTS if artefact == "all" else [artefact], range(count)):
        planned += _spectra(name, scale, seed) if name == "vanishing-curvature" else []
        there = [cell for cell in ARTEFACTS[name].cells if cell.stream in SCALES[scale].streams]
        planned += [_planned(name, cell, scale, seed, tuned or {}) for cell in there]
    for row in only:
        check_name("row", row, list(dict.fromkeys(name for one in planned for name in one.names)))
    return [one for one in planned if not only or set(only) & set(one.names)]


def experiments(
    artefact: str, scale: str, seeds: int | None = None, tuned: Tuned | None = None, only: Sequence[str] = ()
) -> list[Planned]:
    """The runs that an artefact (or "all") needs: of `cells`, the first with each experiment.

    Seed by seed; of a seed, runs that the most tables and figures need come first.
    """
    artefacts = Counter(pair for one in ARTEFACTS.values() for pair in {(cell.row, cell.stream) for cell in one.cells})
    first: dict[str, Planned] = {}
    for planned in cells(artefact, scale, seeds, tuned, only):
        first.setdefault(planned.experiment.key, planned)
    return sorted(first.values(), key=lambda one: (one.experiment.seed, -artefacts[one.cell.row, one.cell.stream]))


def variant(experiment: Experiment) -> str:
    """The name of experiments that are tuned together: of one scenario and method, with any curvature and stream.

    Joint training, and a start of the head that is not the recipe's, are tuned apart.
    """
    parts = [experiment.dataset, experiment.scenario, experiment.method, *(["joint"] if experiment.joint else [])]
    start = experiment.settings.get("head_start")
    return "/".join([*parts, start] if start else parts)


def of_length(name: str, tasks: int) -> str:
    """The name of a `variant` on streams of so many tasks alone, where its settings diverged."""
    return f"{name}, {tasks} tasks"


def with_choices(experiment: Experiment, chosen: Settings) -> Experiment:
    """The experiment with chosen settings; the same one, by the same name, if they change nothing."""
    known = experiment.recipe.settings
    changed = {name: value for name, value in chosen.items() if known[name] != value}
    return replace(experiment, settings={**experiment.settings, **changed})


def _spectra(name: str, scale: str, seed: int) -> list[Planned]:
    found = []
    for base, loss in itertools.product(SCALES[scale].spectra, ("cross-entropy", "mse")):
        label = f"{base.network} on {base.dataset}"
        weights = None if base.network in (MLP, "shipped") else WEIGHTS[0]
        cell = Cell(label, loss, base.dataset, label, "eigenvalue")
        found.append(Planned(name, cell, replace(base, loss=loss, seed=seed), weights))
    return found


def _planned(name: str, cell: Cell, scale: str, seed: int, tuned: Tuned) -> Planned:
    size, row = SCALES[scale], ROWS[cell.row]
    base = size.streams[cell.stream]
    recipe = recipe_of(row.method, row.settings)
    known = recipe.settings
    settings = {**open_settings(row.method, cell.stream, scale), **row.settings}
    settings |= {key: value for key, value in size.small.items() if known.get(key, 0) > value}
    if "curvature" in known and base.scenario != "class-il":
        settings.pop("buffer", None)  # it would change nothing but the experiment's name
    knn = size.knn if row.probed and cell.stream in _PROBED_STREAMS else 0
    plain = replace(base, joint=row.joint, method=row.method, seed=seed, knn=knn, settings=settings)
    kind = variant(plain)
    chosen = tuned.get(of_length(kind, plain.tasks), tuned.get(kind))
    weights = size.weights.get(cell.stream, (None, None))[recipe.linear or known.get("tangent_features", 0) > 0]
    return Planned(name, cell, with_choices(plain, chosen or {}), weights, chosen is not None)
