"""From results to rows: one row a method, its seeds put together, beside the rows that it is compared with."""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from dlcft.bench import metrics
from dlcft.bench.experiment import Experiment, Result, check_recipe
from dlcft.bench.spectrum import SPECTRUM_PREFIX, Trace
from dlcft.bench.tune import FOLDER, PREFIX
from dlcft.methods.recipes import RECIPES, Recipe, named_recipe

_log = logging.getLogger(__name__)
Made = TypeVar("Made")

SMALL_DISTANCE = 0.02  # from None to Joint, of which a share would say nothing
# What differs between the rows of one section; every other field of an experiment is a condition that they share.
_MEASURED = ("evaluate_every", "knn")  # what is looked at, which changes nothing in the end
_UNMEASURED = {"evaluate_every": 1, "knn": 0}
_OWN = ("method", "seed", "settings", *_MEASURED)
_LONG = 26  # characters of a name in a figure
_MODEL = ("linear", "strict", "loss")
_TRAINING = (
    *("optimizer", "lr", "momentum", "weight_decay", "schedule", "epochs", "batch_size", "clip", "augment"),
    *("scale", "head", "batchnorm"),
)


@dataclass(frozen=True)
class Spread:
    """A figure over seeds.

    Attributes:
        mean: of all.
        sd: the sample's standard deviation (n − 1); None for a single seed.
    """

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of one value a seed; None where a seed has none.

        Example:
            >>> Spread.of([1.0, 3.0])
            Spread(mean=2.0, sd=1.4142135623730951)
        """
        known = list(values)
        if not known or any(value is None or not math.isfinite(value) for value in known):
            return None
        finite = [value for value in known if value is not None]
        return cls(statistics.fmean(finite), statistics.stdev(finite) if len(finite) > 1 else None)


@dataclass(frozen=True)
class Row:
    """A method with its settings under some conditions, over seeds. Accuracies are shares of 1.

    Attributes:
        results: one a seed, in the order of seeds.
        accuracy: in the end.
        bwt: backward transfer; None without a whole accuracy matrix.
        forgetting: see `metrics`; None without a whole accuracy matrix.
        seconds: see `Result.seconds_learning`.
        state_bytes: of what is saved.
        unconverged: the seeds whose training had not converged.
        recovered: `(method − None)/(Joint − None)`, all three of the same model and loss; None where one is missing.
        recovered_mixed: the same with the nonlinear None, as the paper has it.
    """

    results: tuple[Result, ...]
    accuracy: Spread
    bwt: Spread | None
    forgetting: Spread | None
    seconds: Spread
    state_bytes: Spread
    unconverged: tuple[int, ...]
    recovered: float | None = None
    recovered_mixed: float | None = None

    @property
    def experiment(self) -> Experiment:
        """The configuration, with the first of the seeds."""
        return self.results[0].experiment

    @property
    def recipe(self) -> Recipe:
        """What the method does, settings applied."""
        return named_recipe(self.experiment.method, dict(self.experiment.settings))

    @property
    def converged(self) -> bool | None:
        """Whether training had converged in every seed; None where nothing is trained."""
        if all(result.converged is None for result in self.results):
            return None
        return not self.unconverged

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that a run took; None where it was not noted."""
        return max((result.environment.get("peak_bytes") or 0 for result in self.results), default=0) or None

    @property
    def is_reference(self) -> bool:
        """Whether it is a None or a Joint, that others are measured by."""
        return self.recipe.method == "finetune"


def read_results(folder: Path, *, foreign: list[str] | None = None) -> list[Result]:
    """All results in a folder and below it; runs under way (hidden), trials of tuning and spectra are passed over.

    Args:
        folder: where `experiment.run` wrote.
        foreign: gets a sentence for each .json file that is no result, or that repeats one; they are left out. Without
            this list the log names them.

    Raises:
        ValueError: when there is no such folder.
    """
    paths = [path for path in _files(folder) if not path.name.startswith((PREFIX, SPECTRUM_PREFIX))]
    return _read_all(paths, lambda path: _checked(Result.read(path), path), _identity, foreign)


def read_traces(folder: Path, *, foreign: list[str] | None = None) -> list[Trace]:
    """All curves of eigenvalues in a folder and below it.

    Args:
        folder: where `spectrum.trace` wrote.
        foreign: see `read_results`.

    Raises:
        ValueError: when there is no such folder.
    """
    paths = [path for path in _files(folder) if path.name.startswith(SPECTRUM_PREFIX)]
    return _read_all(paths, Trace.read, lambda trace: trace.spectrum.key, foreign)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one that the results were written to.")
    found = []
    for path in sorted(folder.rglob("*.json")):
        parts = path.relative_to(folder).parts
        if path.is_file() and FOLDER not in parts[:-1] and not any(part.startswith(".") for part in parts):
            found.append(path)
    return found


def _read_all(
    paths: Iterable[Path], read: Callable[[Path], Made], identity: Callable[[Made], str], foreign: list[str] | None
) -> list[Made]:
    """What the files hold, each thing once."""
    found: dict[str, tuple[Path, Made]] = {}
    sentences = []
    for path in paths:
        try:
            made = read(path)
        except (ValueError, OSError) as error:
            sentences.append(str(error) if str(path) in str(error) else f"{path} cannot be read: {error}")
            continue
        first, _ = found.setdefault(identity(made), (path, made))
        if first != path:
            sentences.append(f"{path} repeats {first} and is left out.")
    if foreign is not None:
        foreign += sentences
    else:
        for sentence in sentences:
            _log.warning(sentence)
    return [made for _, made in found.values()]


def summarise(results: Iterable[Result]) -> list[Row]:
    """One row for each method, settings and conditions, over its seeds; by conditions, then in the order of `RECIPES`.

    Conditions are all else that an experiment fixes, and the backbone's weights: nothing is averaged over them, and
    None and Joint are looked for under the same ones. Where several fit, those trained most alike are taken, and of
    these the best, which is the stricter yardstick.

    Raises:
        ValueError: when a seed is there twice.
    """
    groups: dict[str, dict[int, Result]] = {}
    for result in results:
        seeds = groups.setdefault(f"{_conditions(result)} {_own(result.experiment)}", {})
        if result.experiment.seed in seeds:
            raise ValueError(f"the results hold {result.experiment.file} twice; a seed may count only once.")
        seeds[result.experiment.seed] = result
    order = list(RECIPES)
    rows = [_row([seeds[seed] for seed in sorted(seeds)]) for seeds in groups.values()]
    rows.sort(key=lambda row: (_place(row), order.index(row.experiment.method), _own(row.experiment)))
    return [_compared(row, section, rows) for section in sections(rows) for row in section]


def sections(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of `summarise` that may be compared with each other: those under the same conditions."""
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: _conditions(row.results[0]))]


def heading(row: Row) -> str:
    """The data set, the scenario and the number of tasks of a row's section."""
    experiment = row.experiment
    return f"{experiment.dataset}, {experiment.scenario}, {experiment.tasks} task{'s' * (experiment.tasks != 1)}"


def conditions(row: Row) -> str:
    """What else the rows of its section share: the backbone, and what is not as it is by default."""
    named = {"dataset", "scenario", "tasks", "backbone", *_OWN}
    parts = [f"backbone {row.experiment.backbone}"]
    for field in fields(Experiment):
        value = getattr(row.experiment, field.name)
        if field.name not in named and (field.default is MISSING or value != field.default):
            parts.append(f"{field.name}={value}")
    weights = row.results[0].environment.get("backbone")
    return ", ".join([*parts, f"weights {str(weights)[:8]}"] if weights else parts)


def common_settings(section: Sequence[Row]) -> dict[str, Any]:
    """What at least two rows of a section have set to the same value, if no row of these methods has it otherwise."""
    found = {}
    for name in sorted({name for row in section for name in row.experiment.settings}):
        methods = {row.experiment.method for row in section if name in row.experiment.settings}
        rows = [row for row in section if row.experiment.method in methods]
        if len(rows) > 1 and len({repr(row.experiment.settings.get(name)) for row in rows}) == 1:
            found[name] = rows[0].experiment.settings[name]
    return found


def own_settings(row: Row, section: Sequence[Row]) -> str:
    """What else was changed in a row's recipe, as text."""
    common = common_settings(section)
    return settings_text({name: v for name, v in row.experiment.settings.items() if name not in common})


def settings_text(settings: Mapping[str, Any]) -> str:
    """Names and values, by name."""
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def labels(section: Sequence[Row]) -> list[str]:
    """A name for each row of a section: the method, and where that is not enough, what differs, or else a number."""
    names: dict[str, list[str]] = {}
    for method in dict.fromkeys(row.experiment.method for row in section):
        rivals = [row for row in section if row.experiment.method == method]
        changed = sorted({name for row in rivals for name in row.experiment.settings})
        usual = {name: getattr(RECIPES[method], name) for name in changed}
        found = _told_apart(method, [{name: getattr(row.recipe, name) for name in changed} for row in rivals], usual)
        if len(set(found)) < len(found):
            looked = [{name: getattr(row.experiment, name) for name in _MEASURED} for row in rivals]
            more = _told_apart("", looked, _UNMEASURED)
            found = [f"{name}{addition}" for name, addition in zip(found, more, strict=True)]
        if len(set(found)) < len(found) or max(map(len, found)) > _LONG:
            found = [f"{method} [{place}]" for place in range(1, len(found) + 1)]
        names[method] = found
    return [names[row.experiment.method].pop(0) for row in section]


def _told_apart(name: str, settings: Sequence[Mapping[str, Any]], usual: Mapping[str, Any]) -> list[str]:
    """The name for each of some settings, with what is not as usual and not the same in all."""
    differ = [key for key in usual if len({repr(values[key]) for values in settings}) > 1]
    told = [[(key, values[key]) for key in differ if values[key] != usual[key]] for values in settings]
    # a word says itself what it is of
    texts = [", ".join(v if isinstance(v, str) else f"{key}={v}" for key, v in some) for some in told]
    return [f"{name} ({text})" if text else name for text in texts]


def curve(row: Row) -> list[tuple[int, Spread]]:
    """Accuracy after so many tasks over seeds, where every seed was tested."""
    return _over_seeds([result.curve for result in row.results])


def probe(row: Row) -> list[tuple[int, Spread]]:
    """The same of the features' nearest neighbours."""
    return _over_seeds([result.knn for result in row.results])


def _over_seeds(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, Spread]]:
    every = [dict(one) for one in curves]
    spreads = [(task, Spread.of(values.get(task) for values in every)) for task in every[0]]
    return [(task, spread) for task, spread in spreads if spread is not None]


def _checked(result: Result, path: Path) -> Result:
    """Refuse what is written like a result and has no figures in it, or whose recipe is another one now."""
    whole = isinstance(result.history, list) and all(
        isinstance(entry, dict) and {"accuracy", "loss"} <= entry.keys() for entry in result.history
    )
    if not whole or not result.history or not result.history[-1]["accuracy"]:
        raise ValueError(f"{path} is no result file of dlcft: its history is not whole.")
    check_recipe(path, result)
    return result


def _weights(result: Result) -> str:
    return str(result.environment.get("backbone"))


def _identity(result: Result) -> str:
    return f"{result.experiment.key} {_weights(result)}"


def _own(experiment: Experiment) -> str:
    own = {name: value for name, value in experiment.to_dict().items() if name in _OWN and name != "seed"}
    return json.dumps(own, sort_keys=True)


def _stream(experiment: Experiment) -> str:
    return json.dumps({k: v for k, v in experiment.to_dict().items() if k not in _OWN}, sort_keys=True)


def _conditions(result: Result) -> str:
    return f"{_stream(result.experiment)} {_weights(result)}"


def _place(row: Row) -> tuple[Any, ...]:
    """Sections in the order of data set, scenario and tasks."""
    experiment = row.experiment
    return experiment.dataset, experiment.scenario, experiment.tasks, _conditions(row.results[0])


def _row(results: Sequence[Result]) -> Row:
    accuracy, seconds, size = (
        Spread.of(values)
        for values in (
            [result.accuracy for result in results],
            [result.seconds_learning for result in results],
            [float(result.state_bytes) for result in results],
        )
    )
    if accuracy is None or seconds is None or size is None:
        raise ValueError(f"{results[0].experiment.file} holds a figure that is not finite.")
    matrices = [result.matrix for result in results]
    # a task that was not tested when it was new leaves both figures open
    whole = [None if matrix is None or matrix.tril().isnan().any() else matrix for matrix in matrices]
    return Row(
        results=tuple(results),
        accuracy=accuracy,
        bwt=Spread.of(None if matrix is None else metrics.backward_transfer(matrix) for matrix in whole),
        forgetting=Spread.of(None if matrix is None else metrics.forgetting(matrix) for matrix in whole),
        seconds=seconds,
        state_bytes=size,
        unconverged=tuple(result.experiment.seed for result in results if result.converged is False),
    )


def _compared(row: Row, section: Sequence[Row], rows: Sequence[Row]) -> Row:
    nonlinear = RECIPES["none"]
    closed = row.recipe.method == "ridge"  # its sequence is its joint, and it has no None: only the mixed figure
    none, joint = (None if closed else _reference(row, section, row.recipe, joint=flag) for flag in (False, True))
    # the paper pre-trains a network of its own, with another activation, for what is not linearised
    stream = _stream(row.experiment)
    others = [other for other in rows if other not in section and _stream(other.experiment) == stream]
    mixed_none, mixed_joint = (
        _reference(row, section, nonlinear, joint=flag) or _reference(row, others, nonlinear, joint=flag)
        for flag in (False, True)
    )
    mixed_joint = mixed_joint if closed else joint
    return replace(
        row, recovered=_recovered(row, none, joint), recovered_mixed=_recovered(row, mixed_none, mixed_joint)
    )


def _recovered(row: Row, none: Row | None, joint: Row | None) -> float | None:
    """None as well where there is hardly a distance to recover, or the row is itself one of its ends."""
    if none is None or joint is None or row is none or row is joint:
        return None
    if joint.accuracy.mean - none.accuracy.mean < SMALL_DISTANCE:
        return None
    return metrics.recovered(row.accuracy.mean, none.accuracy.mean, joint.accuracy.mean)


def _reference(row: Row, section: Sequence[Row], model: Recipe, *, joint: bool) -> Row | None:
    """The None or the Joint of a model and its loss."""
    if row.is_reference and row.experiment.joint == joint and _same(row.recipe, model, _MODEL) == len(_MODEL):
        return row
    candidates = [
        other
        for other in section
        if other.is_reference and other.experiment.joint == joint and _same(other.recipe, model, _MODEL) == len(_MODEL)
    ]
    alike = [(_same(other.recipe, row.recipe, _TRAINING), other.accuracy.mean) for other in candidates]
    return candidates[alike.index(max(alike))] if candidates else None


def _same(one: Recipe, other: Recipe, names: Iterable[str]) -> int:
    """How many of these fields are equal."""
    return sum(getattr(one, name) == getattr(other, name) for name in names)
