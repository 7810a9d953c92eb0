"""Whether two learners can be merged: they must look at the same features, in the same way."""

from __future__ import annotations

from typing import Any

import torch

from dlcft.learner.build import fingerprint
from dlcft.learner.learning import Learning
from dlcft.methods.recipes import nearest_recipe
from dlcft.network.classifier import Classifier, learned_state


def check_mergeable(one: Learning, other: Learning) -> None:
    """Refuse two learners that differ in more than what they have learned.

    Raises:
        ValueError: which says in what.
    """
    if one._builder.started is not None and other._builder.started is not None:
        raise ValueError(
            "both learners hold the first task, which has trained their network (start='first-task'); merged, it "
            "would count twice."
        )
    ours, theirs = _shared(one), _shared(other)
    own, others = nearest_recipe(one.recipe), nearest_recipe(other.recipe)
    if ours != theirs and own != others:
        raise ValueError(f"the other learner has another method, {others} in place of {own}.")
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"the other learner has another {name}, {theirs.get(name)!s:.50} in place of "
                f"{ours.get(name)!s:.50}; settings, scenario, backbone, preprocessing and train= must be the same."
            )
    both = one._model is not None and other._model is not None and one.recipe.closed_form
    if both and not _same_features(one.model, other.model):
        raise ValueError(
            "the other learner has another seed or direction; both must look at the same features "
            "(direction='random' does not depend on data)."
        )


def _shared(one: Learning) -> dict[str, Any]:
    """The properties that two merged learners must share."""
    own = {"scenario": one.scenario, "backbone": one._builder.fingerprint, "preprocessing": one.preprocess}
    start = None if one._builder.started is None else fingerprint(one._builder.started)
    return {
        "method": type(one.method),
        **one.recipe.settings,
        **own,
        "train": one._builder.train,
        "network after the first task": start,
    }


def _same_features(model: Classifier, other: Classifier) -> bool:
    """Whether two classifiers look at the same features."""
    mine, theirs = learned_state(model.backbone), learned_state(other.backbone)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
