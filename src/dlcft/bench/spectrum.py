"""Vanishing curvature: the largest eigenvalue of the Fisher matrix while a network is trained by one loss or another.

Like an experiment: a frozen configuration in, JSON out, never computed twice. A run that was killed begins anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.backbones import Backbone, load_backbone
from dlcft.bench.datasets import load
from dlcft.bench.environment import environment
from dlcft.bench.events import append_event
from dlcft.bench.experiment import Experiment, check_weights, hashed, make_stream
from dlcft.bench.metrics import evenly, largest_eigenvalue
from dlcft.bench.streams import Pair
from dlcft.curvature.losses import LOSSES
from dlcft.data.files import write_text
from dlcft.data.images import Preprocess
from dlcft.data.labels import Labels
from dlcft.learner.display import Progress
from dlcft.learner.heads import HEAD
from dlcft.learner.learner import Learner
from dlcft.network.names import check_name

SPECTRUM_FORMAT = 1
SPECTRUM_PREFIX = "spectrum-"
MLP = "mlp"


@dataclass(frozen=True)
class Spectrum:
    """All that determines a curve of eigenvalues."""

    dataset: str = "digits"
    loss: str = "cross-entropy"
    network: str = MLP  # untrained, or a name that `load_backbone` knows
    seed: int = 0
    width: int | None = None  # units in each of the two hidden layers of the MLP, or channels of a ResNet-18
    per_class: int | None = None  # only so many training images of each class, or all
    epochs: int = 10
    batch_size: int = 32
    lr: float = 1e-3  # of Adam
    scale: float = 15.0  # α of the squared loss
    points: int = 20  # how often the figures are taken, evenly spaced
    samples: int = 500  # training images that loss and eigenvalue are taken from
    iterations: int = 20  # of the power iteration

    def __post_init__(self) -> None:
        """Reject a configuration that cannot be run."""
        check_name("loss", self.loss, LOSSES)
        for name in ("epochs", "points", "samples", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def key(self) -> str:
        """A hash of the whole configuration."""
        return hashed({"spectrum": SPECTRUM_FORMAT, **asdict(self)})

    @property
    def file(self) -> str:
        """The name of its result."""
        return f"{SPECTRUM_PREFIX}{self.dataset}-{self.network}-{self.loss}-{self.seed}-{self.key}.json"


@dataclass(frozen=True)
class Trace:
    """The outcome. The environment has a hash of the network as it was at first.

    A record has `epochs` (how many were complete, with the share of the one under way), `train_loss`, `test_loss`,
    `test_accuracy` and `eigenvalue`.
    """

    spectrum: Spectrum
    records: list[dict[str, float]]
    seconds: float
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The content of its file."""
        return {"spectrum_format": SPECTRUM_FORMAT, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Trace:
        """The curve in a file; refused when it is none, or of another version."""
        try:
            content = json.loads(path.read_text())
            found = content.pop("spectrum_format")
            if found != SPECTRUM_FORMAT:
                raise ValueError(f"{path} has spectrum format {found}; this version reads {SPECTRUM_FORMAT}.")
            return cls(**{**content, "spectrum": Spectrum(**content["spectrum"])})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no spectrum file of dlcft.") from error


def trace(
    spectrum: Spectrum,
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    report: Callable[[str], None] = print,
) -> Trace:
    """The curve of a configuration: read if it is there, else computed and written; see `experiment.run`."""
    path = out / spectrum.file
    if path.exists():
        found = Trace.read(path)
        check_weights(path, found.environment, spectrum.network, weights, spectrum.width)
        return found
    started = time.perf_counter()
    whole = Experiment(dataset=spectrum.dataset, tasks=1, seed=spectrum.seed, per_class=spectrum.per_class)
    task = make_stream(whole, load(spectrum.dataset, data).decoded()).tasks[0]
    backbone = make_network(spectrum, task.train[0], weights)
    settings = {name: getattr(spectrum, name) for name in ("seed", "loss", "scale", "lr", "epochs", "batch_size")}
    settings |= {"optimizer": "adam", "batchnorm": "frozen", "preprocess": backbone.preprocess}
    settings["weight_decay"] = 0.0  # or the minimum of the cross-entropy would not lie at infinity
    learner = Learner(backbone.module, "none", scenario="data-il", **settings)
    records: list[dict[str, float]] = []
    some = evenly(task.train, spectrum.samples)

    def look(progress: Progress) -> None:
        """Take the figures while the one training loop runs, which calls this after each step."""
        # the first after the first step, the last after the last
        if progress.share < len(records) / max(1, spectrum.points - 1) - 1e-9:
            return
        train, test = learner.evaluate(some), learner.evaluate(task.test)
        value = _eigenvalue(spectrum, learner, some)
        epochs, losses = progress.share * spectrum.epochs, {"train_loss": train["loss"], "test_loss": test["loss"]}
        records.append({"epochs": epochs, **losses, "test_accuracy": test["accuracy"], "eigenvalue": value})
        report(f"{spectrum.file}, epoch {epochs:.1f}: training loss {train['loss']:.3g}, eigenvalue {value:.3g}")

    learner.learn(task.train, progress=look)
    append_event(out, {"spectrum": spectrum.file, **records[-1]})
    result = Trace(spectrum, records, time.perf_counter() - started, environment(backbone))
    write_text(path, json.dumps(result.to_dict(), indent=1))
    return result


def _eigenvalue(spectrum: Spectrum, learner: Learner, pair: Pair) -> float:
    samples = learner.samples(pair)
    batches = learner._batches(samples, Labels(learner.labels()).indices(samples.labels), 256)
    generator = torch.Generator().manual_seed(spectrum.seed)
    model, loss = learner.model, learner.loss
    return largest_eigenvalue(model, batches, loss, HEAD, iterations=spectrum.iterations, generator=generator)


def make_network(spectrum: Spectrum, images: Tensor, weights: str | None) -> Backbone:
    """The network at first: an MLP for these images, or a backbone by name."""
    if spectrum.network != MLP:
        return load_backbone(spectrum.network, weights=weights, width=spectrum.width)
    inputs, width = images[0].numel(), spectrum.width or 100
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spectrum.seed)
        layers = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return Backbone(MLP, nn.Sequential(*layers), Preprocess(), {})
