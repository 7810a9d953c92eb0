"""Settings: the parts of a recipe beside its method, and fields that know which values they accept."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dlcft.curvature.losses import LOSSES, Loss, ScaledMSE

Scenario = Literal["data-il", "task-il", "class-il"]
SCHEDULES = ("constant", "linear", "cosine")
SCENARIOS: tuple[Scenario, ...] = ("data-il", "task-il", "class-il")

_KINDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a word"}


@dataclass(frozen=True)
class _Rule:
    kind: type | None = None
    optional: bool = False
    among: tuple[str, ...] = ()
    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def check(self, name: str, value: Any, kind: type) -> None:
        if value is None and self.optional:
            return
        or_none = " or None" if self.optional else ""
        if not _is_of(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be {_KINDS[kind]}{or_none}.")
        if self.among and value not in self.among:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, self.among))}.")
        limits = {
            "positive" if self.above == 0 else f"above {self.above:g}": self.above == -math.inf or value > self.above,
            f"at least {self.least:g}": self.least == -math.inf or value >= self.least,
            f"below {self.below:g}": self.below == math.inf or value < self.below,
            f"at most {self.most:g}": self.most == math.inf or value <= self.most,
        }
        for limit, kept in limits.items():
            if not kept:
                raise ValueError(f"{name} is {value}; it must be {limit}{or_none}.")


def setting(default: Any, **rule: Any) -> Any:
    """A dataclass field with a rule for its values.

    Args:
        default: its default.
        rule: `kind` (by default the default's type), `optional` (accept None), `among`, `above`, `least`, `below`,
            `most`.
    """
    return dataclasses.field(default=default, metadata={"rule": _Rule(**rule)})


def check_settings(part: Any) -> None:
    """Reject a value of the wrong type or outside of its limits.

    Raises:
        ValueError: names the setting, its value, and the accepted ones.
    """
    for field in dataclasses.fields(part):
        rule: _Rule = field.metadata.get("rule", _Rule())
        kind, value = rule.kind or type(field.default), getattr(part, field.name)
        if isinstance(value, np.generic):  # JSON knows Python's numbers only
            value = value.item()
            object.__setattr__(part, field.name, value)
        if kind in _KINDS:
            rule.check(field.name, value, kind)


def settings_of(part: Any) -> dict[str, Any]:
    """The settings of a part by name."""
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _is_of(value: Any, kind: type) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and (kind is float or isinstance(value, int))


@dataclass(frozen=True)
class Network:
    """The model of a trained method: a network, linearised or plain, and the loss of its outputs.

    Attributes:
        linear: linearise the backbone, its BatchNorm folded; otherwise train it as it is.
        strict: the truly linear model, see `Classifier`; in data-IL and task-IL.
        loss: "mse" or "cross-entropy".
        scale: α of the squared loss.
    """

    linear: bool = True
    strict: bool = False
    loss: str = setting("mse", among=tuple(LOSSES))
    scale: float = setting(15.0, above=0)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)
        if self.strict and not self.linear:
            raise ValueError("strict=True needs linear=True.")

    def make_loss(self) -> Loss:
        """The loss that it names."""
        return ScaledMSE(self.scale) if self.loss == "mse" else LOSSES[self.loss]()


@dataclass(frozen=True)
class Features:
    """The model of a closed-form method: fixed features of the frozen backbone.

    Attributes:
        depth_features: how many, at the most, of means and covariances of activations of all depths, see
            `DepthFeatures`.
        random_features: how many random features of z.
        random_kind: "relu", `relu(P z)` as ranpac; or "fourier", those of a Gaussian kernel, see `FrozenFeatures`,
            which stand alone.
        bandwidth: of that kernel, for z of unit length; 1.4 is how far apart unrelated ones are.
        tangent_features: how many of the sketched tangent space, see `TangentFeatures`.
        tangent_share: the share of the layers, the last ones, that have tangent features, unless `train` names some.
        direction: u of the tangent features: "random", independent of data; or "principal", of the first batch's
            features, half a point to a point better, and fixed from then on.
        scale: α of the targets.
        bfloat16: compute the network in bfloat16 where the device's autocast does; the features that are made of its
            activations, their sums and the heads stay in float32. For a float32 network, without tangent features.
    """

    depth_features: int = setting(0, least=0)
    random_features: int = setting(0, least=0)
    tangent_features: int = setting(0, least=0)
    tangent_share: float = setting(1.0, above=0, most=1)
    direction: str = setting("random", among=("random", "principal"))
    scale: float = setting(15.0, above=0)
    random_kind: str = setting("relu", among=("relu", "fourier"))
    bandwidth: float = setting(1.4, above=0)
    bfloat16: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)
        if self.random_kind == "fourier" and (self.tangent_features or not self.random_features):
            raise ValueError("random_kind='fourier' needs random_features, and no tangent_features.")
        if self.bfloat16 and self.tangent_features:
            raise ValueError("bfloat16=True is for features of the forward pass, not for tangent_features.")

    @property
    def keeps_features(self) -> bool:
        """Whether the backbone's own features z stand first among them."""
        return self.depth_features > 0 or self.tangent_features > 0 or not self.random_features

    def make_loss(self) -> Loss:
        """Squared loss."""
        return ScaledMSE(self.scale)


@dataclass(frozen=True)
class Training:
    """How a trained method is optimised.

    Attributes:
        optimizer: "adam" or "sgd".
        lr: learning rate.
        momentum: of SGD.
        weight_decay: coupled L2; on ψ it pulls to the pre-trained weights.
        schedule: "constant", or "linear" or "cosine": from the learning rate to 0 within a task.
        epochs: passes over a task.
        steps: how many steps a task has, in place of `epochs`; None for whole epochs.
        first_times: how many times as long the first task is trained.
        batch_size: samples a step.
        careful: lower a task's learning rate so that its first step does not overshoot on the first batch. It matters
            with few images and a head that is not zero.
        clip: largest norm of a step's gradient, or None.
        augment: see `Augmentation`.
        head_start: "zero": new outputs start from zero weights. "ridge": a head starts at the minimum of the objective
            over the head alone, which squared loss has in closed form.
        head_end: "trained", or "ridge": after training the head goes to that minimum again, on the trained features.
        batchnorm: "first" trains BatchNorm's statistics in the first task only, as the paper; "frozen" never.
    """

    optimizer: str = setting("adam", among=("adam", "sgd"))
    lr: float = setting(1e-4, above=0)
    momentum: float = setting(0.9, least=0, below=1)
    weight_decay: float = setting(1e-5, least=0)
    schedule: str = setting("constant", among=SCHEDULES)
    epochs: int = setting(5, least=1)
    steps: int | None = setting(None, kind=int, optional=True, least=1)
    first_times: int = setting(1, least=1)
    batch_size: int = setting(32, least=1)
    careful: bool = False
    clip: float | None = setting(None, kind=float, optional=True, above=0)
    augment: str = "none"
    head_start: str = setting("zero", among=("zero", "ridge"))
    head_end: str = setting("trained", among=("trained", "ridge"))
    batchnorm: str = setting("first", among=("first", "frozen"))

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)


@dataclass(frozen=True)
class OnePass:
    """How a closed-form method reads its data: once.

    Attributes:
        batch_size: samples at a time.
        augment: "flip" among its steps averages the features of an image and its mirror image; others do nothing.
    """

    batch_size: int = setting(256, least=1)
    augment: str = "none"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)


@dataclass(frozen=True)
class Start:
    """The network that is linearised, or whose features are taken.

    Attributes:
        start: "pretrained": the backbone as it is given. "first-task": the backbone after the first task, which trains
            it once as a plain network, with cross-entropy and its BatchNorm learning; from then on it is frozen, and
            saved with the learner. "auto": as the paper's authors, "first-task" in data-IL and task-IL and
            "pretrained" in class-IL; "pretrained" too where `train=` chooses what learns.
        start_optimizer: of that training: "sgd" or "adam".
        start_lr: its learning rate.
        start_schedule: see `Training`.
        start_epochs: passes over the first task; None for twice those of later tasks (the authors), 20 in closed form.
        start_steps: see `Training`; None for twice those of later tasks, if these are counted in steps.
        start_batch_size: samples a step; None for as many as in later tasks, 32 in closed form.
        start_clip: largest norm of a step's gradient, or None.
    """

    start: str = setting("pretrained", among=("pretrained", "first-task", "auto"))
    start_optimizer: str = setting("sgd", among=("adam", "sgd"))
    start_lr: float = setting(1e-2, above=0)
    start_schedule: str = setting("linear", among=SCHEDULES)
    start_epochs: int | None = setting(None, kind=int, optional=True, least=1)
    start_steps: int | None = setting(None, kind=int, optional=True, least=1)
    start_batch_size: int | None = setting(None, kind=int, optional=True, least=1)
    start_clip: float | None = setting(1.0, optional=True, above=0)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def training(self, later: Reading) -> Training:
        """How the plain network is trained on the first task, given how later ones are learned."""
        usual = later if isinstance(later, Training) else Training(epochs=10)
        doubled = None if usual.steps is None or self.start_epochs is not None else 2 * usual.steps
        return Training(
            optimizer=self.start_optimizer,
            lr=self.start_lr,
            schedule=self.start_schedule,
            epochs=self.start_epochs or 2 * usual.epochs,
            steps=self.start_steps or doubled,
            batch_size=self.start_batch_size or usual.batch_size,
            clip=self.start_clip,
            augment=later.augment,
        )


Model = Network | Features
Reading = Training | OnePass
