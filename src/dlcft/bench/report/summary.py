"""From results to rows: one row a method, over its seeds, beside the rows that it is compared with."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from dlcft.bench import metrics
from dlcft.bench.experiment import Experiment, Result, check_recipe, recipe_of
from dlcft.bench.paper import ROWS
from dlcft.bench.spectrum import SPECTRUM_PREFIX, Trace
from dlcft.bench.tune import FOLDER, PREFIX
from dlcft.methods.recipes import RECIPES, Recipe

_log = logging.getLogger(__name__)
Made = TypeVar("Made")
Points = list[tuple[int, "Spread"]]

SMALL_DISTANCE = 0.02  # from None to Joint, of which a share would say nothing
NONES = ("none", "none-linear")  # methods without a memory; learned jointly, the upper bound
# The fields that differ between the rows of one section; the others are conditions that its rows share.
_OWN = {"joint": False, "method": "none", "seed": 0, "settings": {}, "evaluate_every": 1, "knn": 0}
_LONG = 26  # characters of a name in a figure


@dataclass(frozen=True)
class Spread:
    """The mean of a figure over seeds, and the sample's standard deviation (n − 1); None for a single seed."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of one value a seed; None where a seed has none."""
        every = list(values)
        known = [value for value in every if value is not None and math.isfinite(value)]
        if not known or len(known) < len(every):
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def times(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(factor * self.mean, None if self.sd is None else factor * self.sd)


@dataclass(frozen=True, eq=False)
class Row:
    """A method with its settings under some conditions, over seeds. Accuracies are shares of 1.

    Attributes:
        results: one a seed, in the order of seeds.
        recovered: `(method − None)/(Joint − None)`, all three of the same model and loss; None where one is missing.
        recovered_mixed: the same with the nonlinear None, as the paper has it.
    """

    results: tuple[Result, ...]
    recovered: float | None = None
    recovered_mixed: float | None = None

    @property
    def experiment(self) -> Experiment:
        """The configuration, with the first of the seeds."""
        return self.results[0].experiment

    @cached_property
    def recipe(self) -> Recipe:
        content = self.results[0].recipe
        known = self.experiment.known  # a report imports nothing, and asks for model and training only
        return Recipe.from_dict(content if known else {**content, "method": {"kind": "finetune"}})

    @property
    def weights(self) -> str:
        """The hash of the backbone's weights."""
        return _weights(self.results[0])

    @cached_property
    def accuracy(self) -> Spread:
        return self._spread("accuracy")

    @cached_property
    def seconds(self) -> Spread:
        return self._spread("seconds_learning")

    @cached_property
    def state_bytes(self) -> Spread:
        return self._spread("state_bytes")

    @cached_property
    def bwt(self) -> Spread | None:
        return self._of_matrix(metrics.backward_transfer)

    @cached_property
    def forgetting(self) -> Spread | None:
        return self._of_matrix(metrics.forgetting)

    @property
    def unconverged(self) -> tuple[int, ...]:
        """The seeds whose training had not converged."""
        return tuple(result.experiment.seed for result in self.results if result.converged is False)

    @property
    def converged(self) -> bool | None:
        """Whether training had converged in every seed; None where nothing is trained."""
        return None if all(result.converged is None for result in self.results) else not self.unconverged

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that a run took; None where it was not noted."""
        return max(result.environment.get("peak_bytes") or 0 for result in self.results) or None

    def _spread(self, name: str) -> Spread:
        found = Spread.of(getattr(result, name) for result in self.results)
        if found is None:
            raise ValueError(f"{self.experiment.file} holds a figure that is not finite.")
        return found

    def _of_matrix(self, figure: Callable[[Tensor], float]) -> Spread | None:
        # a task that was not tested when it was new leaves the figure open
        matrices = [result.matrix for result in self.results]
        return Spread.of(None if m is None or m.tril().isnan().any() else figure(m) for m in matrices)


def read_results(folder: Path, *, foreign: list[str] | None = None) -> list[Result]:
    """All results in a folder and below it, without runs under way (hidden), trials of tuning and spectra.

    A file that is left out, because it is no result or repeats one, adds a sentence to `foreign`, or to the log.
    """
    paths = [path for path in _files(folder) if not path.name.startswith((PREFIX, SPECTRUM_PREFIX))]
    return _read_all(paths, _checked, lambda result: f"{result.experiment.key} {_weights(result)}", foreign)


def read_traces(folder: Path, *, foreign: list[str] | None = None) -> list[Trace]:
    """All curves of eigenvalues in a folder and below it; see `read_results`."""
    paths = [path for path in _files(folder) if path.name.startswith(SPECTRUM_PREFIX)]
    return _read_all(paths, Trace.read, lambda trace: trace.spectrum.key, foreign)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one that the results were written to.")
    found = [(path, path.relative_to(folder).parts) for path in sorted(folder.rglob("*.json")) if path.is_file()]
    return [p for p, parts in found if FOLDER not in parts[:-1] and not any(part.startswith(".") for part in parts)]


def _read_all(
    paths: Iterable[Path], read: Callable[[Path], Made], identity: Callable[[Made], str], foreign: list[str] | None
) -> list[Made]:
    """The contents of files, each once."""
    found: dict[str, tuple[Path, Made]] = {}
    tell = _log.warning if foreign is None else foreign.append
    for path in paths:
        try:
            made = read(path)
        except (ValueError, OSError) as error:
            tell(str(error) if str(path) in str(error) else f"{path} cannot be read: {error}")
            continue
        first, _ = found.setdefault(identity(made), (path, made))
        if first != path:
            tell(f"{path} repeats {first} and is left out.")
    return [made for _, made in found.values()]


def summarise(results: Iterable[Result]) -> list[Row]:
    """One row for each method, settings and conditions, over its seeds; by conditions, then in the order of `RECIPES`.

    Conditions are all other fields of an experiment, and the backbone's weights: nothing is averaged over them, and
    None and Joint are looked for under the same ones. Where several fit, those trained most alike are taken, and of
    these the best, which is the stricter yardstick.
    """
    groups: dict[str, dict[int, Result]] = {}
    for result in results:
        seeds = groups.setdefault(f"{replace(result.experiment, seed=0).key} {_weights(result)}", {})
        if result.experiment.seed in seeds:
            raise ValueError(f"the results hold {result.experiment.file} twice; a seed may count only once.")
        seeds[result.experiment.seed] = result
    rows = [Row(tuple(seeds[seed] for seed in sorted(seeds))) for seeds in groups.values()]
    rows.sort(key=lambda row: (*_conditions(row), method_order(row.experiment), replace(row.experiment, seed=0).key))
    return [_compared(row, section, rows) for section in sections(rows) for row in section]


def method_order(experiment: Experiment) -> tuple[bool, int, str]:
    """The order of methods: of `RECIPES`, then one's own; joint training last."""
    known = list(RECIPES)
    place = known.index(experiment.method) if experiment.method in known else len(known)
    return experiment.joint, place, experiment.method


def sections(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of `summarise` in groups that may be compared: those under the same conditions."""
    return [list(group) for _, group in itertools.groupby(rows, key=_conditions)]


def stream_of(experiment: Experiment) -> str:
    """A hash of the conditions of an experiment: of all fields that the rows of a section share."""
    return replace(experiment, **_OWN).key  # type: ignore[arg-type]


def heading(row: Row) -> str:
    """The data set, the scenario and the number of tasks of a row's section."""
    experiment = row.experiment
    return f"{experiment.dataset}, {experiment.scenario}, {experiment.tasks} task{'s' * (experiment.tasks != 1)}"


def conditions(row: Row) -> str:
    """The other conditions of its section: the backbone, fields that are not at their default, the weights."""
    named = {"dataset", "scenario", "tasks", "backbone", *_OWN}
    parts = [f"backbone {row.experiment.backbone}"]
    for field in fields(Experiment):
        value = getattr(row.experiment, field.name)
        parts += [f"{field.name}={value}"] * (field.name not in named and value != field.default)
    return ", ".join([*parts, f"weights {row.weights[:8]}"])


def common_settings(section: Sequence[Row]) -> dict[str, Any]:
    """The settings that at least two rows share, and that no row of the same methods has otherwise."""
    found = {}
    for name in sorted({name for row in section for name in row.experiment.settings}):
        methods = {row.experiment.method for row in section if name in row.experiment.settings}
        values = [row.experiment.settings.get(name) for row in section if row.experiment.method in methods]
        if len(values) > 1 and len(set(map(repr, values))) == 1:
            found[name] = values[0]
    return found


def own_settings(row: Row, section: Sequence[Row]) -> str:
    """A row's other settings, as text."""
    common = common_settings(section)
    return settings_text({name: v for name, v in row.experiment.settings.items() if name not in common})


def settings_text(settings: Mapping[str, Any]) -> str:
    """Names and values, by name."""
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def labels(section: Sequence[Row]) -> list[str]:
    """Label rows by the method, and by the settings that differ; by a number if that is too long or not enough."""
    names: dict[str, list[str]] = {}
    for title in dict.fromkeys(row.experiment.title for row in section):
        settings = [row.experiment.settings for row in section if row.experiment.title == title]
        found = []
        for own in settings:
            differ = {
                name: v for name, v in sorted(own.items()) if any(name not in o or o[name] != v for o in settings)
            }
            text = ", ".join(v if isinstance(v, str) else f"{name}={v}" for name, v in differ.items())
            found.append(f"{title} ({text})" if text else title)
        if len(found) > 1 and (len(set(found)) < len(found) or max(map(len, found)) > _LONG):
            found = [f"{title} [{place}]" for place in range(1, len(found) + 1)]
        names[title] = found
    return [names[row.experiment.title].pop(0) for row in section]


def curve(row: Row) -> Points:
    """Accuracy after so many tasks over seeds, where every seed was tested."""
    return _over_seeds([dict(result.curve) for result in row.results])


def probe(row: Row) -> Points:
    """The same of the features' nearest neighbours."""
    return _over_seeds([dict(result.knn) for result in row.results])


CURVES: dict[str, Callable[[Row], Points]] = {"curve": curve, "knn": probe}  # by `paper.Metric`


def _over_seeds(curves: Sequence[Mapping[int, float]]) -> Points:
    spreads = [(task, Spread.of(one.get(task) for one in curves)) for task in curves[0]]
    return [(task, spread) for task, spread in spreads if spread is not None]


def _checked(path: Path) -> Result:
    """Reject a file without figures, or whose recipe has changed since."""
    result = Result.read(path)
    whole = all(isinstance(entry, dict) and {"accuracy", "loss"} <= entry.keys() for entry in result.history or [{}])
    if not whole or not result.history[-1]["accuracy"]:
        raise ValueError(f"{path} is no result file of dlcft: its history is not whole.")
    check_recipe(path, result)
    return result


def _weights(result: Result) -> str:
    return str(result.environment.get("backbone"))


def _conditions(row: Row) -> tuple[Any, ...]:
    """In the order of sections: data set, scenario and tasks first."""
    experiment = row.experiment
    return experiment.dataset, experiment.scenario, experiment.tasks, stream_of(experiment), row.weights


def _compared(row: Row, section: Sequence[Row], rows: Sequence[Row]) -> Row:
    """The row with its shares of the distance from None to Joint.

    Closed form has no None, and its sequence is its joint: it has the mixed share only, to the nonlinear Joint. The
    nonlinear None may have other weights: the paper pre-trains another network for methods that are not linearised.
    """
    plain, closed, stream = recipe_of("none", {}), row.recipe.closed_form, stream_of(row.experiment)
    others = [other for other in rows if other not in section and stream_of(other.experiment) == stream]
    none, joint = (None if closed else _reference(row, section, row.recipe, joint) for joint in (False, True))
    mixed_none, mixed_joint = (
        _reference(row, section, plain, joint) or _reference(row, others, plain, joint) for joint in (False, True)
    )
    mixed = _recovered(row, mixed_none, mixed_joint if closed else joint)
    return replace(row, recovered=_recovered(row, none, joint), recovered_mixed=mixed)


def _recovered(row: Row, none: Row | None, joint: Row | None) -> float | None:
    """None as well where there is hardly a distance to recover, or the row is itself one of its ends."""
    if none is None or joint is None or row in (none, joint):
        return None
    distance = joint.accuracy.mean - none.accuracy.mean
    return None if distance < SMALL_DISTANCE else (row.accuracy.mean - none.accuracy.mean) / distance


def _reference(row: Row, section: Sequence[Row], model: Recipe, joint: bool) -> Row | None:
    """The None or the Joint of a model and its loss: the row itself, or the one that was trained most alike."""

    def fits(other: Row) -> bool:
        same = all(other.recipe.settings.get(name) == model.settings.get(name) for name in ("linear", "strict", "loss"))
        row = ROWS.get(other.results[0].row or "")
        usual = row is None or "epochs" not in row.settings  # Joint of other lengths has a table of its own
        return same and usual and other.experiment.method in NONES and other.experiment.joint == joint

    def alike(other: Row) -> tuple[bool, int, float]:
        own, its = row.recipe.settings, other.recipe.settings
        return other is row, sum(own.get(name) == value for name, value in its.items()), other.accuracy.mean

    return max(filter(fits, section), key=alike, default=None)
