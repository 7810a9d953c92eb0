"""The paper's tables and figures by name: the experiment behind each cell, and the paper's own number beside it.

Every choice behind them is in `choices.CHOICES`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dlcft.bench.choices import CHOICES, SCALES, WEIGHTS, Settings, scale_settings
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
    scales: tuple[str, ...] = ()  # the only scales; empty for all
    probed: bool = False  # it is in the figure of nearest neighbours: probed in the tables' runs, to run nothing twice

    def on(self, stream: str, scale: str | None = None) -> bool:
        """Whether it is on a stream, at a scale."""
        return (not self.streams or stream in self.streams) and (not self.scales or scale in (None, *self.scales))


def _tuned(method: str) -> Row:
    """A baseline whose λ is not the authors' 1."""
    strength = CHOICES["strength"].value[method]
    return Row(method, {"strength": strength}, ours=True, streams=("data",), scales=("small",))


def _longer(method: str, epochs: int) -> Row:
    """Joint training for another number of epochs, in a table of its own."""
    return Row(method, {"epochs": epochs}, joint=True, streams=("data",), scales=("small",))


_PAPERS = "dlcft-paper"
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
    "DLCFT (K-FAC)": Row(_PAPERS, {"curvature": "kfac"}),
    "DLCFT (TK-FAC)": Row(_PAPERS, probed=True),
    "Joint": Row("none", joint=True),
    "None, linear": Row("none-linear", ours=True, probed=True),
    "Joint, linear": Row("none-linear", joint=True, ours=True),
    "DLCFT (exact TK)": Row(_PAPERS, {"curvature": "exact-tk"}, ours=True),
    "dlcft": Row("dlcft", ours=True, probed=True),
    "DLCFT (TK-FAC), ridge heads": Row(_PAPERS, {"head_start": "ridge"}, ours=True, streams=("task",)),
    "DLCFT without buffer": Row(_PAPERS, {"buffer": 0}, ours=True, streams=("class",)),
    "dlcft-replay": Row("dlcft-replay", ours=True, streams=("class",)),
    "LwF, λ tuned": _tuned("lwf"),
    "MAS, λ tuned": _tuned("mas"),
    "OSLA, λ tuned": _tuned("osla"),
    "ridge": Row("ridge", ours=True, probed=True),
    "RanPAC": Row("ranpac", ours=True),
    "dlcft-exact": Row("dlcft-exact", ours=True),
    "Joint, 5 epochs": _longer("none", 5),
    "Joint, 40 epochs": _longer("none", 40),
    "Joint, linear, 5 epochs": _longer("none-linear", 5),
    "Joint, linear, 40 epochs": _longer("none-linear", 40),
}
_PROBED_STREAM = "data"
_PROBED = [name for name, row in ROWS.items() if row.probed]
# a buffer counts in class-IL only: elsewhere these are one row
_WITHOUT_BUFFER = {"K-FAC, nonlinear + SCE": "OSLA"}
_TITLES = {"seq-cifar100": "Seq-CIFAR-100", "seq-cifar10": "Seq-CIFAR-10", "seq-mit67": "Seq-MIT-67"}


@dataclass(frozen=True)
class Cell:
    """One number: a row of `ROWS` on a stream, and the paper's own in percent; None where it has none.

    In the name of a column, a stream in braces stands for its data set and tasks, see `titled`.
    """

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
    scales: tuple[str, ...] = ()  # the only scales; empty for all


Columns = Mapping[str, tuple[str, Metric]]


def _cells(columns: Columns, numbers: Mapping[str, Sequence[float | Literal["-"] | None]]) -> list[Cell]:
    """Row by row; None is a cell without a number, "-" no cell."""
    return [
        Cell(row, column, stream, row if stream == "class" else _WITHOUT_BUFFER.get(row, row), metric, number)
        for row, values in numbers.items()
        for (column, (stream, metric)), number in zip(columns.items(), values, strict=True)
        if number != "-"
    ]


def _ours(columns: Columns) -> list[Cell]:
    rows = {name: row for name, row in ROWS.items() if row.ours}
    return _cells(columns, {n: [None if row.on(at) else "-" for at, _ in columns.values()] for n, row in rows.items()})


def _table(title: str, columns: Columns, numbers: Mapping[str, Any]) -> Artefact:
    return Artefact("table", title, tuple(_cells(columns, numbers) + _ours(columns)))


def _figure(title: str, metric: Metric, rows: Iterable[str], *streams: str) -> Artefact:
    columns: Columns = {f"{{{stream}}}": (stream, metric) for stream in streams}
    return Artefact("figure", title, tuple(_cells(columns, {row: [None] * len(streams) for row in rows})))


def titled(cell: Cell, scale: str) -> Cell:
    """The cell, its column named by the data set and the number of tasks that the stream has at a scale."""
    titles = {}
    for name, paper in SCALES["paper"].streams.items():
        stream = SCALES[scale].streams.get(name, paper)
        titles[name] = f"{_TITLES.get(stream.dataset, stream.dataset)}, {stream.tasks} tasks"
    return replace(cell, column=cell.column.format_map(titles))


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
            "{data}": ("data", "accuracy"),
            "{long}": ("long", "accuracy"),
            "{mit}": ("mit", "accuracy"),
        },
        _DATA_IL,
    ),
    "task-class-il": _table(
        "Task- and class-incremental learning: ACC",
        {"Task-IL, {task}": ("task", "acc"), "Class-IL, {class}": ("class", "acc")},
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
        "Ablations: final accuracy",
        {
            "Data-IL, {data}": ("data", "accuracy"),
            "Data-IL, {long}": ("long", "accuracy"),
            "Class-IL, {class}": ("class", "acc"),
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
        "Curvature methods, data-IL: final accuracy",
        (
            Cell("EWC", "Nonlinear+SCE", "data", "EWC", "accuracy", 78.88),
            Cell("EWC", "Linear+MSE", "data", "DLCFT (diagonal)", "accuracy", 82.17),
            Cell("K-FAC", "Nonlinear+SCE", "data", "OSLA", "accuracy", 79.23),
            Cell("K-FAC", "Linear+MSE", "data", "DLCFT (K-FAC)", "accuracy", 81.95),
            Cell("TK-FAC", "Nonlinear+SCE", "data", "TK-FAC, nonlinear + SCE", "accuracy"),
            Cell("TK-FAC", "Linear+MSE", "data", "DLCFT (TK-FAC)", "accuracy", 82.70),
            *_ours({"Linear+MSE": ("data", "accuracy")}),
        ),
    ),
    "bwt": _table(
        "Task-incremental learning: ACC and backward transfer",
        {"ACC, {task}": ("task", "acc"), "BWT": ("task", "bwt")},
        {
            "None": (None, None),
            "LwF": (92.16, 0.04),
            "EWC": (77.44, -21.63),
            "OSLA": (81.03, -18.21),
            "DLCFT (TK-FAC)": (95.79, -0.58),
        },
    ),
    "joint": Artefact(
        "table",
        "Joint training, by epochs: final accuracy",
        tuple(
            Cell(f"{epochs} epochs", f"{model}, {{data}}", "data", row, "accuracy")
            for epochs in (5, CHOICES["joint"].value["small"], 40)
            for model, joint in (("Plain network", "Joint"), ("Linearised", "Joint, linear"))
            for row in [joint if epochs == CHOICES["joint"].value["small"] else f"{joint}, {epochs} epochs"]
        ),
        scales=("small",),
    ),
    "vanishing-curvature": Artefact("figure", "Largest eigenvalue of the Fisher matrix during training"),
    "data-il-curves": _figure(
        "Data-IL: accuracy after each task",
        "curve",
        [*_DATA_IL, *(name for name, row in ROWS.items() if row.ours and row.on("data"))],
        "data",
        "long",
    ),
    "knn": _figure("Data-IL: k-NN accuracy of the features", "knn", _PROBED, _PROBED_STREAM),
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

    `tuned` has settings by `variant` or by `of_length`, in place of the scale's; `only` has rows to keep, by their
    name or their method's.
    """
    check_name("artefact", artefact, (*ARTEFACTS, "all"))
    check_name("scale", scale, SCALES)
    count = SCALES[scale].seeds if seeds is None else seeds
    if count < 1:
        raise ValueError(f"seeds is {count}; it must be at least 1.")
    only_at = () if artefact == "all" else ARTEFACTS[artefact].scales
    if only_at and scale not in only_at:
        raise ValueError(f"{artefact!r} is not at scale {scale!r}; it is at {', '.join(map(repr, only_at))}.")
    planned = []
    for name, seed in itertools.product(ARTEFACTS if artefact == "all" else [artefact], range(count)):
        planned += _spectra(name, scale, seed) if name == "vanishing-curvature" else []
        planned += [_planned(name, cell, scale, seed, tuned or {}) for cell in cells_at(name, scale)]
    for row in only:
        check_name("row", row, list(dict.fromkeys(name for one in planned for name in one.names)))
    return [one for one in planned if not only or set(only) & set(one.names)]


def cells_at(artefact: str, scale: str) -> list[Cell]:
    """The cells of an artefact that a scale has."""
    one, streams = ARTEFACTS[artefact], SCALES[scale].streams
    if one.scales and scale not in one.scales:
        return []
    return [cell for cell in one.cells if cell.stream in streams and ROWS[cell.row].on(cell.stream, scale)]


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

    Joint training is tuned apart.
    """
    parts = [experiment.dataset, experiment.scenario, experiment.method]
    return "/".join([*parts, "joint"] if experiment.joint else parts)


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
        weights = None if base.network in (MLP, "shipped") else WEIGHTS
        cell = Cell(label, loss, base.dataset, label, "eigenvalue")
        found.append(Planned(name, cell, replace(base, loss=loss, seed=seed), weights))
    return found


def _planned(name: str, cell: Cell, scale: str, seed: int, tuned: Tuned) -> Planned:
    size, row = SCALES[scale], ROWS[cell.row]
    base = size.streams[cell.stream]
    recipe = recipe_of(row.method, row.settings)
    known = recipe.settings
    settings = {**scale_settings(row.method, cell.stream, scale, row.joint), **row.settings}
    settings |= {key: value for key, value in size.small.items() if (known | settings).get(key, 0) > value}
    if "curvature" in known and base.scenario != "class-il":
        settings.pop("buffer", None)  # it would change nothing but the experiment's name
    knn = size.knn if row.probed and cell.stream == _PROBED_STREAM else 0
    plain = replace(base, joint=row.joint, method=row.method, seed=seed, knn=knn, settings=settings)
    kind = variant(plain)
    chosen = tuned.get(of_length(kind, plain.tasks), tuned.get(kind))
    planned = with_choices(plain, chosen or {})
    return Planned(name, titled(cell, scale), planned, size.weights.get(cell.stream), chosen is not None)
