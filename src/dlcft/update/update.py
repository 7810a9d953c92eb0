"""One update of a learner in use: learn, test against the version before, pass the gates, save."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlcft.data.labels import Label
from dlcft.data.samples import Samples
from dlcft.learner.learner import Learner
from dlcft.learner.records import Adopted, Forgotten, Learned
from dlcft.store.store import Store, Version
from dlcft.update.calibration import calibration_bins, calibration_error, fit_temperature, probabilities
from dlcft.update.forecast import TEST_BATCH
from dlcft.update.gates import Gates, too_few
from dlcft.update.incoming import Incoming, doubtful_share, doubts, look_at

log = logging.getLogger("dlcft")
_NO_LOSS = 1e-9  # a smaller loss is none: a share of it would be no number


@dataclass(frozen=True)
class Flip:
    """A held-out sample whose answer was right before the update and is wrong now."""

    input: str
    label: str
    answer: str


@dataclass(frozen=True)
class Disk:
    """The change of the model's directory.

    Attributes:
        written: bytes of the new version.
        kept: number, bytes and time of each version that is there now, and whether it is the current one.
        removed: numbers of the versions that are there no more.
    """

    written: int
    kept: list[dict[str, Any]]
    removed: list[int]


@dataclass(frozen=True, kw_only=True)
class Update:
    """The outcome of an update.

    Attributes:
        samples: how many were learned.
        learned: how many of each label.
        new_labels: labels that were not known before.
        incoming: what the version before answered to the new samples of known labels, see `Incoming`.
        doubts: a sentence for each doubtful label, see `incoming.doubts`.
        doubtful: the share of the new samples of known labels that have a doubtful one; None where none is known.
        predicted_increase: of the old data's mean loss, by the memory alone; None where there is nothing old.
        rise: the same as a share of that loss; None where it is not known: trained methods do not remember it.
        accuracy: on the held-out samples; None without them.
        accuracy_known: on those whose label is learned by now; None if there are none.
        not_learned: the labels of the others, which count as errors in `accuracy`.
        accuracy_before: of the version before, on those whose label it knew.
        drop: by how much the accuracy on those fell.
        flips: the share of them that turned from right to wrong.
        flipped: these samples.
        per_class: for each label of the held-out samples, how many of how many are right.
        per_class_before: for each of these that was known, how many were right in the version before.
        temperature: divides outputs before the softmax, fitted on the held-out samples.
        calibration_error: of these probabilities, on the same samples.
        calibration: see `calibration_bins`, on the same samples.
        gates: a sentence for each gate that was exceeded.
        not_gated: labels with too few held-out samples for `max_drop_per_label`.
        accepted: whether the new version is current.
        version: its number.
        seconds: to learn it.
        tasks: number of samples, predicted increase, and accuracy on its own holdout, of each update so far.
        disk: see `Disk`.
    """

    samples: int
    learned: dict[str, int]
    new_labels: list[Label]
    incoming: list[Incoming] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    doubtful: float | None = None
    predicted_increase: float | None
    rise: float | None = None
    accuracy: float | None = None
    accuracy_known: float | None = None
    not_learned: list[str] = field(default_factory=list)
    accuracy_before: float | None = None
    drop: float | None = None
    flips: float | None = None
    flipped: list[Flip] = field(default_factory=list)
    per_class: dict[str, tuple[int, int]] = field(default_factory=dict)
    per_class_before: dict[str, int] = field(default_factory=dict)
    temperature: float | None = None
    calibration_error: float | None = None
    calibration: list[tuple[float, float, int]] = field(default_factory=list)
    gates: list[str]
    not_gated: list[str] = field(default_factory=list)
    accepted: bool
    version: int
    seconds: float
    tasks: list[dict[str, Any]]
    disk: Disk


def update(
    learner: Learner,
    data: Any,
    *,
    directory: str | os.PathLike[str] | None = None,
    holdout: Any = None,
    max_drop: float | None = None,
    max_drop_per_label: float | None = None,
    max_flips: float | None = None,
    max_rise: float | None = None,
    max_doubtful: float | None = None,
    keep: int = 2,
    resume: bool = True,
    cache_gb: float = 0.0,
) -> Update:
    """Learn new data and save the result where the learner lives.

    Past a gate the new version is kept, but not made current; `Gates` describes them. New samples whose labels are
    doubtful are told in the log before anything is learned.

    Args:
        learner: one that was saved or loaded, or a new one.
        data: see `Samples`.
        directory: where a new one shall live.
        holdout: labelled samples that are never learned, to test old and new on.
        max_drop: see `Gates`, like the next four.
        max_drop_per_label: of a single label.
        max_flips: from right to wrong.
        max_rise: of the old data's loss.
        max_doubtful: new samples whose label is doubtful.
        keep: how many versions stay.
        resume: see `Learner.learn`.
        cache_gb: see `Learner.learn`.

    Raises:
        ValueError: when a gate is given without held-out samples, or is no share.
    """
    gates = Gates(max_drop, max_drop_per_label, max_flips, max_rise, max_doubtful)
    gates.check(holdout=holdout is not None, closed_form=learner.recipe.closed_form)
    place = learner.directory if directory is None else directory
    if place is None:
        raise ValueError("directory is not given, and this learner was neither saved nor loaded before.")
    samples = learner.samples(data)
    held_out = None if holdout is None else learner.samples(holdout)
    if held_out is not None:
        check_labels(learner, samples, held_out, gated=gates.on_holdout)
    begun, before = learner.tasks > 0, None
    answers = begun and not learner.method.empty  # all that was learned may have been forgotten
    known = set(learner.labels()) if answers else set()
    if held_out is not None and answers:
        before = _answers(learner, learner.outputs(held_out, batch_size=TEST_BATCH))
    elif held_out is not None:  # find an unreadable image before anything is learned
        for some in torch.arange(len(held_out)).split(TEST_BATCH):
            held_out.fetch(some)
    incoming = look_at(learner, samples)
    facts: dict[str, Any] = {"incoming": incoming, "doubts": doubts(incoming), "doubtful": doubtful_share(incoming)}
    for sentence in facts["doubts"]:
        log.warning("%s", sentence)
    if learner.directory is None and not learner.recipe.closed_form:
        learner.save(place)  # so that training, which may take long, can be continued after a kill
    started = time.perf_counter()
    learner.learn(samples, resume=resume, cache_gb=cache_gb)
    learner.solve()
    seconds = time.perf_counter() - started
    if held_out is not None:
        facts |= _compared(learner, held_out, before, known)
        learner.notes |= {name: facts.get(name) for name in ("temperature", "calibration_error")}
    increase, old = learner.predicted_increase(), learner.method.old_loss()
    learner.annotate(accuracy=facts.get("accuracy"), predicted_increase=increase)
    facts["rise"] = None if increase is None or old is None else increase / max(old, _NO_LOSS)
    exceeded = gates.exceeded(facts)
    facts["not_gated"] = [] if max_drop_per_label is None else too_few(facts, map(str, known))
    there = () if learner.store is None else learner.store.look().versions
    # the version that was saved before training is none to go back to
    version = learner.save(directory, keep=keep if begun else 1, current=not exceeded)
    return Update(
        samples=len(samples),
        learned={str(label): count for label, count in Counter(samples.labels).items()},
        new_labels=[label for label in learner.labels() if label not in known],
        predicted_increase=increase,
        gates=exceeded,
        accepted=not exceeded,
        version=version,
        seconds=seconds,
        tasks=[_told(record) for record in learner.history if not isinstance(record, Forgotten)],
        disk=_changed(learner.store, there, version),
        **facts,
    )


def check_labels(learner: Learner, samples: Samples, held_out: Samples, *, gated: bool) -> None:
    """Reject a holdout without a label that will be known or, if `gated`, is known already."""
    known = set(learner.labels()) if learner.tasks else set()
    answered = known if gated and known else known | set(samples.labels)
    if answered.isdisjoint(held_out.labels):
        why = "max_drop and max_flips are measured on known labels" if gated and known else "answers are known labels"
        mine, theirs = (", ".join(map(repr, sorted(some, key=str)[:5])) for some in (set(held_out.labels), answered))
        raise ValueError(f"{why}, and the holdout has none of them: its labels are {mine} …, known ones {theirs} …")


def _answers(learner: Learner, outputs: Tensor) -> list[Label]:
    names = learner.labels()
    return [names[index] for index in outputs.argmax(1).tolist()]


def _told(record: Learned | Adopted) -> dict[str, Any]:
    increase = record.predicted_increase if isinstance(record, Learned) else None
    accuracy = record.notes.get("accuracy") if isinstance(record, Learned) else None
    return {"samples": record.samples, "predicted_increase": increase, "accuracy": accuracy}


def _compared(learner: Learner, held_out: Samples, before: list[Label] | None, known: set[Label]) -> dict[str, Any]:
    """The fields of `Update` that are measured on the holdout."""
    outputs = learner.outputs(held_out, batch_size=TEST_BATCH)
    names, labels = learner.labels(), held_out.labels
    now = _answers(learner, outputs)
    right = [answer == label for answer, label in zip(now, labels, strict=True)]
    totals, hits = Counter(labels), _counted(labels, right)
    learned = [hit for hit, label in zip(right, labels, strict=True) if label in set(names)]
    facts: dict[str, Any] = {
        "accuracy": sum(right) / len(right),
        "accuracy_known": sum(learned) / len(learned) if learned else None,
        "not_learned": [str(label) for label in sorted(totals, key=str) if label not in set(names)],
        "per_class": {str(label): (hits[label], totals[label]) for label in sorted(totals, key=str)},
        **_calibrated(outputs, labels, names),
    }
    old = [index for index, label in enumerate(labels) if label in known]
    if before is None or not old:
        return facts
    was = [answer == label for answer, label in zip(before, labels, strict=True)]
    hits_before = _counted(labels, was)
    lost = [index for index in old if was[index] and not right[index]]
    return facts | {
        "per_class_before": {str(label): hits_before[label] for label in sorted(totals, key=str) if label in known},
        "accuracy_before": sum(was[index] for index in old) / len(old),
        # of counts, so that a drop of 1 in 50 is 0.02 and not a little more
        "drop": sum(was[index] - right[index] for index in old) / len(old),
        "flips": len(lost) / len(old),
        "flipped": [Flip(held_out.name(index), str(labels[index]), str(now[index])) for index in lost],
    }


def _counted(labels: list[Label], right: list[bool]) -> Counter[Label]:
    return Counter(label for label, hit in zip(labels, right, strict=True) if hit)


def _calibrated(outputs: Tensor, labels: list[Label], names: list[Label]) -> dict[str, Any]:
    places = {name: index for index, name in enumerate(names)}
    seen = [index for index, label in enumerate(labels) if label in places]
    if not seen:
        return {}
    y = torch.tensor([places[labels[index]] for index in seen])
    temperature = fit_temperature(outputs[seen], y)
    bins = calibration_bins(probabilities(outputs[seen], temperature), y)
    return {"temperature": temperature, "calibration_error": calibration_error(bins), "calibration": bins}


def _changed(store: Store | None, there: Sequence[Version], number: int) -> Disk:
    assert store is not None
    manifest = store.look()
    kept = {v.number: v for v in manifest.versions}
    rows = [
        {"version": v.number, "bytes": v.bytes, "created": v.created, "current": v.number == manifest.number}
        for v in kept.values()
    ]
    return Disk(kept[number].bytes, rows, [v.number for v in there if v.number not in kept])
