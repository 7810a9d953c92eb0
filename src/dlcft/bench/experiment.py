"""One run of a method on a stream: a frozen configuration in, a result as JSON out, never computed twice.

The file's name is a hash of the configuration. A run that was killed continues inside its task.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.backbones import Backbone, load_backbone
from dlcft.bench.datasets import ImageSet, load
from dlcft.bench.environment import content_of, environment, forget_peak
from dlcft.bench.events import append_event, need_tensorboard, write_board
from dlcft.bench.metrics import Examiner
from dlcft.bench.streams import CLASS_ORDERS, Pair, Stream, split_classes, split_data, turned, validation_part
from dlcft.data.files import write_text
from dlcft.data.images import Preprocess
from dlcft.learner.build import fingerprint
from dlcft.learner.learner import Learner
from dlcft.learner.records import Learned
from dlcft.methods.recipes import RECIPES, Recipe, named_recipe
from dlcft.methods.settings import SCENARIOS, Scenario
from dlcft.network import workers
from dlcft.network.names import check_name, is_imported
from dlcft.store.store import Store

RESULT_FORMAT = 3
CONVERGED = 0.01  # training has converged when its last epochs lower the loss by less than this share of the first's
VALIDATION_IMAGES = 2000  # at most, to choose settings by: training images that `per_class` leaves out; or else
VALIDATION_SHARE = 0.2  # this share of those that are learned


@dataclass(frozen=True)
class Experiment:
    """All that determines a result."""

    dataset: str = "digits"  # a name that `datasets.load` knows, or a path
    scenario: Scenario = "data-il"
    tasks: int = 2
    joint: bool = False  # learn all tasks at once instead of one after another
    method: str = "dlcft-exact"  # a name in `RECIPES`, or `module:Name` of one's own
    seed: int = 0  # of the split, the order and the training
    backbone: str = "shipped"
    width: int | None = None  # of a ResNet-18; None for its usual one
    size: int | None = None  # images are resized to this many pixels; None for the data set's own size
    classes: int | None = None  # only the first so many; None for all
    per_class: int | None = None  # only so many training images of each class; None for all
    class_order: str = "random"  # of task- and class-IL: "random", by the seed; or "labels", in the order of labels
    turn: float = 0.0  # degrees that each task's images are turned further; every task then has its own test set
    validate: bool = False  # test on training images that are not learned instead, to choose settings by
    evaluate_every: int = 1  # test after every so many tasks, and after the last
    first: int | None = None  # learn only the first so many tasks; None for all
    knn: int = 0  # probe features by nearest neighbours after so many tasks, evenly spaced, the last among them
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the recipe to change

    def __post_init__(self) -> None:
        check_name("scenario", self.scenario, SCENARIOS)
        check_name("class order", self.class_order, CLASS_ORDERS)
        if self.known:
            recipe_of(self.method, self.settings)
        for name in ("tasks", "evaluate_every", "classes", "per_class", "size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if self.first is not None and not 1 <= self.first <= self.tasks:
            raise ValueError(f"first is {self.first}; it must lie between 1 and the number of tasks, {self.tasks}.")
        if self.knn < 0:
            raise ValueError(f"knn is {self.knn}; it must be 0 or more.")
        if not math.isfinite(self.turn):
            raise ValueError(f"turn is {self.turn}; it must be a finite number of degrees.")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "settings": dict(sorted(self.settings.items()))}

    @property
    def known(self) -> bool:
        """Whether its classes are built in or imported: reading a result imports nothing."""
        own = [name for name in (self.method, self.settings.get("curvature")) if isinstance(name, str) and ":" in name]
        return all(is_imported(name) for name in own)

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.method, self.settings)

    @property
    def rounds(self) -> int:
        """How often the learner learns: once a task, or once in all, after the task that a linearised network needs."""
        if self.joint:
            return 2 if self.recipe.linear and self.recipe.first_task(self.scenario) else 1
        return self.first or self.tasks

    @property
    def title(self) -> str:
        """The method, and whether it learns all tasks at once."""
        return f"{self.method} (joint)" if self.joint else self.method

    @property
    def key(self) -> str:
        return hashed({"format": RESULT_FORMAT, **self.to_dict()})

    @property
    def file(self) -> str:
        dataset = Path(self.dataset).name  # which may be a path
        method = ("joint-" if self.joint else "") + self.method.replace(":", ".")
        return f"{dataset}-{self.scenario}-{self.tasks}-{method}-{self.seed}-{self.key}.json"


_MADE: dict[tuple[str, str], tuple[Recipe | None, Recipe]] = {}


def recipe_of(method: str, settings: Mapping[str, Any]) -> Recipe:
    """`named_recipe`, each made once: a plan asks for the same few recipes thousands of times."""
    base, key = RECIPES.get(method), (method, repr(sorted(settings.items())))
    if key not in _MADE or _MADE[key][0] is not base:
        _MADE[key] = base, named_recipe(method, settings)
    return _MADE[key][1]


@dataclass(frozen=True)
class Result:
    """The outcome of an experiment.

    `history` has the learner's records, one each time it learned: loss curve, predicted increase, seconds, and
    `accuracy`, the accuracies on every task seen so far (or on the one test set that they share; None where it was not
    tested), `knn` where the features were probed, and `measured_increase` of the old tasks' loss, where a quadratic
    memory predicts it and their outputs stay the same; `seconds_solving` in closed form, where it was tested.
    """

    experiment: Experiment
    history: list[dict[str, Any]]
    seconds: float  # in all, evaluation included, since the last start
    seconds_learning: float  # of training and remembering; in closed form of all sums and the last solve
    state_bytes: int  # size of the saved state
    environment: dict[str, Any]  # versions, commit, hardware, the backbone's hash
    recipe: dict[str, Any]  # complete, settings applied
    data: str | None = None  # a hash of the file or folder that the data came from; None where that is fixed
    row: str | None = None  # the row of the paper's tables that it was run for, see `paper.ROWS`
    tuned: bool = False  # whether its settings were chosen by `tune`

    @property
    def accuracy(self) -> float:
        """In the end: on the common test set, or the mean over tasks."""
        return mean(self.history[-1]["accuracy"])

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
        tested = [(index, entry["accuracy"]) for index, entry in enumerate(self.history, 1)]
        return [(number, mean(values)) for number, values in tested if values is not None]

    @property
    def knn(self) -> list[tuple[int, float]]:
        """How many tasks were learned, and the accuracy of nearest neighbours then."""
        return [(index, entry["knn"]) for index, entry in enumerate(self.history, 1) if "knn" in entry]

    @property
    def converged(self) -> bool | None:
        """Whether the last epochs lowered the loss by less than 1 % of the first ones', all tasks together.

        Not of their own: cross-entropy falls to zero, and what is left of it is noise. None where nothing is trained.
        """
        curves = [entry["loss"] for entry in self.history if len(entry["loss"]) > 1]
        if not curves:
            return None
        fall = sum(curve[-2] - curve[-1] for curve in curves)
        return bool(fall < CONVERGED * sum(abs(curve[0]) for curve in curves))

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1))

    def to_dict(self) -> dict[str, Any]:
        return {"format": RESULT_FORMAT, **asdict(self), "experiment": self.experiment.to_dict()}

    @classmethod
    def read(cls, path: Path) -> Result:
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
    row: str | None = None,
    tuned: bool = False,
    report: Callable[[str], None] = print,
) -> Result:
    """The result of an experiment: read from the folder `out` if it is there, else computed and written.

    `data` is where the data set is, see `datasets.load`, and `weights` the backbone's file, see `load_backbone`; both
    are no part of the configuration. `tensorboard` is a folder for TensorBoard; each experiment has one of its own in
    it. `row` and `tuned` go to the `Result`. `report` is called with a line after each test. With several workers, see
    `network.workers`, all of them call this, and the first one writes.
    """
    path = out / experiment.file
    if workers.from_first(path.exists()):
        found = Result.read(path)
        check_weights(path, found.environment, experiment.backbone, weights, experiment.width)
        _check_same(path, "data", found.data, content_of(experiment.dataset, data))
        check_recipe(path, found)
        if row is not None and (found.row, found.tuned) != (row, tuned):
            found = replace(found, row=row, tuned=tuned)
            found.write(path)
        return found
    if tensorboard is not None:
        need_tensorboard()
    started, home = time.perf_counter(), out / f".{experiment.key}"
    forget_peak()
    backbone = load_backbone(experiment.backbone, weights=weights, width=experiment.width)
    images = load(experiment.dataset, data)
    preprocess = _preprocess(experiment, backbone, images)
    images = images.decoded(preprocess.size)
    learner = _learner(experiment, backbone.module, preprocess, images.augment, home)
    mirrored = "flip" in learner.recipe.training.augment.split("+")
    examiner = Examiner(learner, make_stream(experiment, images), mirrored=mirrored)
    for number in range(len(learner.history), experiment.rounds):
        entry = _learn(experiment, examiner, number)
        if entry["accuracy"] is not None or not learner.method.closed_form:  # saving would solve closed form
            learner.save(keep=1)
        if workers.place() > 0:
            continue
        append_event(out, {"experiment": experiment.file, "tasks": experiment.rounds, **entry})
        if tensorboard is not None:
            write_board(tensorboard / Path(experiment.file).stem, _history(learner))
        if entry["accuracy"] is not None:
            task = f"task {number + 1} of {experiment.rounds}"
            report(f"{experiment.title}, {experiment.scenario}, {task}: {mean(entry['accuracy']):.1%}")
    tensors, _ = learner.state()
    history = _history(learner)
    seconds = sum(entry["seconds_training"] + entry["seconds_remembering"] for entry in history)
    result = Result(
        experiment,
        history,
        time.perf_counter() - started,
        seconds + history[-1].get("seconds_solving", 0),
        sum(t.numel() * t.element_size() for t in tensors.values()),
        environment(backbone),
        learner.recipe.to_dict(),
        content_of(experiment.dataset, data),
        row,
        tuned,
    )
    with workers.together():
        if workers.place() == 0:
            result.write(path)
            shutil.rmtree(home, ignore_errors=True)
    return result


def _learn(experiment: Experiment, examiner: Examiner, number: int) -> dict[str, Any]:
    """Learn a task (or all of them), test if it is time to, and note the figures in the learner's record."""
    learner, stream, rounds = examiner.learner, examiner.stream, experiment.rounds
    tested = number == rounds - 1 or (not experiment.joint and (number + 1) % experiment.evaluate_every == 0)
    # where a quadratic memory predicts the old tasks' loss, and their outputs stay the same
    measured = tested and number > 0 and experiment.scenario != "class-il" and "curvature" in learner.recipe.settings
    before = examiner.old_loss(number) if measured else 0.0
    if not experiment.joint or number < rounds - 1:
        learner.learn(stream.tasks[number].train, head=stream.tasks[number].head)
    elif experiment.scenario == "task-il":
        learner.learn_jointly({str(task.head): task.train for task in stream.tasks})
    else:
        learner.learn(stream.joint().tasks[0].train)
    facts: dict[str, Any] = {"accuracy": None}
    if tested and learner.method.closed_form:
        started = time.perf_counter()
        learner.solve()
        facts["seconds_solving"] = time.perf_counter() - started
    if tested:
        facts["predicted_increase"] = learner.predicted_increase()
        facts["accuracy"] = examiner.accuracies(len(stream) if experiment.joint else number + 1)
    if measured:
        facts["measured_increase"] = examiner.old_loss(number) - before
    if number + 1 in {round(rounds * (index + 1) / experiment.knn) for index in range(experiment.knn)}:
        facts["knn"] = examiner.neighbours()
    learner.annotate(**facts)
    return _history(learner)[-1]


def _history(learner: Learner) -> list[dict[str, Any]]:
    return [record.to_dict() for record in learner.history if isinstance(record, Learned)]


def check_recipe(path: Path, result: Result) -> None:
    """Refuse a result whose recipe has changed since; that of a class which is not imported cannot be compared."""
    if not result.experiment.known:
        return
    then, now = Recipe.from_dict(result.recipe).settings, result.experiment.recipe.settings
    for name in (*then, *now):
        if name != "augment" and now.get(name) != then.get(name):  # augmentation comes from the data set
            changed = f"{name}={then.get(name)!r}, now {now.get(name)!r}"
            raise ValueError(f"{path} is a result with {changed}, and not taken; remove it, or run in another folder.")


def check_weights(
    path: Path, environment: Mapping[str, Any], backbone: str, weights: str | None, width: int | None
) -> None:
    """Refuse a result of other weights than are given."""
    if weights is not None:
        module = load_backbone(backbone, weights=weights, width=width).module
        _check_same(path, "weights", environment["backbone"], fingerprint(module))


def _check_same(path: Path, kind: str, then: str | None, now: str | None) -> None:
    if then is not None and now is not None and then != now:
        raise ValueError(f"{path} is a result with other {kind} than are given; choose another folder.")


def make_stream(experiment: Experiment, images: ImageSet) -> Stream:
    """The tasks of an experiment."""
    train = _limited(images.x_train, images.y_train, experiment.classes, experiment.per_class)
    test = _limited(images.x_test, images.y_test, experiment.classes, None)
    if experiment.validate:
        others = None if experiment.per_class is None else _others(images, experiment.classes, experiment.per_class)
        train, test = validation_part(train, VALIDATION_SHARE, seed=0) if others is None else (train, others)
    if experiment.scenario == "data-il":
        stream = split_data(train, test, experiment.tasks, experiment.seed)
    else:
        seed = None if experiment.class_order == "labels" else experiment.seed
        stream = split_classes(train, test, experiment.tasks, seed, experiment.scenario)
    stream = turned(stream, experiment.turn) if experiment.turn else stream
    return replace(stream, tasks=stream.tasks[: experiment.first])


def _limited(x: Any, y: Tensor, classes: int | None, per_class: int | None, skip: int = 0) -> Pair:
    """The first classes, and of each so many images after the first ones."""
    assert isinstance(x, Tensor)
    kept = torch.zeros(len(y), dtype=torch.bool)
    for label in range(int(y.max()) + 1)[:classes]:
        kept[(y == label).nonzero()[skip:, 0][:per_class]] = True
    return x[kept], y[kept]


def _others(images: ImageSet, classes: int | None, per_class: int) -> Pair | None:
    """Training images that are not learned; None where a class has hardly any."""
    classes = classes or len(images.classes)
    x, y = _limited(images.x_train, images.y_train, classes, VALIDATION_IMAGES // classes, skip=per_class)
    counts = y.bincount(minlength=classes)[:classes]
    return (x, y) if int(counts.min()) >= VALIDATION_SHARE * per_class else None


def _preprocess(experiment: Experiment, backbone: Backbone, images: ImageSet) -> Preprocess:
    """The backbone's; without a size, images stay as they are read: training takes windows of them."""
    size = None if images.preprocess.size is None else backbone.preprocess.size
    return replace(backbone.preprocess, size=(experiment.size, experiment.size) if experiment.size else size)


def _learner(experiment: Experiment, module: nn.Module, preprocess: Preprocess, augment: str, home: Path) -> Learner:
    """A new learner, or the one that a killed run has left."""
    home.parent.mkdir(parents=True, exist_ok=True)
    if workers.from_first(Store(home).current is not None):
        return Learner.load(home, module)
    recipe = named_recipe(experiment.method, {"augment": augment, **experiment.settings})
    learner = Learner(module, recipe, scenario=experiment.scenario, seed=experiment.seed, preprocess=preprocess)
    learner.save(home, keep=1)
    return learner


def mean(values: list[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def hashed(content: Mapping[str, Any]) -> str:
    """A short hash of a configuration."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
