"""The paper's tables and figures by name: what is run for each cell, and the paper's own number beside it.

References:
    Deep Linear Continual Fine-Tuning (DLCFT); its settings, and what it leaves open, stand in `OPEN_CHOICES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dlcft.bench.choices import OPEN_CHOICES, SCALES, WEIGHTS, Settings, open_settings
from dlcft.bench.experiment import Experiment, Result, run
from dlcft.bench.spectrum import MLP, Spectrum, Trace, trace
from dlcft.methods.recipes import check_name, named_recipe

__all__ = ["ARTEFACTS", "OPEN_CHOICES", "ROWS", "SCALES", "Artefact", "Cell", "Planned", "cells", "execute"]
__all__ += ["experiments", "variant"]

Metric = Literal["accuracy", "acc", "bwt", "curve", "knn", "eigenvalue"]


@dataclass(frozen=True)
class Row:
    """A method with the settings that make it this row. A buffer counts where the paper's methods have one."""

    method: str
    settings: Settings = field(default_factory=dict)

    def alike(self, other: Row) -> bool:
        """Whether the two differ in their buffer only, which data-IL does not use."""
        mine, theirs = ({**row.settings, "buffer": 0} for row in (self, other))
        return self.method == other.method and mine == theirs


_PAPERS = "dlcft-paper"
ROWS: dict[str, Row] = {
    "None": Row("none"),
    "LwF": Row("lwf"),
    "EWC": Row("ewc"),
    "MAS": Row("mas"),
    "OSLA": Row("osla"),
    "ER": Row("er"),
    "DER": Row("der"),
    "DER++": Row("derpp"),
    "K-FAC, nonlinear + SCE": Row("osla", {"buffer": 500}),
    "TK-FAC, nonlinear + SCE": Row("osla", {"curvature": "tkfac", "buffer": 500}),
    "DLCFT (diagonal)": Row(_PAPERS, {"curvature": "diagonal"}),
    "DLCFT (K-FAC)": Row(_PAPERS, {"curvature": "kfac"}),
    "DLCFT (TK-FAC)": Row(_PAPERS),
    "Joint": Row("joint"),
    # beside the paper's
    "DLCFT without buffer": Row(_PAPERS, {"buffer": 0}),
    "DLCFT (exact TK)": Row(_PAPERS, {"curvature": "exact-tk"}),
    "dlcft": Row("dlcft"),
    "dlcft-replay": Row("dlcft-replay"),
    # the ends of the distance that the paper's method can recover: its head starts at zero
    "None, linear": Row("none-linear", {"head": "zero"}),
    "Joint, linear": Row("joint-linear", {"head": "zero"}),
    "ridge": Row("ridge"),
    "RanPAC": Row("ranpac"),
    "dlcft-exact": Row("dlcft-exact"),
}
_OURS = (
    *("DLCFT (exact TK)", "None, linear", "Joint, linear"),
    *("dlcft", "ridge", "RanPAC", "dlcft-exact"),
    *("DLCFT without buffer", "dlcft-replay"),
)
# where a row belongs, if not everywhere: the table of task-IL has no distance to recover
_ONLY_ON = {
    **dict.fromkeys(("None, linear", "Joint, linear"), ("data-10", "data-100", "class-10", "mit-4")),
    **dict.fromkeys(("DLCFT without buffer", "dlcft-replay"), ("class-10",)),
}
# the rows of the k-NN figure; probed in the tables' runs already, so that nothing is run twice
_PROBED = ("None", "LwF", "EWC", "MAS", "OSLA", "DLCFT (K-FAC)", "DLCFT (TK-FAC)", "dlcft", "ridge")
_PROBED_STREAMS = ("data-10", "data-100")


@dataclass(frozen=True)
class Cell:
    """One figure: a row (of `ROWS`) on a stream, and the paper's number in percent; None where it has none."""

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
        Cell(row, column, stream, row, metric, number)
        for row, values in numbers.items()
        for (column, (stream, metric)), number in zip(columns.items(), values, strict=True)
        if number != "-"
    ]


def _ours(columns: Columns) -> list[Cell]:
    rows: dict[str, list[Literal["-"] | None]] = {
        row: [None if _is_on(stream, row) else "-" for stream, _ in columns.values()] for row in _OURS
    }
    return _cells(columns, rows)


def _is_on(stream: str, row: str) -> bool:
    return row not in _ONLY_ON or stream in _ONLY_ON[row]


def _table(title: str, columns: Columns, numbers: Mapping[str, Any]) -> Artefact:
    return Artefact("table", title, tuple(_cells(columns, numbers) + _ours(columns)))


def _figure(title: str, metric: Metric, rows: Iterable[str]) -> Artefact:
    columns: Columns = {"10 tasks": ("data-10", metric), "100 tasks": ("data-100", metric)}
    return Artefact("figure", title, tuple(_cells(columns, {row: [None, None] for row in rows})))


def _curvatures() -> Artefact:
    pairs: list[tuple[str, str, str, float | None, float | None]] = [
        ("EWC", "EWC", "DLCFT (diagonal)", 78.88, 82.17),
        ("K-FAC", "OSLA", "DLCFT (K-FAC)", 79.23, 81.95),
        ("TK-FAC", "TK-FAC, nonlinear + SCE", "DLCFT (TK-FAC)", None, 82.70),
    ]
    cells = []
    for label, nonlinear, linear, first, second in pairs:
        cells.append(Cell(label, "Nonlinear+SCE", "data-10", nonlinear, "accuracy", first))
        cells.append(Cell(label, "Linear+MSE", "data-10", linear, "accuracy", second))
    column: Columns = {"Linear+MSE": ("data-10", "accuracy")}
    cells += _ours(column)
    return Artefact("table", "Curvature methods, data-IL, Seq-CIFAR-100, 10 tasks: final accuracy", tuple(cells))


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
    "curvatures": _curvatures(),
    "bwt": _table(
        "Task-incremental learning, Seq-CIFAR-100, 10 tasks: ACC and backward transfer",
        {"ACC": ("task-10", "acc"), "BWT": ("task-10", "bwt")},
        {
            "LwF": (92.16, 0.04),
            "EWC": (77.44, -21.63),
            "OSLA": (81.03, -18.21),
            "DLCFT (TK-FAC)": (95.79, -0.58),
        },
    ),
    "vanishing-curvature": Artefact("figure", "Largest eigenvalue of the Fisher matrix during training"),
    "data-il-curves": _figure(
        "Data-IL, Seq-CIFAR-100: accuracy after each task",
        "curve",
        (*_DATA_IL, *(row for row in _OURS if _is_on("data-10", row))),
    ),
    "knn": _figure("Data-IL, Seq-CIFAR-100: k-NN accuracy of the features", "knn", _PROBED),
}


@dataclass(frozen=True)
class Planned:
    """A cell at a scale with a seed.

    Attributes:
        artefact: its name.
        label: the row.
        column: the column.
        experiment: what is run; a `Spectrum` in the figure of eigenvalues.
        metric: what of the result is shown.
        paper: the paper's number in percent.
        weights: the backbone's file.
    """

    artefact: str
    label: str
    column: str
    experiment: Experiment | Spectrum
    metric: Metric
    paper: float | None = None
    weights: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What its row may be called: by its label, or by its method."""
        return (self.label,) if isinstance(self.experiment, Spectrum) else (self.label, self.experiment.method)

    def __str__(self) -> str:
        return f"{self.artefact}, {self.label}, {self.column}, seed {self.experiment.seed}"


Tuned = Mapping[str, Settings]


def cells(
    artefact: str, scale: str, seeds: int | None = None, tuned: Tuned | None = None, only: Sequence[str] = ()
) -> list[Planned]:
    """Every cell of an artefact (or of "all") that the scale has, once a seed; several may have the same experiment.

    Args:
        artefact: a name in `ARTEFACTS`, or "all".
        scale: a name in `SCALES`.
        seeds: how many; by default the scale's.
        tuned: settings by `variant` or by `of_length`, in place of the open choices.
        only: rows to keep, by their name or their method's; all if there is none.

    Raises:
        ValueError: when a name is unknown or there is no seed.
    """
    check_name("artefact", artefact, (*ARTEFACTS, "all"))
    check_name("scale", scale, SCALES)
    count = SCALES[scale].seeds if seeds is None else seeds
    if count < 1:
        raise ValueError(f"seeds is {count}; it must be at least 1.")
    planned = []
    for name in ARTEFACTS if artefact == "all" else [artefact]:
        for seed in range(count):
            planned += _spectra(name, scale, seed) if name == "vanishing-curvature" else []
            planned += [
                _planned(name, cell, scale, seed, tuned or {})
                for cell in ARTEFACTS[name].cells
                if cell.stream in SCALES[scale].streams
            ]
    for row in only:
        check_name("row", row, list(dict.fromkeys(name for one in planned for name in one.names)))
    return [one for one in planned if not only or set(only) & set(one.names)]


def experiments(
    artefact: str, scale: str, seeds: int | None = None, tuned: Tuned | None = None, only: Sequence[str] = ()
) -> list[Planned]:
    """What must be run for an artefact (or for "all"): of `cells`, the first with each experiment.

    Seed by seed; of a seed, what the most tables and figures need comes first.
    """
    needed = {(one.artefact, one.experiment.key) for one in cells("all", scale, seeds, tuned)}
    artefacts = Counter(key for _, key in needed)
    first: dict[str, Planned] = {}
    for planned in cells(artefact, scale, seeds, tuned, only):
        first.setdefault(planned.experiment.key, planned)
    return sorted(first.values(), key=lambda one: (one.experiment.seed, -artefacts[one.experiment.key]))


def execute(
    planned: Planned,
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    tensorboard: Path | None = None,
    report: Callable[[str], None] = print,
) -> Result | Trace:
    """Run what is planned, if it is not in `out` already; see `experiment.run`."""
    weights = weights or planned.weights
    if isinstance(planned.experiment, Spectrum):
        return trace(planned.experiment, out, data=data, weights=weights, report=report)
    return run(planned.experiment, out, data=data, weights=weights, tensorboard=tensorboard, report=report)


def variant(experiment: Experiment) -> str:
    """What is tuned together: a method with one start of its head in a scenario, whatever its curvature and stream."""
    head = f"/{experiment.settings['head']}" if "head" in experiment.settings else ""
    return f"{experiment.dataset}/{experiment.scenario}/{experiment.method}{head}"


def of_length(name: str, tasks: int) -> str:
    """The name of what a `variant` takes on streams of so many tasks alone, because what was chosen diverged there."""
    return f"{name}, {tasks} tasks"


def with_choices(experiment: Experiment, chosen: Settings) -> Experiment:
    """The experiment with chosen settings; the same one, by the same name, where they are as they were."""
    recipe = named_recipe(experiment.method, dict(experiment.settings))
    changed = {name: value for name, value in chosen.items() if getattr(recipe, name) != value}
    return replace(experiment, settings={**experiment.settings, **changed})


def _spectra(name: str, scale: str, seed: int) -> list[Planned]:
    found = []
    for base in SCALES[scale].spectra:
        for loss in ("cross-entropy", "mse"):
            one = replace(base, loss=loss, seed=seed)
            weights = None if base.network in (MLP, "shipped") else WEIGHTS[0]
            label = f"{base.network} on {base.dataset}"
            found.append(Planned(name, label, loss, one, "eigenvalue", weights=weights))
    return found


def _planned(name: str, cell: Cell, scale: str, seed: int, tuned: Tuned) -> Planned:
    size, row = SCALES[scale], ROWS[cell.row]
    base = size.streams[cell.stream]
    recipe = named_recipe(row.method, dict(row.settings))
    settings = {**open_settings(row.method, cell.stream, scale), **row.settings}
    settings |= {name: value for name, value in size.small.items() if getattr(recipe, name) > value}
    if recipe.method != "replay" and base.scenario != "class-il":
        settings.pop("buffer", None)  # it would change nothing but the experiment's name
    probed = cell.stream in _PROBED_STREAMS and any(row.alike(ROWS[other]) for other in _PROBED)
    plain = replace(base, method=row.method, seed=seed, knn=size.knn if probed else 0, settings=settings)
    kind = variant(plain)
    experiment = with_choices(plain, tuned.get(of_length(kind, plain.tasks), tuned.get(kind, {})))
    weights = size.weights.get(cell.stream, (None, None))[recipe.linear or recipe.tangent_features > 0]
    return Planned(name, cell.label, cell.column, experiment, cell.metric, cell.paper, weights)
