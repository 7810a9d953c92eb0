"""One update of a learner that is in use: what it learned, what it cost the old, and whether it may go live."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dlcft.calibration import calibration_error, fit_temperature, probabilities
from dlcft.data import Label, Samples
from dlcft.learner import Learner


@dataclass(frozen=True)
class Update:
    """What an update did.

    Attributes:
        samples: how many were learned.
        new_labels: labels that were not known before.
        predicted_increase: of the old data's mean loss, by the memory alone; None where there is nothing old.
        accuracy: on the held-out samples; None without them.
        accuracy_before: of the version before, on those whose label it knew.
        drop: by how much the accuracy on those fell.
        flips: the share of them that turned from right to wrong.
        per_class: for each label of the held-out samples, how many of how many are right.
        temperature: that makes outputs into probabilities, fitted on the held-out samples.
        calibration_error: of these probabilities, on the same samples.
        accepted: whether the new version is current.
        version: its number.
        seconds: to learn it.
    """

    samples: int
    new_labels: list[Label]
    predicted_increase: float | None
    accuracy: float | None
    accuracy_before: float | None
    drop: float | None
    flips: float | None
    per_class: dict[str, tuple[int, int]]
    temperature: float | None
    calibration_error: float | None
    accepted: bool
    version: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def update(
    learner: Learner,
    data: Any,
    *,
    directory: str | os.PathLike[str] | None = None,
    holdout: Any = None,
    max_drop: float | None = None,
    max_flips: float | None = None,
    keep: int = 2,
) -> Update:
    """Learn new data and save the result where the learner lives.

    Args:
        learner: one that was saved or loaded, or a new one.
        data: see `Samples`.
        directory: where a new one shall live.
        holdout: labelled samples that are never learned, to test old and new on.
        max_drop: the new version is kept but not made current when the accuracy on held-out samples falls by more.
        max_flips: the same when a larger share of them turns from right to wrong.
        keep: how many versions stay.

    Raises:
        ValueError: when a gate is given without held-out samples.
    """
    if holdout is None and (max_drop is not None or max_flips is not None):
        raise ValueError("max_drop and max_flips need holdout samples to be measured on.")
    samples = learner.samples(data)
    held_out = None if holdout is None else learner.samples(holdout)
    if directory is not None and not learner.tasks and learner.method.trains:
        learner.save(directory)  # so that training, which may take long, can be continued after a kill
    known = set(learner.labels()) if learner.tasks else set()
    before = answers(learner, held_out) if held_out is not None and learner.tasks else None
    started = time.perf_counter()
    learner.learn(samples)
    seconds = time.perf_counter() - started
    facts: dict[str, Any] = {"accuracy": None, "accuracy_before": None, "drop": None, "flips": None, "per_class": {}}
    facts |= {"temperature": None, "calibration_error": None}
    if held_out is not None:
        facts |= _compared(learner, held_out, before, known)
        learner.notes["temperature"] = facts["temperature"]
        learner.notes["calibration_error"] = facts["calibration_error"]
    accepted = not (_past(facts["drop"], max_drop) or _past(facts["flips"], max_flips))
    increase = learner.predicted_increase()
    version = learner.save(directory, keep=keep, current=accepted)
    new = [label for label in learner.labels() if label not in known]
    return Update(len(samples), new, increase, accepted=accepted, version=version, seconds=seconds, **facts)


def answers(learner: Learner, samples: Samples) -> list[Label]:
    """What the learner says of each sample."""
    names = learner.labels()
    return [names[index] for index in learner.outputs(samples).argmax(1).tolist()]


def _compared(learner: Learner, held_out: Samples, before: list[Label] | None, known: set[Label]) -> dict[str, Any]:
    outputs = learner.outputs(held_out)
    names = learner.labels()
    now = [names[index] for index in outputs.argmax(1).tolist()]
    right = [a == label for a, label in zip(now, held_out.labels, strict=True)]
    totals = Counter(held_out.labels)
    hits = Counter(label for label, hit in zip(held_out.labels, right, strict=True) if hit)
    facts: dict[str, Any] = {
        "accuracy": sum(right) / len(right),
        "per_class": {str(label): (hits[label], totals[label]) for label in sorted(totals, key=str)},
        **_calibrated(outputs, held_out.labels, names),
    }
    old = [index for index, label in enumerate(held_out.labels) if label in known]
    if before is not None and old:
        was = [before[index] == held_out.labels[index] for index in old]
        facts["accuracy_before"] = sum(was) / len(old)
        facts["drop"] = facts["accuracy_before"] - sum(right[index] for index in old) / len(old)
        facts["flips"] = sum(w and not right[index] for w, index in zip(was, old, strict=True)) / len(old)
    return facts


def _calibrated(outputs: Tensor, labels: list[Label], names: list[Label]) -> dict[str, float | None]:
    places = {name: index for index, name in enumerate(names)}
    seen = [index for index, label in enumerate(labels) if label in places]
    if not seen:
        return {"temperature": None, "calibration_error": None}
    y = torch.tensor([places[labels[index]] for index in seen])
    temperature = fit_temperature(outputs[seen], y)
    error = calibration_error(probabilities(outputs[seen], temperature), y)
    return {"temperature": temperature, "calibration_error": error}


def _past(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit
