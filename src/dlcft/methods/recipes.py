"""Recipes: the paper's methods, and ours, as settings. One screen.

The paper leaves open: strengths of LwF/EWC/MAS/OSLA, epochs, batch size, schedule, DER's α and β, the replay batch.
What stands here is a starting point; a comparison tunes them with the same budget for every method.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dlcft.curvature.losses import LOSSES, Loss, ScaledMSE
from dlcft.methods import Finetune, LwF, Method, Quadratic, Replay, Ridge
from dlcft.methods.buffer import Buffer

Scenario = Literal["data-il", "task-il", "class-il"]


@dataclass(frozen=True)
class Recipe:
    """How a learner learns: model, loss, optimiser and method. Every field is a switch.

    Attributes:
        method: "finetune", "quadratic", "lwf", "replay" or "ridge".
        linear: whether the backbone is linearised (its BatchNorm folded) or trained as it is.
        strict: the truly linear model, see `Classifier`; in data-IL and task-IL.
        loss: "mse" or "cross-entropy".
        scale: α of the squared loss.
        optimizer: "adam" or "sgd".
        lr: learning rate.
        momentum: of SGD.
        weight_decay: coupled L2; on ψ it pulls to the pre-trained weights.
        schedule: "constant" or "cosine".
        epochs: passes over a task.
        batch_size: samples a step.
        careful: lower the learning rate of a task to that at which a first step ends where the objective is least along
            it; with a head that is not zero, ψ moves the outputs too far otherwise where there are few images.
        clip: largest norm of a step's gradient, or None.
        augment: see `Augmentation`. Closed-form methods average the features over "flip" and know no other.
        curvature: an estimator's name.
        draws: output gradients a sample; None for exact.
        curvature_samples: how many samples the curvature is estimated from; None for all.
        weigh_by: "tasks" or "samples".
        mean: the paper's weighted mean of new and old, or `L_data + strength·w̄·L_reg`.
        strength: λ of the quadratic baselines and LwF.
        first_order: whether the penalty has the gradient of the old loss too.
        keep_gradient: whether `predicted_increase` has it, though the penalty may not.
        head: "zero": new outputs start from zero weights. "ridge": before a task is trained its head goes to the least
            of the objective over the head alone, which squared loss has in closed form.
        adapt: "always": every task trains the backbone. "first": only the first does, later ones only bring their head
            to that least (`head="ridge"`, squared loss), and of the past only `E[zzᵀ]` is remembered, exactly. "auto":
            "first" where outputs join old ones ("class-il") and no buffer shows what they do to old inputs.
        buffer: how many past samples may be kept, 0 for none.
        balance: the paper's λ between penalty and replay.
        replay_batch: samples replayed a step.
        replay_logits: DER's α.
        replay_labels: DER++'s β; 1 for ER.
        temperature: of LwF.
        random_features: `relu(P z)` of the frozen features; closed-form methods only.
        tangent_features: of the sketched tangent space, see `TangentFeatures`; closed-form methods only.
        tangent_share: of the layers, the last so many have tangent features, unless `train` names some: the first ones
            cost the most and tell the least.
        direction: the u of the tangent features: "random", which looks at no data, or "principal" of the first batch's
            features, half a point to a point better, and from then on fixed.
        balanced: whether all classes shall weigh the same in closed form.
        ridge: strength relative to standardised features; None to choose it from the sums.
        batchnorm: "first" trains BatchNorm's statistics in the first task only, as the paper; "frozen" never.
    """

    method: str = "finetune"
    linear: bool = True
    strict: bool = False
    loss: str = "mse"
    scale: float = 15.0
    optimizer: str = "adam"
    lr: float = 1e-4
    momentum: float = 0.9
    weight_decay: float = 1e-5
    schedule: str = "constant"
    epochs: int = 5
    batch_size: int = 32
    careful: bool = False
    clip: float | None = None
    augment: str = "none"
    curvature: str = "exact-tk"
    draws: int | None = 1
    curvature_samples: int | None = None
    weigh_by: str = "tasks"
    mean: bool = True
    strength: float = 1.0
    first_order: bool = False
    keep_gradient: bool = False
    head: str = "zero"
    adapt: str = "always"
    buffer: int = 0
    balance: float = 0.5
    replay_batch: int = 32
    replay_logits: float = 0.0
    replay_labels: float = 1.0
    temperature: float = 2.0
    random_features: int = 0
    tangent_features: int = 0
    tangent_share: float = 1.0
    direction: str = "random"
    balanced: bool = False
    ridge: float | None = None
    batchnorm: str = "first"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, default in _DEFAULTS.items():
            _check_type(name, getattr(self, name), default)
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(repr, accepted))}."
                )
        for name in ("lr", "scale", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        for name in ("epochs", "batch_size", "replay_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("buffer", "random_features", "tangent_features", "weight_decay", "strength", "momentum"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum}; it must be below 1.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}; it must be positive, or None.")
        for name in ("draws", "curvature_samples"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value}; it must be a whole number from 1 on, or None for all.")
        if not 0 < self.tangent_share <= 1:
            raise ValueError(f"tangent_share is {self.tangent_share}; it must lie above 0, and at most at 1.")
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance is {self.balance}; it must lie between 0 and 1.")
        if self.strict and not self.linear:
            raise ValueError("strict=True needs linear=True.")
        if self.strict and (self.head == "zero" or self.method not in ("finetune", "quadratic")):
            raise ValueError("strict=True needs head='ridge', through which the backbone acts, and no LwF or replay.")
        if self.adapt == "first" and not self._knows_least_head:
            raise ValueError(
                'adapt="first" needs method="quadratic" with factors, head="ridge", loss="mse" and strict=False.'
            )

    def with_settings(self, settings: dict[str, Any]) -> Recipe:
        """The recipe with some fields changed.

        Raises:
            ValueError: when a setting is unknown.
        """
        for name in settings:
            check_name("setting", name, self.__dataclass_fields__)
        return replace(self, **settings)

    @property
    def _knows_least_head(self) -> bool:
        """Whether a head, with all that is remembered of it, is brought to its least in closed form."""
        whole = self.curvature not in ("diagonal", "mas", "dense")  # these do not remember a head by `E[zzᵀ]`
        linear = self.loss == "mse" and not self.strict
        return self.method == "quadratic" and self.head == "ridge" and whole and linear

    def adapts_once(self, scenario: Scenario) -> bool:
        """Whether the backbone is trained in the first task only."""
        unseen = scenario == "class-il" and not self.buffer
        return self.adapt == "first" or (self.adapt == "auto" and unseen and self._knows_least_head)

    def make_loss(self) -> Loss:
        """The loss it names."""
        return ScaledMSE(self.scale) if self.loss == "mse" else LOSSES[self.loss]()

    def make_method(self, scenario: Scenario) -> Method:
        """A fresh method, without a memory yet.

        Raises:
            ValueError: when the method is not defined in the scenario.
        """
        if self.strict and scenario == "class-il":  # a new output's W0 would be fixed without regard to the old ones
            raise ValueError("strict=True is for 'data-il' and 'task-il', where heads do not grow.")
        if self.method == "quadratic":
            # a buffer belongs to class-incremental learning; elsewhere the paper's method has none
            keep = self.buffer and scenario == "class-il"
            return Quadratic(
                self.curvature,
                include_head=scenario != "task-il",
                weigh_by=self.weigh_by,
                mean=self.mean,
                strength=self.strength,
                first_order=self.first_order,
                keep_gradient=self.keep_gradient,
                draws=self.draws,
                curvature_samples=self.curvature_samples,
                buffer=Buffer(self.buffer) if keep else None,
                balance=self.balance,
                replay_batch=self.replay_batch,
            )
        if self.method == "lwf":
            return LwF(self.strength, self.temperature)
        if self.method == "replay":
            if self.buffer < 1:
                raise ValueError("replay needs buffer= at least 1.")
            return Replay(Buffer(self.buffer), self.replay_logits, self.replay_labels, self.replay_batch)
        if self.method == "ridge":
            return Ridge(self.ridge, self.weigh_by, self.scale, self.balanced)
        return Finetune()


def named_recipe(name: str, settings: dict[str, Any]) -> Recipe:
    """A recipe by its name, with some fields changed.

    Raises:
        ValueError: when the name or a setting is unknown.
    """
    check_name("method", name, RECIPES)
    return RECIPES[name].with_settings(settings)


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known, and say which is near.

    Raises:
        ValueError: when it is not among `known`.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise ValueError(f"unknown {kind} {name!r}; {hint}: {', '.join(known)}.")


def _check_type(name: str, value: Any, default: Any) -> None:
    """A setting is of its default's kind; where that is None, a number or None."""
    kind = {bool: "true or false", int: "an integer", float: "a finite number", str: "a word"}.get(
        type(default), "a finite number or None"
    )
    number = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    fits = {
        bool: isinstance(value, bool),
        int: number and isinstance(value, int),
        float: number,
        str: isinstance(value, str),
    }.get(type(default), number or value is None)
    if not fits:
        raise ValueError(f"{name} is {value!r}; it must be {kind}.")


_CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("finetune", "quadratic", "lwf", "replay", "ridge"),
    "loss": tuple(LOSSES),
    "optimizer": ("adam", "sgd"),
    "schedule": ("constant", "cosine"),
    "weigh_by": ("tasks", "samples"),
    "head": ("zero", "ridge"),
    "adapt": ("always", "first", "auto"),
    "batchnorm": ("first", "frozen"),
    "direction": ("random", "principal"),
}

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Recipe)}

_NONLINEAR = Recipe(linear=False, loss="cross-entropy", optimizer="sgd", lr=1e-3)
_BASELINE = replace(_NONLINEAR, method="quadratic", mean=False)
_REPLAY = replace(_NONLINEAR, method="replay", buffer=500)
_FROZEN = Recipe(method="ridge", linear=False, weigh_by="samples", batchnorm="frozen", batch_size=256)
_DLCFT = Recipe(method="quadratic", curvature="exact-tk", head="ridge", adapt="auto", careful=True, keep_gradient=True)

RECIPES: dict[str, Recipe] = {
    # the paper's nonlinear baselines
    "none": _NONLINEAR,
    "joint": _NONLINEAR,
    "lwf": replace(_NONLINEAR, method="lwf"),
    "ewc": replace(_BASELINE, curvature="diagonal"),
    "mas": replace(_BASELINE, curvature="mas"),
    "osla": replace(_BASELINE, curvature="kfac"),
    "er": _REPLAY,
    "der": replace(_REPLAY, replay_logits=0.3, replay_labels=0.0),
    "derpp": replace(_REPLAY, replay_logits=0.1, replay_labels=0.5),
    # the paper's own, to the letter: a buffer of 500 in class-incremental learning
    "dlcft-paper": Recipe(method="quadratic", curvature="tkfac", buffer=500),
    # ours, and its parts
    "dlcft": _DLCFT,
    "dlcft-diagonal": replace(_DLCFT, curvature="diagonal"),
    "dlcft-kfac": replace(_DLCFT, curvature="kfac"),
    "dlcft-tkfac": replace(_DLCFT, curvature="tkfac"),
    "dlcft-ekfac": replace(_DLCFT, curvature="exact-ekfac"),
    "dlcft-replay": replace(_DLCFT, buffer=500),
    "none-linear": replace(_DLCFT, method="finetune"),
    "joint-linear": replace(_DLCFT, method="finetune"),
    # frozen features, closed form
    "ridge": _FROZEN,
    "ranpac": replace(_FROZEN, random_features=4000),
    "tangent": replace(_FROZEN, tangent_features=5120, tangent_share=0.5),
    # 0.2 GB of sums, seconds to solve
    "dlcft-exact": replace(_FROZEN, tangent_features=4096, tangent_share=0.5, random_features=1024),
}
