"""How commands open a model directory, or make one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcft.cli.arguments import FAILURES, import_own, in_number

if TYPE_CHECKING:
    from dlcft.data.samples import Samples
    from dlcft.learner.learner import Learner
    from dlcft.store.manifest import Version
    from dlcft.store.store import Store


@dataclass(frozen=True)
class First:
    """Options of the first update: see `dlcft update --help`."""

    backbone: str | None = None
    weights: str | None = None
    method: str | None = None
    train: list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    resize: str | None = None
    modules: tuple[str, ...] = ()

    def import_modules(self) -> None:
        """Import the modules of a user's own method and curvature, which the user has named."""
        named = [self.method, self.settings.get("curvature")]
        import_own([*self.modules, *(name for name in named if isinstance(name, str) and ":" in name)])

    def given(self) -> list[str]:
        """The options that were given."""
        options: dict[str, Any] = {"--backbone": self.backbone, "--weights": self.weights, "--method": self.method}
        options |= {"--train": self.train, "--set": self.settings, "--resize": self.resize}
        return [name for name, value in options.items() if value]

    def changed(self, header: Mapping[str, Any]) -> list[str]:
        """The options that were given and are not those of the first update."""
        notes, parts = header["notes"], [part for part in header["recipe"].values() if isinstance(part, Mapping)]
        settings = {name: value for part in parts for name, value in part.items()} or header["recipe"]
        backbone = notes.get("backbone") or {}
        same = {
            "--backbone": self.backbone == backbone.get("name"),
            "--weights": True,  # they may have been moved; that they are the same is checked
            "--method": self.method == notes.get("method"),
            "--train": self.train == notes.get("train"),
            "--resize": self.resize == (header["preprocess"] or {}).get("resize", "stretch"),
            "--set": all(name in settings and settings[name] == value for name, value in self.settings.items()),
        }
        return [option for option in self.given() if not same[option]]


def open_store(model: Path) -> Store:
    """The store of a model that exists."""
    from dlcft.learner.state import check_header
    from dlcft.store.store import Store

    store = Store(model)
    if store.current is None:
        raise ValueError(f"{model} holds no model; dlcft update --model {model} --data … makes one.")
    check_header(store.current.header, model)
    return store


def store_to_update(model: Path) -> Store:
    """The store of a model, or of one to be made."""
    from dlcft.store.store import Store

    if model.exists() and not model.is_dir():
        raise ValueError(f"--model is {model}, which is a file; a directory is needed, or a path where none is yet.")
    return Store(model)


def open_learner(
    store: Store, version: int | None = None, *, backbone: str | None = None, weights: str | None = None
) -> Learner:
    """The learner that a directory holds, see `dlcft.load`; with a version, bound to no directory."""
    from dlcft.backbones.opening import load

    return load(store, backbone=backbone, weights=weights, version=version)


def open_or_create(store: Store, first: First, *, bound: bool = True) -> Learner:
    """The learner that a directory holds, or a new one; bound to that directory, or to none."""
    from dlcft.backbones.opening import built
    from dlcft.learner.state import check_header

    model, current = store.directory, store.current
    if current is not None:
        check_header(current.header, model)
    if current is None and (strangers := store.strangers()):
        raise ValueError(f"--model is {model}, which holds {strangers[0]} and no model; an empty directory is needed.")
    if current is None or not current.header["tasks"]:
        return _new(store, first, current, bound)
    version = None if bound else current.number
    again = set(first.given()) <= {"--backbone", "--weights"}
    if current.header["notes"].get("backbone") is None and first.backbone and again:
        learner = built(store, {"name": first.backbone, "weights": first.weights}, version=version)
        learner.notes["backbone"] = {"name": first.backbone, "weights": first.weights}
        return learner
    if given := first.changed(current.header):
        tasks = in_number(current.header["tasks"], "task")
        raise ValueError(f"{given[0]} is for the first update, and {model} has learned {tasks}; leave it out.")
    return open_learner(store, version, backbone=first.backbone, weights=first.weights)


def _new(store: Store, first: First, begun: Version | None, bound: bool) -> Learner:
    from dlcft.backbones import load_backbone
    from dlcft.backbones.opening import built
    from dlcft.learner.build import fingerprint
    from dlcft.learner.learner import Learner
    from dlcft.methods.recipes import named_recipe

    method = first.method or "dlcft-exact"
    named_recipe(method, first.settings)  # reject a wrong setting before a network is loaded
    found = load_backbone(first.backbone or "shipped", weights=first.weights)
    again = load_backbone(**found.rebuild) if ":" in found.rebuild["name"] else found
    if fingerprint(again.module) != fingerprint(found.module):
        other = f"--backbone is {first.backbone}, which makes a network with other weights each time"
        raise ValueError(f"{other}; let it load them, or give --weights.")
    preprocess = found.preprocess
    if first.resize is not None and preprocess.size is None:
        name = found.rebuild["name"]
        raise ValueError(
            f"--resize is {first.resize}, and the backbone {name!r} takes inputs of any size; leave it out."
        )
    if first.resize is not None:
        preprocess = replace(preprocess, resize=first.resize)
    reading: dict[str, Any] = {"preprocess": preprocess, "tokenizer": found.tokenizer}
    learner = Learner(found.module, method, train=first.train, **reading, **first.settings)
    learner.notes |= {"backbone": found.rebuild, "method": method, "train": first.train}
    if begun is None:
        return learner
    # a first update was killed: the same command goes on with it
    if begun.header["notes"].get("backbone") != learner.notes["backbone"]:
        raise ValueError(f"{store.directory} holds a first update on another backbone; give that, or delete it.")
    known = built(store, found.rebuild, version=None if bound else begun.number)
    if (known.recipe.to_dict(), known.notes) != (learner.recipe.to_dict(), learner.notes):
        begun_otherwise = f"{store.directory} holds a first update that was interrupted, with other settings"
        raise ValueError(f"{begun_otherwise}; give these, or delete it.")
    return known


@contextmanager
def nothing_left_behind(model: Path, learner: Learner) -> Iterator[None]:
    """A first update that fails removes its files; one that is interrupted may be continued."""
    from dlcft.network import workers
    from dlcft.store.store import Store

    there, begun = model.exists(), learner.directory is not None
    try:
        yield
    except FAILURES:
        goes_on = learner.tasks and learner.directory is not None  # all was trained, and that is noted
        if not begun and not goes_on and model.exists() and workers.place() == 0:
            with suppress(OSError):
                Store(model).abandon(learner.saved_hash)
                if not there:
                    model.rmdir()
        raise


@contextmanager
def going_on() -> Iterator[None]:
    """Say, when an update is interrupted, what becomes of it."""
    try:
        yield
    except KeyboardInterrupt as error:
        later = "the same command goes on from what was noted last (every 20 seconds), or says that all was learned"
        raise KeyboardInterrupt(later) from error


def unbound(model: Path, first: First, data: Path) -> tuple[Learner, Samples]:
    """The learner before an update, bound to no directory, and its new data."""
    first.import_modules()
    learner = open_or_create(store_to_update(model), first, bound=False)
    return learner, learner.samples(data)
