"""Sizes of a reproduction, and every choice that the paper leaves open, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dlcft.bench.experiment import Experiment, recipe_of
from dlcft.bench.metrics import NEIGHBOURS
from dlcft.bench.spectrum import Spectrum

Settings = Mapping[str, Any]


class Choice(NamedTuple):
    """A value that the paper leaves open, as it is set here, and why."""

    value: Any
    reason: str


OPEN_CHOICES: dict[str, Choice] = {
    "epochs": Choice(
        {"smoke": 1, "mini": 5, "mini, data-100": 10, "paper": 20, "paper, data-100": 50},
        "Not given. More where a task is small, so that it has enough steps. Each result says whether training had "
        "converged.",
    ),
    "batch_size": Choice(32, "Not given. Small, because a task of 100 has 500 images."),
    "schedule": Choice("constant", "The paper says 'initial' learning rate and no schedule."),
    "strength": Choice(
        {"lwf": 1.0, "ewc": 1.0, "mas": 1.0, "osla": 1.0},
        "λ is not given. 1 is what Laplace's approximation asks for; `--tune` replaces it.",
    ),
    "temperature": Choice(2.0, "Of LwF, not given; that of LwF's own paper."),
    "der": Choice(
        {"der": {"replay_logits": 0.3, "replay_labels": 0.0}, "derpp": {"replay_logits": 0.1, "replay_labels": 0.5}},
        "α and β are not given; within the ranges of DER's own paper, and tuned.",
    ),
    "replay_batch": Choice(32, "Not given. As large as the batch, as DER's own code has it."),
    "batchnorm": Choice("first", "Said of data- and task-IL only; class-IL is treated alike."),
    "weigh_by": Choice("tasks", "'(t−1):t' for the merge of curvatures is read as (t−1)/t and 1/t."),
    "draws": Choice(1, "Output gradients a sample are not given. One is unbiased, and cheap."),
    "tkfac": Choice("tkfac", "TK-FAC for convolutions is not written out; a reading of arXiv 2011.10741."),
    "curvature_images": Choice("as they are", "Whether curvature sees augmented images is not said."),
    "class_order": Choice("random", "Not given; drawn by the seed, as everything else."),
    "split": Choice("stratified", "How data-IL deals out the images is not said; every task gets every class."),
    "stem": Choice("3×3, stride 1, no max-pool", "Not given for 32 pixels; usual there."),
    "slope": Choice(
        0.1, "LeakyReLU's is not given. At scale paper the nonlinear rows start from a ReLU network, as said."
    ),
    "pretraining": Choice(
        {"smoke": "Tiny-ImageNet", "mini": "Tiny-ImageNet", "paper": "ImageNet32"},
        "The shipped network stands in for the paper's where weights of that size cannot be had.",
    ),
    "knn": Choice(NEIGHBOURS, "k is not given; neighbours by cosine, one vote each."),
    "head": Choice(
        "zero", "Initial weights are not given; `dlcft` and its None and Joint start at the ridge solution."
    ),
    "joint": Choice("as many epochs", "How long Joint is trained is not said; as often over the data as the others."),
    "spectrum": Choice(
        {"optimizer": "adam", "mlp_lr": 1e-3, "backbone_lr": 1e-4, "width": 100},
        "Network and training of the figure are not given. One optimiser for both losses; no weight decay, which "
        "would keep the cross-entropy from its minimum at infinity.",
    ),
}


@dataclass(frozen=True)
class Scale:
    """How large a reproduction is."""

    streams: Mapping[str, Experiment]  # without a method, for each stream of the paper; some may be missing
    spectra: tuple[Spectrum, ...]  # the networks of the figure of eigenvalues
    seeds: int = 3  # how many, unless said otherwise
    knn: int = 5  # how often the rows of the k-NN figure are probed
    small: Settings = field(default_factory=dict)  # upper bounds of settings
    # files of a stream's backbone, for nonlinear and for linearised rows; None for the published ones
    weights: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)  # why a stream of the paper's is missing


_DIGITS = Experiment(dataset="digits", tasks=2, size=8, classes=6, per_class=6)
_MINI = Experiment(dataset="seq-cifar100", tasks=10, per_class=100)
_PAPER = Experiment(dataset="seq-cifar100", tasks=10, backbone="resnet18-32", width=64)
_MIT = Experiment(dataset="seq-mit67", tasks=4, backbone="resnet18")
_BACKBONE = Spectrum("seq-cifar100", network="shipped", lr=1e-4)
WEIGHTS = ("resnet18-32-imagenet32-relu.safetensors", "resnet18-32-imagenet32.safetensors")


def _streams(base: Experiment, hundred: Experiment, **others: Experiment) -> dict[str, Experiment]:
    """Data-, task- and class-IL of one data set."""
    return {
        "data-10": base,
        "data-100": hundred,
        "task-10": replace(base, scenario="task-il"),
        "class-10": replace(base, scenario="class-il"),
        **others,
    }


SCALES: dict[str, Scale] = {
    "smoke": Scale(
        _streams(_DIGITS, replace(_DIGITS, tasks=3)),
        (Spectrum(per_class=10, epochs=2, points=3, samples=50, iterations=3),),
        seeds=1,
        knn=1,
        small={"buffer": 12, "random_features": 64, "tangent_features": 64},
        missing={"mit-4": "digits stand in for CIFAR-100 only."},
    ),
    "mini": Scale(
        _streams(_MINI, replace(_MINI, tasks=100, evaluate_every=20), **{"data-10": replace(_MINI, evaluate_every=2)}),
        (Spectrum(epochs=60), replace(_BACKBONE, per_class=20, epochs=20, points=6, samples=128, iterations=15)),
        knn=2,
        missing={
            "mit-4": "MIT-67's photos at 224 pixels through a whole ResNet-18 pre-trained on ImageNet-1k take a GPU; "
            "the shipped network is for 32 pixels. Scale paper has it."
        },
    ),
    "paper": Scale(
        _streams(_PAPER, replace(_PAPER, tasks=100), **{"mit-4": _MIT}),
        (
            Spectrum("mnist", epochs=20, samples=2000),
            replace(_BACKBONE, network="resnet18-32", width=64, epochs=50, samples=1000),
        ),
        knn=10,
        weights={
            **dict.fromkeys(("data-10", "data-100", "task-10", "class-10"), WEIGHTS),
            "mit-4": (None, "resnet18-imagenet1k-leaky.safetensors"),
        },
    ),
}


def open_settings(method: str, stream: str, scale: str) -> dict[str, Any]:
    """The open choices that a method depends on."""
    recipe, value = recipe_of(method, {}), {name: choice.value for name, choice in OPEN_CHOICES.items()}
    if recipe.closed_form:
        return {}
    names = ("batch_size", "schedule", "temperature", "weigh_by", "draws", "replay_batch", "batchnorm")
    settings = {name: value[name] for name in names if not (recipe.linear and name == "batchnorm")}
    settings["epochs"] = value["epochs"].get(f"{scale}, {stream}", value["epochs"][scale])
    settings |= value["der"].get(method, {})
    settings |= {"strength": value["strength"][method]} if method in value["strength"] else {}
    return {name: chosen for name, chosen in settings.items() if name in recipe.settings}
