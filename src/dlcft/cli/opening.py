"""How commands open a model directory, or make one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcft.cli.arguments import FAILURES, in_number

if TYPE_CHECKING:
    from dlcft.data.samples import Samples
    from dlcft.learner.learner import Learner
    from dlcft.store.store import Version


@dataclass(frozen=True)
class First:
    """What is given at the first update: see `dlcft update --help`."""

    backbone: str | None = None
    weights: str | None = None
    method: str | None = None
    train: list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def given(self) -> list[str]:
        """The options that were given."""
        options: dict[str, Any] = {"--backbone": self.backbone, "--weights": self.weights, "--method": self.method}
        options |= {"--train": self.train, "--set": self.settings or None}
        return [name for name, value in options.items() if value is not None]


def open_store(model: Path) -> Any:
    """The versions of a model.

    Raises:
        ValueError: when there is none.
    """
    from dlcft.store.store import Store

    store = Store(model)
    if store.current is None:
        raise ValueError(f"{model} holds no model; dlcft update --model {model} --data … makes one.")
    return store


def open_learner(model: Path, version: int | None = None) -> Learner:
    """The learner that a directory holds; with a version, bound to no directory.

    Raises:
        ValueError: when there is none, or it does not say how its backbone is made.
    """
    header = open_store(model).current.header
    if not header["tasks"]:
        raise ValueError(f"{model} holds a first update that was interrupted; give the same dlcft update once more.")
    rebuild = header["notes"].get("backbone")
    if rebuild is None:
        raise ValueError(
            f"{model} was saved from Python and does not say how its backbone is made; load it there, or give "
            "dlcft update --backbone once."
        )
    return _loaded(model, rebuild, version)


def open_or_create(model: Path, first: First, *, bound: bool = True) -> Learner:
    """The learner that a directory holds, or a new one; bound to that directory, or to none.

    Raises:
        ValueError: when what is for the first update is given again.
    """
    from dlcft.store.store import Store

    if model.exists() and not model.is_dir():
        raise ValueError(f"--model is {model}, which is a file; a directory is needed, or a path where none is yet.")
    store = Store(model)
    current, strangers = store.current, store.strangers()
    if current is None and strangers:
        raise ValueError(f"--model is {model}, which holds {strangers[0]} and no model; an empty directory is needed.")
    if current is None or not current.header["tasks"]:
        return _new(model, first, current, bound)
    version, given = None if bound else current.number, first.given()
    if current.header["notes"].get("backbone") is None and first.backbone and set(given) <= {"--backbone", "--weights"}:
        learner = _loaded(model, {"name": first.backbone, "weights": first.weights}, version)
        learner.notes["backbone"] = {"name": first.backbone, "weights": first.weights}
        return learner
    if given:
        tasks = in_number(current.header["tasks"], "task")
        raise ValueError(f"{given[0]} is for the first update, and {model} has learned {tasks}; leave it out.")
    return open_learner(model, version)


def _new(model: Path, first: First, begun: Version | None, bound: bool) -> Learner:
    from dlcft.backbones import load_backbone
    from dlcft.learner.build import fingerprint
    from dlcft.learner.learner import Learner
    from dlcft.methods.recipes import named_recipe

    method = first.method or "dlcft-exact"
    recipe = named_recipe(method, first.settings)
    found = load_backbone(first.backbone or "shipped", weights=first.weights)
    again = load_backbone(**found.rebuild) if ":" in found.rebuild["name"] else found
    if fingerprint(again.module) != fingerprint(found.module):
        raise ValueError(
            f"--backbone is {first.backbone}, which makes a network with other weights each time; let it load them, or "
            "give --weights."
        )
    reading: dict[str, Any] = {"preprocess": found.preprocess, "tokenizer": found.tokenizer}
    learner = Learner(found.module, recipe, train=first.train, **reading)
    learner.notes |= {"backbone": found.rebuild, "method": method, "train": first.train}
    if begun is None:
        return learner
    # a first update was killed: the same command goes on with it
    known = _loaded(model, begun.header["notes"]["backbone"], None if bound else begun.number)
    if (known.recipe, known.notes) != (learner.recipe, learner.notes):
        raise ValueError(
            f"{model} holds a first update that was interrupted, with other settings; give these, or delete it."
        )
    return known


def _loaded(model: Path, rebuild: dict[str, Any], version: int | None) -> Learner:
    from dlcft.backbones import load_backbone
    from dlcft.learner.learner import Learner

    found = load_backbone(**rebuild)
    return Learner.load(model, found.module, version=version, tokenizer=found.tokenizer)


@contextmanager
def nothing_left_behind(model: Path, learner: Learner) -> Iterator[None]:
    """A first update that fails leaves nothing that it has made; one that is interrupted may be continued."""
    from dlcft.store.store import Store

    there, begun = model.exists(), learner.directory is not None
    try:
        yield
    except FAILURES:
        goes_on = learner.tasks and learner.directory is not None  # all was trained, and that is noted
        if not begun and not goes_on and model.exists():
            with suppress(OSError):
                Store(model).abandon(learner.saved_hash)
                if not there:
                    model.rmdir()
        raise


def unbound(model: Path, first: First, data: Path) -> tuple[Learner, Samples]:
    """The learner as an update finds it, bound to no directory, and what it would learn."""
    learner = open_or_create(model, first, bound=False)
    return learner, learner.samples(data)
