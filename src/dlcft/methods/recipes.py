"""Recipes: the paper's methods, as its authors ran them, and ours, as Model + Training + Method.

The number of epochs, the batch size, the replay batch and DER's α and β are ours: a starting point.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dlcft.methods.base import Method
from dlcft.methods.finetune import Finetune
from dlcft.methods.lwf import LwF
from dlcft.methods.quadratic import Quadratic
from dlcft.methods.replay import Replay
from dlcft.methods.ridge import Ridge
from dlcft.methods.settings import Features, Model, Network, OnePass, Reading, Scenario, Start, Training, settings_of
from dlcft.network.names import check_name, find_class, qualified

METHODS: dict[str, type[Method]] = {
    "finetune": Finetune,
    "quadratic": Quadratic,
    "lwf": LwF,
    "replay": Replay,
    "ridge": Ridge,
}
_RENAMED = {"balanced": "equal_classes", "head": "head_start"}  # since versions before 0.1.0
# names that a learner, or a saved recipe, has itself
_RESERVED = frozenset({"kind", "method", "scenario", "new_labels", "seed", "device", "amp", "train", "preprocess"})
_PARTS: dict[str, type[Any]] = {
    "network": Network,
    "features": Features,
    "training": Training,
    "one-pass": OnePass,
    "start": Start,
}


@dataclass(frozen=True)
class Recipe:
    """How a learner learns.

    Attributes:
        model: a network that is trained, or fixed features.
        training: its optimiser and schedule, or how the data is read once.
        method: the method with its settings; each learner takes a fresh copy.
        start: the network that is linearised, or whose features are taken; None where a plain network is trained.
    """

    model: Model = field(default_factory=Network)
    training: Reading = field(default_factory=Training)
    method: Method = field(default_factory=Finetune)
    start: Start | None = None

    def __post_init__(self) -> None:
        """Give a linearised network, and fixed features, a start; a plain network has none."""
        if self.start is None and (self.linear or self.closed_form):
            object.__setattr__(self, "start", Start())
        if self.start is not None and not (self.linear or self.closed_form):
            if self.start.start == "first-task":
                raise ValueError(f"start={self.start.start!r} is for linearised networks and closed form.")
            object.__setattr__(self, "start", None)
        _check_fields(self.method, [name for part in self._parts.values() for name in settings_of(part)])

    @property
    def closed_form(self) -> bool:
        """Whether it is solved on fixed features instead of trained."""
        return isinstance(self.model, Features)

    @property
    def linear(self) -> bool:
        """Whether it trains a linearised network."""
        return isinstance(self.model, Network) and self.model.linear

    def first_task(self, scenario: Scenario) -> Recipe | None:
        """The recipe that trains the plain network on the first task; None where the start is the pre-trained one."""
        if self.start is None or self.start.start == "pretrained":
            return None
        if self.start.start == "auto" and scenario == "class-il":
            return None
        plain = Network(linear=False, loss="cross-entropy")
        return Recipe(plain, self.start.training(self.training), Finetune())

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: value for part in self._parts.values() for name, value in settings_of(part).items()}

    def with_settings(self, settings: Mapping[str, Any], name: str = "this method") -> Recipe:
        """The recipe, called `name`, with some settings changed.

        Raises:
            ValueError: when it has no such setting, or not with that value.
        """
        known = list(self.settings)
        for setting in settings:
            if setting not in known:
                near = [_RENAMED[setting]] if _RENAMED.get(setting) in known else []
                near = near or difflib.get_close_matches(setting, known, n=1)
                hint = f"did you mean {near[0]!r}? It has" if near else "it has"
                raise ValueError(f"{name} has no setting {setting!r}; {hint} {', '.join(known)}.")
        changed = {
            place: replace(part, **{name: settings[name] for name in settings_of(part) if name in settings})
            for place, part in self._parts.items()
        }
        return Recipe(**changed)

    def make_method(self, scenario: Scenario) -> Method:
        """A fresh method, bound to a scenario.

        Raises:
            ValueError: when the method cannot work on this model, or in this scenario.
        """
        strict = isinstance(self.model, Network) and self.model.strict
        if strict and scenario == "class-il":  # a new output's W0 would be fixed without regard to the old ones
            raise ValueError("strict=True is for 'data-il' and 'task-il', where heads do not grow.")
        if strict and self.settings["head_start"] != "ridge":
            raise ValueError("strict=True needs head_start='ridge', through which the backbone acts.")
        method = replace(self.method)
        method.bind(scenario, self.model, self.training)
        return method

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it: each part by its kind and its settings."""
        return {place: {"kind": _kind_of(part), **settings_of(part)} for place, part in self._parts.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_dict`; also reads the flat settings of versions before 0.1.0.

        Raises:
            ValueError: when a kind or setting is unknown.
        """
        if not isinstance(content["method"], Mapping):
            return _from_flat(content)
        parts = {place: dict(part) for place, part in content.items()}
        kinds = {place: part.pop("kind") for place, part in parts.items()}
        method = _made(find_class("method", kinds.pop("method"), METHODS, Method), parts.pop("method"))
        return cls(method=method, **{place: _PARTS[kind](**parts[place]) for place, kind in kinds.items()})

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "training": self.training, "method": self.method, "start": self.start}
        return {place: part for place, part in parts.items() if part is not None}


def named_recipe(name: str, settings: Mapping[str, Any]) -> Recipe:
    """A recipe by its name, with some settings changed.

    Args:
        name: in `RECIPES`, or `module:Name` of a `Method` of one's own, which trains a linearised network by default.
        settings: by name.

    Raises:
        ValueError: when the name or a setting is unknown.
    """
    if ":" in name:
        kind = find_class("method", name, METHODS, Method)
        own = {field.name: settings[field.name] for field in fields(kind) if field.name in settings}
        return own_recipe(_made(kind, own)).with_settings(settings, name)
    if name.startswith("joint"):
        raise ValueError(f"unknown method {name!r}; joint training is 'none' on all data at once (dlcft run --joint).")
    check_name("method", name, RECIPES)
    return RECIPES[name].with_settings(settings, name)


def nearest_recipe(recipe: Recipe) -> str:
    """The name of the recipe that one is, or comes nearest to: a number counts as set or not, whatever its value."""

    def kinds(one: Recipe) -> dict[str, Any]:
        numbers = {name: bool(v) if isinstance(v, int | float) else v for name, v in one.settings.items()}
        return {"method": type(one.method), **numbers}

    own = kinds(recipe)
    if type(recipe.method) not in METHODS.values():
        return qualified(type(recipe.method))

    def differences(name: str) -> int:
        other = kinds(RECIPES[name])
        return sum(own.get(key) != other.get(key) for key in own | other)

    return min(RECIPES, key=differences)


def described(recipe: Recipe) -> str:
    """A recipe as one would ask for it: the nearest one with a name, and the settings that differ."""
    name = nearest_recipe(recipe)
    known, own = (RECIPES[name].settings, recipe.settings) if name in RECIPES else ({}, settings_of(recipe.method))
    changed = (f"{key}={value!r}" for key, value in own.items() if key not in known or known[key] != value)
    return ", ".join([repr(name), *changed])


def as_recipe(method: str | Method | Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a name, a method of one's own, or a recipe, with settings changed."""
    if isinstance(method, str):
        return named_recipe(method, settings)
    if isinstance(method, type) and issubclass(method, Method):
        method = method()
    if isinstance(method, Method):
        return own_recipe(method).with_settings(settings, type(method).__name__)
    if not isinstance(method, Recipe):
        raise TypeError(f"method is {method!r}; it must be a name, a Method or a Recipe.")
    return method.with_settings(settings)


def own_recipe(method: Method) -> Recipe:
    """The recipe of a method that is given as an object: fixed features for closed form, else a linearised network."""
    if method.closed_form:
        return replace(_FROZEN, method=method)
    return Recipe(method=method)


def _made(kind: type[Method], settings: Mapping[str, Any]) -> Method:
    """A method of a class with these settings; lists, as JSON has them, become tuples."""
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})
    except TypeError as error:
        given, known = ", ".join(settings) or "none", ", ".join(field.name for field in fields(kind)) or "none"
        raise ValueError(f"{kind.__name__} cannot be made with the settings {given}; it has {known}.") from error


def _check_fields(method: Method, names: list[str]) -> None:
    """Reject a method whose settings would be lost, or be mixed up with others.

    Raises:
        ValueError: when its class is no dataclass, or a field has the name of another setting.
    """
    for kind in type(method).__mro__:
        own = vars(kind)
        if kind is Method:
            break
        if ("__init__" in own or own.get("__annotations__")) and "__dataclass_fields__" not in own:
            raise ValueError(f"{kind.__name__} is not a dataclass; decorate it with @dataclass: fields are settings.")
    taken = {name for name in names if names.count(name) > 1} | (_RESERVED & set(settings_of(method)))
    if taken:
        raise ValueError(f"{type(method).__name__} has a field {min(taken)!r}, a name that is taken; rename it.")


def _kind_of(part: Any) -> str:
    builtin = {kind: name for name, kind in (METHODS | _PARTS).items()}
    return builtin.get(type(part)) or qualified(type(part))


def _from_flat(content: Mapping[str, Any]) -> Recipe:
    """From one flat object with the settings of all methods, most without effect."""
    flat = dict(content)
    kind = METHODS[flat.pop("method")]
    if kind is LwF:
        flat["mean"] = False  # LwF had no normalised objective then
    flat = {_RENAMED.get(name, name): value for name, value in flat.items()}
    parts: tuple[type[Any], ...] = (Features, OnePass) if kind.closed_form else (Network, Training)
    model, training, method = (
        part(**{name: flat[name] for name in settings_of(part()) if name in flat}) for part in (*parts, kind)
    )
    return Recipe(model, training, method)


# the authors' training: decay to zero within a task, clipped gradients
_AUTHORS: dict[str, Any] = {"schedule": "linear", "clip": 1.0}
_PLAIN = Recipe(Network(linear=False, loss="cross-entropy"), Training(optimizer="sgd", lr=1e-3, **_AUTHORS))
_PAPER = Recipe(
    Network(),
    Training(**_AUTHORS),
    Quadratic("tkfac", damping=1e-4, curvature_augment=True, buffer=500),
    Start("auto", start_lr=1e-3),
)
_DLCFT = Recipe(
    Network(),
    Training(**_AUTHORS, head_start="ridge", careful=True),
    Quadratic("exact-tk", adapt="auto", keep_gradient=True),
    Start("auto"),
)
_FROZEN = Recipe(Features(), OnePass(), Ridge())
# small classes are not given away, see docs/experiment-log.md, "Few images of some classes"
_FAIR = replace(_FROZEN, method=Ridge(solution="shrunken-lda", equal_classes=True))
_KERNEL = Recipe(
    Features(random_features=4000, random_kind="fourier"), OnePass(), Ridge(solution="lda", equal_classes=True)
)


def _baseline(curvature: str) -> Recipe:
    """A quadratic memory of the plain network, with the paper's objective."""
    return replace(_PLAIN, method=Quadratic(curvature, damping=1e-4, curvature_augment=True))


def _dlcft(curvature: str) -> Recipe:
    """A curvature is chosen to be used: every task trains the backbone, in class-IL too."""
    return _DLCFT.with_settings({"curvature": curvature, "adapt": "always"})


RECIPES: dict[str, Recipe] = {
    # the paper's nonlinear baselines, as its authors ran them: every objective is (L_data + (t−1)·L_reg)/t
    "none": _PLAIN,
    "lwf": replace(_PLAIN, method=LwF(temperature=1.0, mean=True)),
    "ewc": _baseline("diagonal"),
    "mas": _baseline("mas"),
    "osla": _baseline("kfac"),
    "er": replace(_PLAIN, method=Replay()),
    "der": replace(_PLAIN, method=Replay(replay_logits=0.03, replay_labels=0.0)),
    "derpp": replace(_PLAIN, method=Replay(replay_logits=0.01, replay_labels=0.5)),
    # the paper's own, as its authors ran it, and its linearised network without a memory
    "dlcft-paper": _PAPER,
    "none-linear": replace(_PAPER, method=Finetune()),
    # ours, and its parts
    "dlcft": _DLCFT,
    "dlcft-diagonal": _dlcft("diagonal"),
    "dlcft-kfac": _dlcft("kfac"),
    "dlcft-tkfac": _dlcft("tkfac"),
    "dlcft-ekfac": _dlcft("exact-ekfac"),
    "dlcft-replay": _DLCFT.with_settings({"buffer": 500}),
    # frozen features, closed form
    "ridge": _FROZEN,
    "ranpac": _FROZEN.with_settings({"random_features": 4000}),
    "ncm": _FROZEN.with_settings({"solution": "ncm"}),
    # as Deep SLDA: a covariance that is shrunk by 1e-4, and no priors
    "slda": _FROZEN.with_settings({"solution": "lda", "equal_classes": True, "ridge": 1e-4}),
    "klda": _KERNEL,
    "tangent": _FAIR.with_settings({"tangent_features": 5120, "tangent_share": 0.5}),
    "depth": _FROZEN.with_settings({"depth_features": 4096}),
    # the same features, solved so that small classes are not given away; 0.1 GB of sums, seconds to solve
    "dlcft-exact": _FAIR.with_settings({"depth_features": 4096}),
}
