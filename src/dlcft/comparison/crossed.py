"""Cross-validation of closed-form methods: one pass of the network for each kind of features, whatever the folds.

The features of all samples are kept; for each fold the sums of the others are gathered from them, which is what a
learner gathers, and every method that uses these features is solved from the same sums. Random features are made of the
network's own, so that they need no pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.closed_form.sums import EIGEN_LIMIT, RidgeSums
from dlcft.data.images import Preprocess
from dlcft.data.samples import Batches, Samples
from dlcft.learner.build import Builder
from dlcft.learner.heads import HEAD
from dlcft.methods.base import joined_states
from dlcft.methods.recipes import Recipe
from dlcft.methods.ridge import Ridge
from dlcft.methods.settings import Features
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input, filled
from dlcft.store.files import stored_bytes
from dlcft.update.forecast import fresh_peak, peak_since

Tell = Callable[[float], None]
_FACTORS = 8  # of a matrix, about, while a ridge is chosen
_PASSES = {"tangent_features": 4.0, "depth_features": 1.3}  # of the plain network, about, that features take


@dataclass(frozen=True, eq=False)
class Crossed:
    """What cross-validation has shown of one method.

    Attributes:
        right: for each sample whether the answer was right.
        reading: seconds a sample for its features and sums.
        solving: seconds to solve, whatever the number of samples.
        peak: bytes of memory at most, see `fresh_peak`.
        bytes: of a version on disk.
        features: how many.
    """

    right: Tensor
    reading: float
    solving: float
    peak: int
    bytes: int
    features: int


@dataclass(frozen=True, eq=False)
class Data:
    """Samples with label indices, their folds (−1 for those that are always learned), and how a network reads them."""

    samples: Samples
    y: Tensor
    classes: int
    folds: Tensor
    backbone: nn.Module
    preprocess: Preprocess | None
    seed: int
    device: torch.device

    @property
    def fold_count(self) -> int:
        """How many folds there are."""
        return int(self.folds.max()) + 1

    def builder(self, recipe: Recipe) -> Builder:
        """Makes a recipe's features of the network."""
        options: dict[str, Any] = {"preprocess": self.preprocess, "seed": self.seed, "device": self.device}
        return Builder(self.backbone, recipe, train=None, **options)


def is_crossed(recipe: Recipe) -> bool:
    """Whether a recipe is solved from sums over features that no sample changes."""
    fixed = recipe.start is None or recipe.start.start != "first-task"
    return isinstance(recipe.method, Ridge) and recipe.method.weigh_by == "samples" and fixed


def from_plain(recipe: Recipe) -> bool:
    """Whether a recipe's features are made of the network's own."""
    settings = recipe.settings
    return not (settings["depth_features"] or settings["tangent_features"]) and settings["augment"] == "none"


def groups(recipes: Mapping[str, Recipe]) -> list[list[str]]:
    """The names of recipes that have the same features; those that need no pass of their own come together."""
    found: dict[Any, list[str]] = {}
    for name, recipe in recipes.items():
        found.setdefault((recipe.model, recipe.training), []).append(name)
    return sorted(found.values(), key=lambda names: not from_plain(recipes[names[0]]))


def guessed(recipe: Recipe, count: int, data: Data, width: int, plain: float, speed: float) -> tuple[float, float]:
    """The seconds that the features of a recipe may take, and the folds of `count` recipes that have these features.

    Args:
        recipe: one of them.
        count: how many.
        data: the samples.
        width: the number of the network's own features.
        plain: the seconds of the plain network for a sample.
        speed: of the processor, in operations a second.
    """
    settings, samples = recipe.settings, len(data.y)
    passes = max([1.0, *(times for name, times in _PASSES.items() if settings[name])])
    more = settings["depth_features"] + settings["tangent_features"]
    length = (width + more if more or not settings["random_features"] else 0) + settings["random_features"]
    learned = samples * (data.fold_count - 1) / data.fold_count
    choice = _FACTORS * length / 3 if min(length, learned) > EIGEN_LIMIT else 5 * min(length, learned)
    flops = length**2 * (learned + choice + count * length / 3)
    return passes * plain * samples, data.fold_count * flops / speed


class CrossValidation:
    """Tests closed-form methods on folds.

    Args:
        data: see `Data`.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self._plain: tuple[Tensor, float, int] | None = None  # the network's features, seconds a sample, peak

    def test(self, recipes: Mapping[str, Recipe], seen: Tell, tested: Tell) -> dict[str, Crossed]:
        """What is shown of recipes that have the same features.

        Args:
            recipes: by name.
            seen: told the share of samples that the network has seen.
            tested: told the share of folds that were tested.

        Raises:
            ValueError: when the network has no such features, or the data cannot be read.
        """
        data, first = self.data, next(iter(recipes.values()))
        model, features, reading, peak = self._features(first, seen)
        model.set_heads({HEAD: data.classes})
        methods = {name: recipe.make_method("class-il") for name, recipe in recipes.items()}
        right = {name: torch.zeros(len(data.y), dtype=torch.bool) for name in recipes}
        solving = dict.fromkeys(recipes, 0.0)
        summing, learned = 0.0, 0
        fresh_peak()
        for fold in range(data.fold_count):
            held = data.folds == fold
            began = time.perf_counter()
            sums = _summed(model, features[~held], data.y[~held], data.classes, first.training.batch_size)
            summing, learned = summing + time.perf_counter() - began, learned + int((~held).sum())
            began = time.perf_counter()
            choosing = 0.0
            if any(map(_chooses, recipes.values())):
                choosing = (sums.usual_ridge, time.perf_counter() - began)[1]
            for name, method in methods.items():
                began = time.perf_counter()
                assert isinstance(method, Ridge)
                method.take(sums, HEAD)
                method.solve(model)
                solving[name] += time.perf_counter() - began + (choosing if _chooses(recipes[name]) else 0.0)
                right[name][held] = _answers(model, features[held]) == data.y[held]
                method.fits.clear()
            tested((fold + 1) / data.fold_count)
        peak = max(peak, peak_since())
        each = reading + summing / learned
        return {
            name: Crossed(
                right[name],
                each,
                solving[name] / data.fold_count,
                peak,
                stored_bytes(joined_states(model=model, method=method)[0]),
                features.shape[1],
            )
            for name, method in methods.items()
        }

    def _features(self, recipe: Recipe, tell: Tell) -> tuple[Classifier, Tensor, float, int]:
        """The classifier of a recipe, the features of all samples, seconds a sample, and the peak of memory."""
        data, builder, size = self.data, self.data.builder(recipe), recipe.training.batch_size
        if not from_plain(recipe) or builder.dtype != torch.float32:
            fresh_peak()
            model = builder.build(data.samples)
            found, seconds = _pass(model, _inputs(data, size, builder.dtype), len(data.y), tell)
            return model, found, seconds, peak_since()
        if self._plain is None:
            fresh_peak()
            own = replace(recipe, model=Features())
            model = data.builder(own).build(data.samples)
            self._plain = *_pass(model, _inputs(data, size, builder.dtype), len(data.y), tell), peak_since()
        z, before, peak = self._plain
        # the same random features, on a network that only hands on
        builder = replace(data, backbone=nn.Identity(), preprocess=None).builder(recipe)
        model = builder.build_on(z[:1].to(data.device))
        if not recipe.settings["random_features"]:
            return model, z, before, peak
        parts = ((part.to(data.device), len(part)) for part in z.split(size))
        found, seconds = _pass(model, parts, len(z), tell)
        return model, found, before + seconds, peak


def _chooses(recipe: Recipe) -> bool:
    """Whether a recipe takes the ridge that others choose too."""
    method = recipe.method
    assert isinstance(method, Ridge)
    alone = method.solution == "ncm" or (method.solution == "ridge" and method.equal_classes)
    return method.ridge is None and not alone


def _inputs(data: Data, size: int, dtype: torch.dtype) -> Any:
    batches = Batches(data.samples, data.y, size, data.device, dtype=dtype)
    return ((x, len(y)) for x, y in batches)


@torch.no_grad()
def _pass(model: Classifier, parts: Any, total: int, tell: Tell) -> tuple[Tensor, float]:
    """The features of all samples, and seconds a sample."""
    model.eval()
    began, done = time.perf_counter(), 0
    found: list[Tensor] = []
    x: Input
    for x, count in parts:
        found.append(model.features(filled(x, count))[:count].cpu())
        done += count
        tell(done / total)
    return torch.cat(found), (time.perf_counter() - began) / total


def _summed(model: Classifier, features: Tensor, y: Tensor, classes: int, size: int) -> RidgeSums:
    """The sums of some samples, batch by batch as a learner adds them."""
    device = next(model.parameters()).device
    empty = RidgeSums.empty(features.shape[1], device="cpu" if device.type == "mps" else device)
    return empty.extend(zip(features.split(size), y.split(size), strict=True)).grow(classes)


@torch.no_grad()
def _answers(model: Classifier, features: Tensor) -> Tensor:
    head = model.head(HEAD)
    answers: Tensor = head(features.to(head.weight)).argmax(1).cpu()
    return answers
