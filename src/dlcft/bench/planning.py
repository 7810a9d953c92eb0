"""How long a list of experiments will take, and how much memory each needs, from a short trial of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from dlcft.backbones import load_backbone
from dlcft.bench.experiment import VALIDATION_SHARE, Experiment
from dlcft.bench.paper import Planned
from dlcft.bench.spectrum import MLP, Spectrum
from dlcft.learner.learner import Learner
from dlcft.methods.recipes import named_recipe
from dlcft.update.trial import Rates, apart, measure_learning

_TRIAL = (8, 8, 32)  # images of three tasks: to warm up, and two sizes that tell a fixed cost from one an image
_COPIES = 3  # of the images that a run holds: the data set, the part that is used, the tasks


class Size(NamedTuple):
    """Of a data set: training images, test images, classes, and bytes an image."""

    train: int
    test: int
    classes: int
    image_bytes: int


SIZES = {
    "digits": Size(1198, 599, 10, 32 * 32),
    "mnist": Size(60_000, 10_000, 10, 28 * 28),
    "fashion-mnist": Size(60_000, 10_000, 10, 28 * 28),
    "seq-cifar10": Size(50_000, 10_000, 10, 3 * 32 * 32),
    "seq-cifar100": Size(50_000, 10_000, 100, 3 * 32 * 32),
    "seq-mit67": Size(5360, 1340, 67, 3 * 256 * 256),
}


MLP_RATES = Rates(1e-4, 0.0, 0.0, 1e-5, 0.0, 5 * 10**8)  # a small one: no trial is worth its time
# Of the shipped network on one core of a CPU: for a first guess, before anything is measured.
_PLAIN = Rates(1 / 480, 0.0, 0.0, 1 / 1700, 0.0, 10**9)
_LINEAR = Rates(1 / 270, 0.0, 0.0, 1 / 570, 0.0, 10**9)
_CURVATURE = 2.0  # of a training step, an image


@dataclass(frozen=True)
class Estimate:
    """Of one planned run: `done` if its result is there already, and nothing is left to do."""

    planned: Planned
    seconds: float
    peak: int
    done: bool


@dataclass(frozen=True)
class Plan:
    """Of all runs."""

    estimates: tuple[Estimate, ...]

    @property
    def runs(self) -> int:
        """How many are left."""
        return sum(not one.done for one in self.estimates)

    @property
    def seconds(self) -> float:
        """Of all that are left, one after another."""
        return sum(one.seconds for one in self.estimates if not one.done)

    @property
    def peak(self) -> int:
        """The most memory that one of them needs."""
        return max((one.peak for one in self.estimates if not one.done), default=0)


def plan(
    planned: Sequence[Planned],
    out: Path,
    *,
    measure: Callable[[Experiment], Rates] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Plan:
    """What is to be done, without doing it.

    Args:
        planned: see `paper.experiments`.
        out: the folder of results.
        measure: gives the rates of an experiment; by default `measure_rates` in a process of its own, because the
            peak of a process's memory never falls.
        report: called with a line before each trial.
    """
    rates: dict[str, Rates] = {}
    estimates = []
    for one in planned:
        if (out / one.experiment.file).exists():
            estimates.append(Estimate(one, 0.0, 0, True))
            continue
        trial = _trial(one.experiment)
        kind = "" if trial is None else trial.key
        if kind not in rates:
            if trial is not None:
                report(f"{trial.method}, {trial.scenario}, {trial.backbone}")
            rates[kind] = MLP_RATES if trial is None else (measure or _measured_apart)(trial)
        seconds = estimate_seconds(one.experiment, rates[kind])
        estimates.append(Estimate(one, seconds, estimate_bytes(one.experiment, rates[kind]), False))
    return Plan(tuple(estimates))


def estimate_seconds(experiment: Experiment | Spectrum, rates: Rates) -> float:
    """How long it takes, counted up from the rates."""
    if isinstance(experiment, Spectrum):
        train, test = _images(Experiment(experiment.dataset, per_class=experiment.per_class))
        # a product with the Fisher matrix costs about two training steps
        product = 2 * min(experiment.samples, train) * rates.training
        point = experiment.iterations * product + (test + experiment.samples) * rates.testing
        return experiment.epochs * train * rates.training + experiment.points * point
    train, test = _images(experiment)
    recipe = named_recipe(experiment.method, dict(experiment.settings))
    epochs = 0 if recipe.method == "ridge" else recipe.epochs
    tasks = 1 if experiment.joint else experiment.first or experiment.tasks
    learning = train * (epochs * rates.training + rates.remembering) + tasks * rates.remembering_once
    tests = _tests(experiment, tasks)
    share = sum(tests) / experiment.tasks
    probing = min(experiment.knn, tasks) * (train + test)
    return learning + len(tests) * rates.settling + (share * test + probing) * rates.testing


def usual_seconds(experiment: Experiment | Spectrum) -> float:
    """A guess without a trial, true up to a factor that the machine and the network set."""
    if isinstance(experiment, Spectrum):
        return estimate_seconds(experiment, MLP_RATES if experiment.network == MLP else _PLAIN)
    recipe = named_recipe(experiment.method, dict(experiment.settings))
    rates = _LINEAR if recipe.linear else _PLAIN
    if recipe.method == "ridge":
        rates = replace(rates, remembering=rates.training if recipe.tangent_features else rates.testing)
    if recipe.method == "quadratic":
        rates = replace(rates, remembering=_CURVATURE * rates.training)
    return estimate_seconds(experiment, rates)


def estimate_bytes(experiment: Experiment | Spectrum, rates: Rates) -> int:
    """The most memory it needs: what the trial took, and the images."""
    one = experiment if isinstance(experiment, Experiment) else Experiment(experiment.dataset)
    return rates.peak + _COPIES * sum(_images(one)) * _size(one).image_bytes


def _tests(experiment: Experiment, tasks: int) -> list[int]:
    """After every evaluation: on how many of the tasks' shares of the test images."""
    if experiment.joint:
        return [experiment.tasks]
    numbers = [n for n in range(1, tasks + 1) if n == tasks or n % experiment.evaluate_every == 0]
    if experiment.scenario == "data-il":  # all test images, and where images are turned, once for each task
        return [experiment.tasks * (n if experiment.turn else 1) for n in numbers]
    return numbers


def _images(experiment: Experiment) -> tuple[int, int]:
    """How many are learned, and how many tested."""
    size = _size(experiment)
    classes = min(experiment.classes or size.classes, size.classes)
    train = round(size.train * classes / size.classes)
    if experiment.per_class is not None:
        train = min(train, classes * experiment.per_class)
    test = round(size.test * classes / size.classes)
    if experiment.validate:
        test = round(VALIDATION_SHARE * train)
        train -= test
    return round(train * (experiment.first or experiment.tasks) / experiment.tasks), test


def _size(experiment: Experiment) -> Size:
    if experiment.dataset not in SIZES:
        known = ", ".join(SIZES)
        raise ValueError(f"the size of {experiment.dataset!r} is not known beforehand; it is of {known}.")
    return SIZES[experiment.dataset]


def _trial(experiment: Experiment | Spectrum) -> Experiment | None:
    """An experiment that takes as long an image: all of a kind have the same. None where none is needed."""
    if isinstance(experiment, Spectrum):
        if experiment.network == MLP:
            return None
        return Experiment(method="none", backbone=experiment.network, width=experiment.width)
    free = ("epochs", "lr", "strength", "temperature", "schedule", "replay_logits", "replay_labels")
    settings = {name: value for name, value in experiment.settings.items() if name not in free}
    return Experiment(
        scenario=experiment.scenario,
        method=experiment.method,
        backbone=experiment.backbone,
        width=experiment.width,
        size=experiment.size,
        settings=settings,
    )


def measure_rates(experiment: Experiment) -> Rates:
    """Learn and test a few random images, by the experiment's method on its backbone (with random weights)."""
    weights = None if experiment.backbone == "shipped" else "random"
    backbone = load_backbone(experiment.backbone, weights=weights, width=experiment.width)
    size = (experiment.size, experiment.size) if experiment.size else backbone.preprocess.size or (224, 224)
    recipe = named_recipe(experiment.method, {**experiment.settings, "epochs": 1})
    preprocess = replace(backbone.preprocess, size=size)
    learner = Learner(backbone.module, recipe, scenario=experiment.scenario, new_labels="grow", preprocess=preprocess)
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for number, count in enumerate(_TRIAL):
        data = torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator), torch.arange(count) % 8
        tasks.append((data, f"task-{number}" if experiment.scenario == "task-il" else None))
    return measure_learning(learner, tasks)


def _measured_apart(experiment: Experiment) -> Rates:
    return apart(measure_rates, experiment)
