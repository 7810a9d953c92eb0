"""A model directory as a learner: its network is found by the name that the directory notes."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from dlcft.backbones.load import Weights, load_backbone
from dlcft.learner.learner import Learner
from dlcft.learner.state import check_header
from dlcft.store.store import Store


def load(
    directory: str | os.PathLike[str] | Store,
    *,
    backbone: str | nn.Module | None = None,
    weights: Weights = None,
    version: int | None = None,
    device: str = "auto",
) -> Learner:
    """The learner of a model directory that `dlcft update` made, with its network, preprocessing and tokenizer.

    `learn`, `save` and all commands go on with it. A name in a directory selects only networks that dlcft itself
    builds; one that imports or downloads something has to be repeated.

    Args:
        directory: where the model lives, or the `Store` there.
        backbone: its name as it was given to `dlcft update`, where that has a colon (`timm:resnet18`,
            `module:factory`); or the network itself, for a learner that was saved from Python.
        weights: where its file of weights is now, if it was moved. It must hold the same network.
        version: one that is kept there, for a look at it; by default the current one.
        device: see `Learner`.

    Raises:
        ValueError: when there is no model, or its backbone has to be given.
        FileNotFoundError: when the weights are not where they were.
        CheckpointError: when a file is damaged, foreign or newer, or the network is another one.
    """
    store = directory if isinstance(directory, Store) else Store(directory)
    model, current = store.directory, store.current
    if current is None:
        raise ValueError(f"{model} holds no model; dlcft update --model {model} --data … makes one.")
    check_header(current.header, model)
    if isinstance(backbone, nn.Module):
        return Learner.load(store, backbone, version=version, device=device)
    return built(store, noted_backbone(store, backbone), weights=weights, version=version, device=device)


def noted_backbone(store: Store, backbone: str | None = None) -> dict[str, Any]:
    """How the backbone of a model is made, as arguments of `load_backbone`; see `load`."""
    model, current = store.directory, store.current
    assert current is not None
    if not current.header["tasks"]:
        raise ValueError(f"{model} holds a first update that was interrupted; give the same dlcft update once more.")
    noted: dict[str, Any] | None = current.header["notes"].get("backbone")
    if noted is None and backbone is not None:
        return {"name": backbone}  # its weights are compared with those that were learned on
    if noted is None:
        unknown = f"{model} was saved from Python and does not say how its backbone is made"
        raise ValueError(f"{unknown}; give --backbone NAME (in Python, backbone=).")
    name = str(noted["name"])
    if ":" in name and backbone != name:
        foreign = f"{model} was made on the backbone {name!r}, whose code is not part of dlcft"
        raise ValueError(f"{foreign}; if you trust it, repeat it: --backbone {name} (in Python, backbone={name!r}).")
    if backbone is not None and backbone != name:
        raise ValueError(f"the backbone is {backbone}, and {model} was made on {name!r}; give that, or leave it out.")
    return noted


def built(
    store: Store, noted: dict[str, Any], *, weights: Weights = None, version: int | None = None, device: str = "auto"
) -> Learner:
    """The learner of a directory on the network that `noted`, the arguments of `load_backbone`, describes."""
    try:
        found = load_backbone(**(noted if weights is None else {**noted, "weights": weights}))
    except FileNotFoundError as error:
        if weights is not None or noted.get("weights") in (None, "random"):
            raise
        moved = f"the weights of {store.directory} are not at {noted['weights']} any more"
        raise FileNotFoundError(f"{moved}; say where they are, --weights FILE (in Python, weights=FILE).") from error
    learner = Learner.load(store, found.module, version=version, device=device, tokenizer=found.tokenizer)
    if weights is not None:
        learner.notes["backbone"] = found.rebuild  # the next version tells the new place
    return learner
