"""Sizes of a reproduction, and every choice behind it: the paper's, its authors' code's, or ours, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from dlcft.bench.experiment import Experiment, recipe_of
from dlcft.bench.metrics import NEIGHBOURS
from dlcft.bench.spectrum import Spectrum

Settings = Mapping[str, Any]
Origin = Literal["paper", "authors' code", "ours"]


class Choice(NamedTuple):
    """A value, whose choice it is, and why; where it differs between scales, by the scale's name."""

    value: Any
    origin: Origin
    reason: str


CHOICES: dict[str, Choice] = {
    "loss": Choice("½‖15·onehot − f‖²", "paper", "Of linearised rows; cross-entropy of nonlinear ones."),
    "optimizer": Choice(
        "Adam 1e-4, SGD 1e-3 with momentum 0.9; weight decay 1e-5",
        "paper",
        "Of linearised and of nonlinear rows. Learning rates of scale small: see `lr`.",
    ),
    "buffer": Choice(
        {"smoke": 12, "small": 250, "paper": 500}, "paper", "500 of 100 classes; at scale small as many a class: 250."
    ),
    "balance": Choice(0.5, "paper", "λ between penalty and replay in class-IL."),
    "start": Choice(
        "auto",
        "authors' code",
        "In data- and task-IL the first task trains a plain network, BatchNorm included, and DLCFT linearises that; in "
        "class-IL the pre-trained one. Its head is then solved under squared loss.",
    ),
    "steps": Choice(
        {"paper": {"data": 10_000, "long": 10_000, "task": 50_000, "class": 10_000, "mit": 10_000}},
        "authors' code",
        "A task.",
    ),
    "first_times": Choice(
        {"smoke": 2, "small": 2, "paper": 2}, "authors' code", "The first task is trained twice as long."
    ),
    "schedule": Choice(
        "linear", "authors' code", "To 0 within a task, with a fresh optimiser; gradients clipped at 1."
    ),
    "damping": Choice(1e-4, "authors' code", "Pull to θ_{t−1} in every quadratic method, but not in class-IL."),
    "objective": Choice(
        "(L_data + (t−1)·L_reg)/t", "authors' code", "Of LwF, EWC, MAS and OSLA too, with λ = 1; LwF at temperature 1."
    ),
    "strength": Choice(
        {"lwf": 0.3, "mas": 0.1, "osla": 10.0},
        "ours",
        "λ of the rows 'λ tuned', at scale small only, by validation images; EWC's best is the authors' 1.",
    ),
    "curvature_images": Choice("augmented", "authors' code", "Once each; theirs are 64,000 draws a task."),
    "tkfac": Choice("tkfac", "authors' code", "K-FAC scaled to the exact trace of the block."),
    "trace": Choice("merged", "ours", "The authors' code keeps the trace of the first task, an oversight."),
    "weigh_by": Choice("tasks", "paper", "'(t−1):t' for the merge of curvatures is read as (t−1)/t and 1/t."),
    "class_order": Choice(
        {"smoke": "random", "small": "random", "paper": "labels"}, "authors' code", "Random is drawn by the seed."
    ),
    "slope": Choice(
        {"smoke": 0.1, "small": 0.1, "paper": 0.01}, "authors' code", "LeakyReLU's, in nonlinear rows too."
    ),
    "batch_size": Choice(
        {"smoke": 32, "small": 32, "paper": 128}, "authors' code", "128; 32 is ours, where a task has 50 to 500 images."
    ),
    "epochs": Choice(
        {"smoke": 1, "small": 15}, "ours", "In place of steps. Each result says whether it has converged."
    ),
    "lr": Choice(
        {"small": {"sgd": 1e-2, "adam": 1e-3, "lwf": 3e-2}},
        "ours",
        "Ten times the paper's (LwF's 30), where there are a hundred times fewer steps: of several, by validation "
        "images. Chosen so, `dlcft` needs no careful first step.",
    ),
    "der": Choice(
        {"der": {"replay_logits": 0.03, "replay_labels": 0.0}, "derpp": {"replay_logits": 0.01, "replay_labels": 0.5}},
        "ours",
        "α and β are not given; those of DER's own paper for ten outputs, summed over outputs here, and the best of "
        "several by validation images.",
    ),
    "replay_batch": Choice("as the batch", "ours", "Not given; as DER's own code has it."),
    "batchnorm": Choice("first", "paper", "Learns in the first task only; in class-IL, where it is merged, never."),
    "draws": Choice(1, "authors' code", "Output gradients a sample."),
    "joint": Choice(
        {"smoke": 1, "small": 20, "paper": 100_000},
        "ours",
        "Epochs (at scale paper steps) of Joint; how long it is trained is not said. The linearised one starts from "
        "the network after the first task, as the others.",
    ),
    "mirror": Choice("everybody", "ours", "Outputs are means over an image and its mirror image, for every method."),
    "split": Choice("stratified", "ours", "How data-IL deals out the images is not said; every task gets every class."),
    "stem": Choice("3×3, stride 1, no max-pool", "ours", "Not given for 32 pixels; usual there."),
    "pretraining": Choice(
        {"smoke": "Tiny-ImageNet", "small": "Tiny-ImageNet", "paper": "ImageNet32"},
        "paper",
        "The shipped network stands in for the paper's where weights of that size cannot be had.",
    ),
    "knn": Choice(NEIGHBOURS, "ours", "k is not given; neighbours by cosine, one vote each."),
    "head": Choice("zero", "ours", "Initial weights are not given; `dlcft` starts at the ridge solution."),
    "spectrum": Choice(
        {"optimizer": "adam", "mlp_lr": 1e-3, "backbone_lr": 1e-4, "width": 100},
        "ours",
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
    knn: int = 2  # how often the rows of the k-NN figure are probed
    small: Settings = field(default_factory=dict)  # upper bounds of settings
    weights: Mapping[str, str] = field(default_factory=dict)  # a stream's file for the backbone, where it has one
    missing: Mapping[str, str] = field(default_factory=dict)  # why a stream of the paper's is missing


_DIGITS = Experiment(dataset="digits", tasks=2, size=8, classes=6, per_class=6)
_SMALL = Experiment(dataset="seq-cifar10", tasks=10, per_class=250)
_SPLIT = Experiment(dataset="seq-cifar100", tasks=5, classes=50, per_class=50)
_PAPER = Experiment(dataset="seq-cifar100", tasks=10, backbone="resnet18-32", width=64, class_order="labels")
_MIT = Experiment(dataset="seq-mit67", tasks=4, backbone="resnet18")
_BACKBONE = Spectrum("seq-cifar100", network="shipped", lr=1e-4)
WEIGHTS = "resnet18-32-imagenet32.safetensors"


def _streams(base: Experiment, long: int, split: Experiment, **others: Experiment) -> dict[str, Experiment]:
    """Data-IL in few and in many tasks, task- and class-IL."""
    return {
        "data": replace(base, evaluate_every=max(1, base.tasks // 5)),
        "long": replace(base, tasks=long, evaluate_every=max(1, long // 5)),
        "task": replace(split, scenario="task-il"),
        "class": replace(split, scenario="class-il"),
        **others,
    }


SCALES: dict[str, Scale] = {
    "smoke": Scale(
        _streams(_DIGITS, 3, _DIGITS),
        (Spectrum(per_class=10, epochs=2, points=3, samples=50, iterations=3),),
        seeds=1,
        knn=1,
        small={"buffer": CHOICES["buffer"].value["smoke"], "random_features": 64, "depth_features": 64},
        missing={"mit": "digits stand in for CIFAR-100 only."},
    ),
    "small": Scale(
        _streams(_SMALL, 50, _SPLIT),
        (Spectrum(epochs=60), replace(_BACKBONE, per_class=20, epochs=20, points=6, samples=128, iterations=15)),
        small={"buffer": CHOICES["buffer"].value["small"]},
        missing={
            "mit": "MIT-67's photos at 224 pixels through a whole ResNet-18 pre-trained on ImageNet-1k take a GPU; "
            "the shipped network is for 32 pixels. Scale paper has it."
        },
    ),
    "paper": Scale(
        _streams(_PAPER, 100, _PAPER, mit=_MIT),
        (
            Spectrum("mnist", epochs=20, samples=2000),
            replace(_BACKBONE, network="resnet18-32", width=64, epochs=50, samples=1000),
        ),
        knn=10,
        weights={
            **dict.fromkeys(("data", "long", "task", "class"), WEIGHTS),
            "mit": "resnet18-imagenet1k-leaky.safetensors",
        },
    ),
}


def scale_settings(method: str, stream: str, scale: str, joint: bool) -> dict[str, Any]:
    """The settings that a method has at a scale, where they are not those of its recipe."""
    recipe, value = recipe_of(method, {}), {name: choice.value for name, choice in CHOICES.items()}
    if recipe.closed_form:
        return {}
    known, size = recipe.settings, value["batch_size"][scale]
    rates = value["lr"].get(scale, {})
    wanted = {
        "batch_size": size,
        "careful": False if rates else None,
        "replay_batch": size,
        "lr": rates.get(method, rates.get(known["optimizer"])),
        "start_lr": rates.get("sgd"),
        "batchnorm": "frozen" if SCALES[scale].streams[stream].scenario == "class-il" and not recipe.linear else None,
        "epochs": value["epochs"].get(scale),
        "steps": value["steps"].get(scale, {}).get(stream),
        "first_times": value["first_times"].get(scale),
        **value["der"].get(method, {}),
    }
    if joint:
        counted = "steps" if scale in value["steps"] else "epochs"
        start = {f"start_{counted}": 2 * wanted[counted]}  # as long as where tasks come one after another, see `Start`
        wanted |= {counted: value["joint"][scale], "first_times": None, **start}
    return {name: v for name, v in wanted.items() if v is not None and name in known and known[name] != v}
