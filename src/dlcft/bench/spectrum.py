"""Vanishing curvature: the largest eigenvalue of the Fisher matrix while a network is trained by one loss or another.

Like an experiment: a frozen configuration in, JSON out, never computed twice. A run that was killed begins anew.
"""

from __future__ import annotations

import hashlib
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
from dlcft.bench.events import append_event
from dlcft.bench.experiment import Experiment, check_same, environment, make_stream, write_atomically
from dlcft.bench.metrics import largest_eigenvalue
from dlcft.bench.probes import evenly
from dlcft.curvature.losses import LOSSES
from dlcft.data.images import Preprocess
from dlcft.data.samples import Batches
from dlcft.learner.build import fingerprint
from dlcft.learner.core import HEAD
from dlcft.learner.learner import Learner
from dlcft.learner.progress import Progress
from dlcft.methods.recipes import check_name

SPECTRUM_FORMAT = 1
SPECTRUM_PREFIX = "spectrum-"
MLP = "mlp"


@dataclass(frozen=True)
class Spectrum:
    """All that determines a curve of eigenvalues.

    Attributes:
        dataset: a name that `datasets.load` knows.
        loss: "cross-entropy" or "mse".
        network: "mlp", untrained, or a name that `load_backbone` knows.
        seed: of everything random.
        width: units in each of the two hidden layers of the "mlp", or channels of a ResNet-18.
        per_class: only so many training images of each class, or None for all.
        epochs: passes over them.
        batch_size: samples a step.
        lr: of Adam.
        scale: α of the squared loss.
        points: how often the three figures are taken, evenly spaced.
        samples: training images that loss and eigenvalue are taken from.
        iterations: of the power iteration.
    """

    dataset: str = "digits"
    loss: str = "cross-entropy"
    network: str = MLP
    seed: int = 0
    width: int | None = None
    per_class: int | None = None
    epochs: int = 10
    batch_size: int = 32
    lr: float = 1e-3
    scale: float = 15.0
    points: int = 20
    samples: int = 500
    iterations: int = 20

    def __post_init__(self) -> None:
        """Refuse what cannot be run, before anything is."""
        check_name("loss", self.loss, LOSSES)
        for name in ("epochs", "points", "samples", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @property
    def key(self) -> str:
        """A hash of the whole configuration."""
        text = json.dumps({"spectrum": SPECTRUM_FORMAT, **self.to_dict()}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def file(self) -> str:
        """The name of its result."""
        return f"{SPECTRUM_PREFIX}{self.dataset}-{self.network}-{self.loss}-{self.seed}-{self.key}.json"


@dataclass(frozen=True)
class Trace:
    """What came out.

    Attributes:
        spectrum: the configuration.
        records: in order, each with `epochs` (how many were complete, with the share of the one under way),
            `train_loss`, `test_loss`, `test_accuracy` and `eigenvalue`.
        seconds: in all.
        environment: versions, commit, hardware, a hash of the network as it was at first.
    """

    spectrum: Spectrum
    records: list[dict[str, float]]
    seconds: float
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"spectrum_format": SPECTRUM_FORMAT, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Trace:
        """From its file.

        Raises:
            ValueError: when it is none, or of another version.
        """
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
    """The curve of a configuration: read if it is there, else computed and written.

    Args:
        spectrum: what to do.
        out: the folder of results.
        data: where the data set is, see `datasets.load`. Not part of the configuration.
        weights: the backbone's file, see `load_backbone`. Its content is part of the result.
        report: called with a line after each point.
    """
    path = out / spectrum.file
    if path.exists():
        return _known(path, spectrum, weights)
    started = time.perf_counter()
    whole = Experiment(dataset=spectrum.dataset, tasks=1, seed=spectrum.seed, per_class=spectrum.per_class)
    task = make_stream(whole, load(spectrum.dataset, data).decoded()).tasks[0]
    backbone = _network(spectrum, task.train[0], weights)
    learner = Learner(
        backbone.module,
        "none",
        scenario="data-il",
        seed=spectrum.seed,
        preprocess=backbone.preprocess,
        loss=spectrum.loss,
        scale=spectrum.scale,
        optimizer="adam",
        lr=spectrum.lr,
        weight_decay=0.0,  # or the minimum of the cross-entropy would not lie at infinity
        epochs=spectrum.epochs,
        batch_size=spectrum.batch_size,
        batchnorm="frozen",
    )
    probe = _Probe(spectrum, learner, evenly(task.train, spectrum.samples), task.test, report)
    learner.learn(task.train, progress=probe)
    append_event(out, {"spectrum": spectrum.file, **probe.records[-1]})
    result = Trace(spectrum, probe.records, time.perf_counter() - started, environment(backbone))
    write_atomically(path, json.dumps(result.to_dict(), indent=1))
    return result


def _known(path: Path, spectrum: Spectrum, weights: str | None) -> Trace:
    found = Trace.read(path)
    if weights is not None:
        backbone = load_backbone(spectrum.network, weights=weights, width=spectrum.width)
        check_same(path, "weights", found.environment["backbone"], fingerprint(backbone.module))
    return found


class _Probe:
    """Takes the figures while the one training loop runs, which calls it after each step."""

    def __init__(
        self,
        spectrum: Spectrum,
        learner: Learner,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        report: Callable[[str], None],
    ) -> None:
        self.spectrum, self.learner, self.train, self.test, self.report = spectrum, learner, train, test, report
        self.records: list[dict[str, float]] = []

    def __call__(self, progress: Progress) -> None:
        # the first after the first step, the last after the last
        if progress.share < len(self.records) / max(1, self.spectrum.points - 1) - 1e-9:
            return
        train, test = self.learner.evaluate(self.train), self.learner.evaluate(self.test)
        self.records.append(
            {
                "epochs": progress.share * self.spectrum.epochs,
                "train_loss": train["loss"],
                "test_loss": test["loss"],
                "test_accuracy": test["accuracy"],
                "eigenvalue": self._eigenvalue(),
            }
        )
        last = self.records[-1]
        self.report(
            f"{self.spectrum.network}, {self.spectrum.loss}, epoch {last['epochs']:.1f}: training loss "
            f"{last['train_loss']:.3g}, eigenvalue {last['eigenvalue']:.3g}"
        )

    def _eigenvalue(self) -> float:
        learner, (x, y) = self.learner, self.train
        places = {label: place for place, label in enumerate(learner.labels())}
        labels = torch.tensor([places[label] for label in y.tolist()])
        batches: Batches = learner._batches(learner.samples((x, y)), labels, 256)
        generator = torch.Generator().manual_seed(self.spectrum.seed)
        iterations = self.spectrum.iterations
        return largest_eigenvalue(
            learner.model, batches, learner.loss, HEAD, iterations=iterations, generator=generator
        )


def _network(spectrum: Spectrum, images: Tensor, weights: str | None) -> Backbone:
    if spectrum.network != MLP:
        return load_backbone(spectrum.network, weights=weights, width=spectrum.width)
    inputs, width = images[0].numel(), spectrum.width or 100
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spectrum.seed)
        layers = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return Backbone(MLP, nn.Sequential(*layers), Preprocess(), {})
