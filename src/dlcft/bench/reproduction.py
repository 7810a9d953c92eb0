"""All runs of an artefact: tuned if asked, several at once, none done twice; or their cost, from a short trial."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlcft.backbones import load_backbone
from dlcft.bench.experiment import VALIDATION_IMAGES, VALIDATION_SHARE, Experiment, Result, run
from dlcft.bench.many import each, silent
from dlcft.bench.paper import Planned, of_length, variant
from dlcft.bench.spectrum import MLP, Spectrum, Trace, make_network, trace
from dlcft.bench.tune import base_of, choose_less, grid_of, noted, tune
from dlcft.learner.learner import Learner
from dlcft.methods.settings import Training
from dlcft.pages import in_seconds
from dlcft.store.files import CheckpointError
from dlcft.update.forecast import Rates, apart, measure_learning

Failure = FloatingPointError | CheckpointError
Kinds = Mapping[str, Planned]  # experiments to tune, see `tune.tunings`


@dataclass(frozen=True)
class Reproduction:
    """The runs of a command; the options are those of `experiment.run` and `many.each`."""

    out: Path
    data: Path | None = None
    weights: str | None = None  # the backbone's file, in place of the scale's
    tensorboard: Path | None = None
    jobs: int = 1
    report: Callable[[str], None] = print

    def choose(self, kinds: Kinds) -> dict[str, dict[str, Any]]:
        """The settings of each kind of experiment: as noted before, else tuned."""
        chosen, taken = noted(kinds, self.out), []
        names = [name for name in kinds if name not in chosen]
        for place, (settings, time_taken) in each(self._tuned, [kinds[name] for name in names], self.jobs):
            taken.append(time_taken)
            chosen[names[place]] = settings
            self.report(f"tuning, {self._left(taken, len(names))}: {names[place]}: {_text(settings)}")
        return chosen

    def execute(self, planned: Sequence[Planned]) -> tuple[dict[str, Result | Trace], list[tuple[Planned, Failure]]]:
        """Run everything that is not in `out` yet, in this order.

        Gives the results by the experiment's key, and why a run has none: its training diverged, or another process is
        at it.
        """
        there = [one for one in planned if (self.out / one.experiment.file).exists()]
        missing = [one for one in planned if one not in there]
        results = {one.experiment.key: self._run(one) for one in there}
        taken = [result.seconds for result in results.values()]
        self.report(self._left(taken, len(planned)))
        failures: list[tuple[Planned, Failure]] = []
        for place, made in each(self._attempted, missing, self.jobs):
            if isinstance(made, Failure):
                failures.append((missing[place], made))
                said = str(made)
            else:
                results[missing[place].experiment.key] = made
                taken.append(made.seconds)
                accuracy = f"{made.accuracy:.2%}, " if isinstance(made, Result) else ""
                said = f"{accuracy}in {in_seconds(made.seconds)}"
            self.report(f"{self._left(taken, len(planned) - len(failures))}: {missing[place]}: {said}")
        return results, failures

    def lower(self, kinds: Kinds, failures: Sequence[tuple[Planned, Failure]]) -> dict[str, dict[str, Any]]:
        """Smaller settings for each kind of experiment that has diverged with the tuned ones."""
        diverged = {
            (variant(planned.experiment), planned.experiment.tasks)
            for planned, why in failures
            if isinstance(why, FloatingPointError) and isinstance(planned.experiment, Experiment)
        }
        found = {}
        for name, tasks in sorted(diverged):
            settings = choose_less(base_of(kinds[name]), tasks, self.out) if name in kinds else None
            if settings is not None:
                found[of_length(name, tasks)] = settings
                self.report(f"{of_length(name, tasks)} diverged; now {_text(settings)}")
        return found

    def _left(self, taken: Sequence[float], count: int) -> str:
        """How many are done, and the time left: as many seconds a run as the mean of those that are done."""
        left, told = count - len(taken), f"{len(taken)} of {count}"
        if not left or not taken:
            return told if left else f"{told}, all done"
        return f"{told}, about {in_seconds(left * statistics.fmean(taken) / min(self.jobs, left))} left"

    def _tuned(self, planned: Planned) -> tuple[dict[str, Any], float]:
        """The settings, and the seconds that it took."""
        started, base, weights = time.perf_counter(), base_of(planned), self.weights or planned.weights
        settings = tune(base, grid_of(base), self.out, data=self.data, weights=weights)
        return settings, time.perf_counter() - started

    def _run(self, planned: Planned) -> Result | Trace:
        options: dict[str, Any] = {"data": self.data, "weights": self.weights or planned.weights, "report": silent}
        if isinstance(planned.experiment, Spectrum):
            return trace(planned.experiment, self.out, **options)
        options |= {"tensorboard": self.tensorboard, "row": planned.cell.row, "tuned": planned.tuned}
        return run(planned.experiment, self.out, **options)

    def _attempted(self, planned: Planned) -> Result | Trace | Failure:
        """The result, or why there is none: one run of many must not end the others."""
        try:
            return self._run(planned)
        except (FloatingPointError, CheckpointError) as error:
            return error


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


class Cost(NamedTuple):
    """Seconds of a run, and the most bytes that it needs beside its images."""

    seconds: float
    peak: int


SIZES = {  # training images, test images, classes
    "digits": (1198, 599, 10),
    "mnist": (60_000, 10_000, 10),
    "seq-cifar10": (50_000, 10_000, 10),
    "seq-cifar100": (50_000, 10_000, 100),
    "seq-mit67": (5360, 1340, 67),
}
_TRIAL = (8, 8, 32)  # images of three tasks: to warm up, and two sizes that tell a fixed cost from one an image
# settings that cost no time
_FREE = (
    *("epochs", "steps", "first_times", "lr", "strength", "replay_logits", "replay_labels"),
    *("start_epochs", "start_steps", "start_lr"),
)


def costs(
    planned: Sequence[Planned],
    out: Path,
    *,
    measure: Callable[[Experiment | Spectrum], Rates] = lambda trial: apart(measure_rates, trial),
    report: Callable[[str], None] = silent,
) -> list[Cost | None]:
    """The cost of each run, None where its result is there, from one trial of each kind.

    A trial runs in a process of its own, because the peak of a process's memory never falls; `report` gets a line
    before each.
    """
    rates: dict[str, Rates] = {}
    found: list[Cost | None] = []
    for one in planned:
        if (out / one.experiment.file).exists():
            found.append(None)
            continue
        trial = _trial(one.experiment)
        if trial.key not in rates:
            report(str(one))
            rates[trial.key] = measure(trial)
        found.append(Cost(seconds(one.experiment, rates[trial.key]), rates[trial.key].peak))
    return found


def seconds(experiment: Experiment | Spectrum, rates: Rates) -> float:
    """The time of a run, counted up from the rates."""
    if isinstance(experiment, Spectrum):
        train, test = _images(Experiment(experiment.dataset, per_class=experiment.per_class))
        # a product with the Fisher matrix costs about two training steps
        product = 2 * min(experiment.samples, train) * rates.training
        point = experiment.iterations * product + (test + experiment.samples) * rates.testing
        return experiment.epochs * train * rates.training + experiment.points * point
    (train, test), rounds = _images(experiment), experiment.rounds
    seen = _images_trained(experiment, train)
    learning = seen * rates.training + train * rates.remembering + rounds * rates.remembering_once
    # of every evaluation, the share of the test images: all in data-IL, else those of the tasks so far
    every = rounds if experiment.joint else experiment.evaluate_every
    tested = [n for n in range(1, rounds + 1) if n == rounds or n % every == 0]
    whole = experiment.joint or experiment.scenario == "data-il"
    shares = [1.0 if whole else n / experiment.tasks for n in tested]
    probing = min(experiment.knn, rounds) * (train + test)
    return learning + len(tested) * rates.solving + (sum(shares) * test + probing) * rates.testing


def _images_trained(experiment: Experiment, train: int) -> float:
    """How many images training sees, each as often as it sees it."""
    recipe, tasks = experiment.recipe, 1 if experiment.joint else experiment.rounds
    training, start = recipe.training, recipe.first_task(experiment.scenario)
    if not isinstance(training, Training):
        return 0

    def seen(training: Training, images: float) -> float:
        return training.epochs * images if training.steps is None else training.steps * training.batch_size

    if start is None:
        return (training.first_times + tasks - 1) * seen(training, train / tasks)
    assert isinstance(start.training, Training)
    first = seen(start.training, train / experiment.tasks)
    return first + (seen(training, train) if experiment.joint else (tasks - 1) * seen(training, train / tasks))


def _images(experiment: Experiment) -> tuple[int, int]:
    """How many are learned, and how many tested."""
    if experiment.dataset not in SIZES:
        raise ValueError(f"the size of {experiment.dataset!r} is not known beforehand; it is of {', '.join(SIZES)}.")
    train, test, every = SIZES[experiment.dataset]
    classes = min(experiment.classes or every, every)
    train, test = (round(count * classes / every) for count in (train, test))
    others = 0
    if experiment.per_class is not None:
        train, others = min(train, classes * experiment.per_class), max(0, train - classes * experiment.per_class)
    if experiment.validate and others >= VALIDATION_SHARE * train:
        test = min(others, VALIDATION_IMAGES)
    elif experiment.validate:
        test = round(VALIDATION_SHARE * train)
        train -= test
    return round(train * (experiment.first or experiment.tasks) / experiment.tasks), test


def _trial(experiment: Experiment | Spectrum) -> Experiment | Spectrum:
    """An experiment that costs as much an image: all of a kind have the same."""
    if isinstance(experiment, Spectrum):
        return Spectrum(network=experiment.network, width=experiment.width)
    same: dict[str, Any] = {
        name: getattr(experiment, name) for name in ("scenario", "method", "backbone", "width", "size")
    }
    return Experiment(**same, settings={name: v for name, v in experiment.settings.items() if name not in _FREE})


def measure_rates(trial: Experiment | Spectrum) -> Rates:
    """Learn and test a few random images, by the trial's method on its backbone (with random weights)."""
    if isinstance(trial, Spectrum):
        one, name = Experiment(method="none", size=28 if trial.network == MLP else None), trial.network
        backbone = make_network(trial, torch.zeros(1, 3, 28, 28), None if name == "shipped" else "random")
    else:
        one, name = trial, trial.backbone
        backbone = load_backbone(name, weights=None if name == "shipped" else "random", width=trial.width)
    size = (one.size, one.size) if one.size else backbone.preprocess.size or (224, 224)
    preprocess = replace(backbone.preprocess, size=size)
    learner = Learner(backbone.module, one.recipe, scenario=one.scenario, new_labels="grow", preprocess=preprocess)
    tasks, generator = [], torch.Generator().manual_seed(0)
    for number, count in enumerate(_TRIAL):
        data = torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator), torch.arange(count) % 8
        tasks.append((data, f"task-{number}" if one.scenario == "task-il" else None))
    return measure_learning(learner, tasks)
