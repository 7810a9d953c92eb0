"""One run of a method on a stream: a frozen configuration in, a result as JSON out, never computed twice.

The file's name is a hash of the configuration. A run that was killed continues inside its task.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlcft import __version__
from dlcft.backbones import Backbone, load_backbone
from dlcft.bench.datasets import ImageSet, load
from dlcft.bench.datasets.download import md5_of
from dlcft.bench.events import append_event, need_tensorboard, write_board
from dlcft.bench.probes import Examiner, old_loss
from dlcft.bench.streams import Pair, Stream, split_classes, split_data, turned, validation_part
from dlcft.data.files import written_whole
from dlcft.learner.build import fingerprint
from dlcft.learner.learner import Learner
from dlcft.methods.recipes import RECIPES, Recipe, Scenario, check_name, named_recipe
from dlcft.store.store import Store

RESULT_FORMAT = 1
CONVERGED = 0.01  # training has converged when its last epoch lowered the loss by less than this share
VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class Experiment:
    """All that determines a result.

    Attributes:
        dataset: a name that `datasets.load` knows.
        scenario: "data-il", "task-il" or "class-il".
        tasks: how many.
        method: a name in `RECIPES`. Those that begin with "joint" learn all tasks at once.
        seed: of the split, the order and the training.
        backbone: a name that `load_backbone` knows.
        width: of a ResNet-18, or None for its usual one.
        size: images are brought to this many pixels, or None for the data set's own size.
        classes: only the first so many, or None for all.
        per_class: only so many training images of each class, or None for all.
        turn: degrees by which the images of each task are turned further; every task then has a test set of its own.
        validate: test on a part of the training images instead, to choose settings by.
        evaluate_every: test after every so many tasks, and after the last.
        first: learn only the first so many tasks, or None for all.
        knn: probe the features by nearest neighbours after so many tasks, evenly spaced, the last among them.
        settings: fields of the recipe to change.
    """

    dataset: str = "digits"
    scenario: Scenario = "data-il"
    tasks: int = 2
    method: str = "dlcft-exact"
    seed: int = 0
    backbone: str = "shipped"
    width: int | None = None
    size: int | None = None
    classes: int | None = None
    per_class: int | None = None
    turn: float = 0.0
    validate: bool = False
    evaluate_every: int = 1
    first: int | None = None
    knn: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be run, before anything is."""
        check_name("scenario", self.scenario, ("data-il", "task-il", "class-il"))
        named_recipe(self.method, dict(self.settings))
        for name in ("tasks", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.first is not None and not 1 <= self.first <= self.tasks:
            raise ValueError(f"first is {self.first}; it must lie between 1 and the number of tasks, {self.tasks}.")
        if self.knn < 0:
            raise ValueError(f"knn is {self.knn}; it must be 0 or more.")
        for name in ("classes", "per_class", "size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not math.isfinite(self.turn):
            raise ValueError(f"turn is {self.turn}; it must be a finite number of degrees.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "settings": dict(sorted(self.settings.items()))}

    @property
    def joint(self) -> bool:
        """Whether all tasks are learned at once."""
        return self.method.startswith("joint")

    @property
    def key(self) -> str:
        """A hash of the whole configuration."""
        text = json.dumps({"format": RESULT_FORMAT, **self.to_dict()}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def file(self) -> str:
        """The name of its result."""
        dataset = Path(self.dataset).name  # which may be a path
        return f"{dataset}-{self.scenario}-{self.tasks}-{self.method}-{self.seed}-{self.key}.json"


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        experiment: the configuration.
        history: the learner's own, one entry a task: loss curve, predicted increase, seconds, and `accuracy`, the
            accuracies on every task seen so far (or on the one test set that they share; None where it was not tested),
            `knn` where the features were probed, and `measured_increase` of the old tasks' loss, where a quadratic
            memory predicts it and their outputs stay the same; `seconds_solving` in closed form, where it was tested.
        seconds: in all, evaluation included, since the last start.
        seconds_learning: of training and remembering; in closed form of all sums and the last solve.
        state_bytes: of what is saved.
        environment: versions, commit, hardware, the backbone's hash.
        recipe: all that the method was told, settings applied; None in older results.
        data: a hash of the file or folder that the data came from; None where that has a fixed content.
    """

    experiment: Experiment
    history: list[dict[str, Any]]
    seconds: float
    seconds_learning: float
    state_bytes: int
    environment: dict[str, Any]
    recipe: dict[str, Any] | None = None
    data: str | None = None

    @property
    def accuracy(self) -> float:
        """In the end: on the common test set, or the mean over tasks."""
        last: list[float] = self.history[-1]["accuracy"]
        return sum(last) / len(last)

    @property
    def matrix(self) -> Tensor | None:
        """R[t, j], see `metrics`, NaN where it was not tested; None for joint training, or where tasks share a test."""
        if self.experiment.joint or (self.experiment.scenario == "data-il" and not self.experiment.turn):
            return None
        tasks = len(self.history)
        matrix = torch.full((tasks, tasks), math.nan, dtype=torch.float64)
        for row, entry in zip(matrix, self.history, strict=True):
            if entry["accuracy"] is not None:
                row[: len(entry["accuracy"])] = torch.tensor(entry["accuracy"], dtype=torch.float64)
        return matrix

    @property
    def curve(self) -> list[tuple[int, float]]:
        """How many tasks were learned, and the mean accuracy then."""
        tested = [(index + 1, entry["accuracy"]) for index, entry in enumerate(self.history)]
        return [(number, sum(values) / len(values)) for number, values in tested if values is not None]

    @property
    def knn(self) -> list[tuple[int, float]]:
        """How many tasks were learned, and the accuracy of nearest neighbours then."""
        return [(index + 1, entry["knn"]) for index, entry in enumerate(self.history) if "knn" in entry]

    @property
    def converged(self) -> bool | None:
        """Whether the last epoch of every task lowered the loss by less than 1 %; None where nothing is trained."""
        curves = [entry["loss"] for entry in self.history if len(entry["loss"]) > 1]
        if not curves:
            return None
        return all(curve[-2] - curve[-1] < CONVERGED * abs(curve[-2]) for curve in curves)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"format": RESULT_FORMAT, **asdict(self), "experiment": self.experiment.to_dict()}

    @classmethod
    def read(cls, path: Path) -> Result:
        """From its file.

        Raises:
            ValueError: when it is no result.
        """
        try:
            content = json.loads(path.read_text())
            found = content.pop("format")
            if found != RESULT_FORMAT:
                raise ValueError(f"{path} has result format {found}; this version reads {RESULT_FORMAT}.")
            return cls(**{**content, "experiment": Experiment(**content["experiment"])})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no result file of dlcft.") from error


def run(
    experiment: Experiment,
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    tensorboard: Path | None = None,
    report: Callable[[str], None] = print,
) -> Result:
    """The result of an experiment: read if it is there, else computed and written.

    Args:
        experiment: what to do.
        out: the folder of results.
        data: where the data set is, see `datasets.load`. Not part of the configuration.
        weights: the backbone's file, see `load_backbone`. Its content is part of the result.
        tensorboard: a folder for TensorBoard; each experiment has one of its own in it.
        report: called with a line after each task.

    Raises:
        ValueError: when `out` has the result of the same configuration with other weights, data or recipe.
    """
    path = out / experiment.file
    if path.exists():
        return _known(path, experiment, data, weights)
    if tensorboard is not None:
        need_tensorboard()
    started = time.perf_counter()
    _forget_peak()
    backbone = load_backbone(experiment.backbone, weights=weights, width=experiment.width)
    images = load(experiment.dataset, data)
    images = images.decoded(_size(experiment, backbone, images))
    stream = make_stream(experiment, images)
    learner = _learner(experiment, backbone, images, out / f".{experiment.key}")
    rounds = 1 if experiment.joint else len(stream)
    examiner = Examiner(learner, stream)
    probed = {round(rounds * (index + 1) / experiment.knn) for index in range(experiment.knn)}
    for number in range(learner.tasks if not experiment.joint else min(learner.tasks, 1), rounds):
        tested = number == rounds - 1 or (number + 1) % experiment.evaluate_every == 0
        old = stream.tasks[:number] if tested and _predicts(experiment) else ()
        before = old_loss(learner, old) if old else 0.0
        _learn(learner, experiment, stream, number)
        entry = learner.history[-1]
        if tested and not learner.method.trains:
            entry["seconds_solving"] = _seconds_solving(learner)
        if tested:
            learner.predicted_increase()
        if old:
            entry["measured_increase"] = old_loss(learner, old) - before
        entry["accuracy"] = examiner.accuracies(len(stream) if experiment.joint else number + 1) if tested else None
        if number + 1 in probed:
            entry["knn"] = examiner.neighbours()
        if tested or learner.method.trains:  # closed form has to be solved for it
            learner.save(keep=1)
        append_event(out, {"experiment": experiment.file, "tasks": rounds, **entry})
        if tensorboard is not None:
            write_board(tensorboard / Path(experiment.file).stem, learner.history)
        if tested:
            mean = sum(entry["accuracy"]) / len(entry["accuracy"])
            report(f"{experiment.method}, {experiment.scenario}, task {number + 1} of {rounds}: {mean:.1%}")
    tensors, _ = learner._state()
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    seconds = sum(entry.get("seconds_training", 0) + entry.get("seconds_remembering", 0) for entry in learner.history)
    seconds += learner.history[-1].get("seconds_solving", 0)
    result = Result(
        experiment,
        learner.history,
        time.perf_counter() - started,
        seconds,
        size,
        environment(backbone),
        asdict(learner.recipe),
        content_of(experiment.dataset, data),
    )
    write_atomically(path, json.dumps(result.to_dict(), indent=1))
    shutil.rmtree(out / f".{experiment.key}", ignore_errors=True)
    return result


def _seconds_solving(learner: Learner) -> float:
    """How long closed form takes from its sums to answers."""
    started = time.perf_counter()
    _ = learner.model
    return time.perf_counter() - started


def _known(path: Path, experiment: Experiment, data: Path | None, weights: str | None) -> Result:
    """A result that is there; it must be of the same recipe, and of the weights and the data that are given."""
    result = Result.read(path)
    if weights is not None:
        backbone = load_backbone(experiment.backbone, weights=weights, width=experiment.width)
        check_same(path, "weights", result.environment["backbone"], fingerprint(backbone.module))
    check_same(path, "data", result.data, content_of(experiment.dataset, data))
    check_recipe(path, result)
    return result


def check_recipe(path: Path, result: Result) -> None:
    """Refuse a result whose recipe has changed since; what was not noted is not known.

    Raises:
        ValueError: when a switch is at another value now.
    """
    now = asdict(named_recipe(result.experiment.method, dict(result.experiment.settings)))
    then = {**asdict(Recipe()), **result.recipe} if result.recipe else {}  # a switch that came later was at its default
    for name, value in then.items():
        if name != "augment" and now.get(name) != value:  # augmentation comes from the data set
            changed = f"{name}={value!r}, now {now.get(name)!r}"
            raise ValueError(f"{path} is a result with {changed}, and not taken; remove it, or run in another folder.")


def check_same(path: Path, what: str, then: str | None, now: str | None) -> None:
    """Refuse a result that is there, but of something else; what was not noted is not known.

    Raises:
        ValueError: when both are known and differ.
    """
    if then is not None and now is not None and then != now:
        raise ValueError(f"{path} is a result with other {what} than are given; choose another folder.")


def content_of(dataset: str, data: Path | None) -> str | None:
    """A hash of the file that data comes from (of a folder its files' names and sizes); None where none is given."""
    path = data if data is not None else Path(dataset)
    named = data is None and not path.suffix and len(path.parts) == 1  # a data set, and no path
    if named or not path.exists():
        return None
    state = path.stat()
    return _hash(path.resolve(), state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=16)
def _hash(path: Path, time_ns: int, size: int) -> str:
    if path.is_file():
        return md5_of(path)
    files = sorted((str(one.relative_to(path)), one.stat().st_size) for one in path.rglob("*") if one.is_file())
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()


def _predicts(experiment: Experiment) -> bool:
    """Whether a quadratic memory predicts the old tasks' loss, and it can be measured: their outputs stay the same."""
    return experiment.scenario != "class-il" and RECIPES[experiment.method].method == "quadratic"


def make_stream(experiment: Experiment, images: ImageSet) -> Stream:
    """The tasks of an experiment."""
    train = _limited(_tensors(images.x_train), images.y_train, experiment.classes, experiment.per_class)
    test = _limited(_tensors(images.x_test), images.y_test, experiment.classes, None)
    if experiment.validate:
        train, test = validation_part(train, VALIDATION_SHARE, seed=0)
    if experiment.scenario == "data-il":
        stream = split_data(train, test, experiment.tasks, experiment.seed)
    else:
        stream = split_classes(train, test, experiment.tasks, experiment.seed, experiment.scenario)
    stream = turned(stream, experiment.turn) if experiment.turn else stream
    return replace(stream, tasks=stream.tasks[: experiment.first])


def _tensors(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def _limited(x: Tensor, y: Tensor, classes: int | None, per_class: int | None) -> Pair:
    kept = torch.ones(len(y), dtype=torch.bool) if classes is None else y < classes
    if per_class is not None:
        for label in y.unique():
            kept[(y == label).nonzero()[per_class:, 0]] = False
    return x[kept], y[kept]


def _learner(experiment: Experiment, backbone: Backbone, images: ImageSet, home: Path) -> Learner:
    """A new learner, or the one that a killed run has left."""
    home.parent.mkdir(parents=True, exist_ok=True)
    if Store(home).current is not None:
        return Learner.load(home, backbone.module)
    learner = Learner(
        backbone.module,
        named_recipe(experiment.method, {"augment": images.augment, **experiment.settings}),
        scenario=experiment.scenario,
        seed=experiment.seed,
        preprocess=replace(backbone.preprocess, size=_size(experiment, backbone, images)),
    )
    learner.save(home, keep=1)
    return learner


def _size(experiment: Experiment, backbone: Backbone, images: ImageSet) -> tuple[int, int] | None:
    """What images are brought to; None for those that are as they are read: training takes windows of them."""
    if experiment.size is not None:
        return experiment.size, experiment.size
    return None if images.preprocess.size is None else backbone.preprocess.size


def _learn(learner: Learner, experiment: Experiment, stream: Stream, number: int) -> None:
    if not experiment.joint:
        task = stream.tasks[number]
        learner.learn(task.train, head=task.head)
    elif experiment.scenario == "task-il":
        learner.learn_jointly({str(task.head): task.train for task in stream.tasks})
    else:
        learner.learn(stream.joint().tasks[0].train)


def environment(backbone: Backbone) -> dict[str, Any]:
    """What else a figure may depend on."""
    return {
        "dlcft": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "backbone": fingerprint(backbone.module),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _forget_peak() -> None:
    """Let the peak of this process's memory begin anew, where the system can (Linux): it is noted for each run."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _commit() -> str | None:
    """Of the source tree, if the package lies in one."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def write_atomically(path: Path, text: str) -> None:
    """All of a file or nothing of it."""
    with written_whole(path) as file:
        file.write(text)
