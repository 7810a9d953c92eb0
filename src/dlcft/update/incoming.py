"""A look at a new batch before it is learned: what the version in use answers, label by label.

A batch whose labels are wrong, such as two swapped folders, costs little accuracy at first and is easily overlooked
afterwards. Here it is plain: the old version answers its samples mostly as another label.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dlcft.data.labels import Label
from dlcft.data.samples import Samples
from dlcft.learner.learner import Learner
from dlcft.update.forecast import TEST_BATCH

MOST = 100  # samples of a label that are looked at: more would hardly tell more
# standard errors by which another answer must come before the label's own: of one label, and of those in a ring
_ALONE, _IN_A_RING = 2.5, 2.0


@dataclass(frozen=True)
class Incoming:
    """The answers to a batch's samples of one known label, before the batch is learned.

    Attributes:
        label: the label that they are given with.
        samples: how many there are.
        looked_at: how many of them were looked at, evenly from first to last; see `MOST`.
        same: how many of these are answered as their label.
        other: the most frequent other answer; None where there is none.
        as_other: how many are answered so.
        doubtful: whether that is so often that the label may be wrong, see `doubted`.
    """

    label: str
    samples: int
    looked_at: int
    same: int
    other: str | None
    as_other: int
    doubtful: bool


def look_at(learner: Learner, samples: Samples) -> list[Incoming]:
    """The answers to the samples of known labels, doubtful labels first; one forward pass over at most `MOST` each.

    Args:
        learner: before it learns them.
        samples: the new batch.
    """
    known = set(learner.labels()) if learner.tasks and not learner.method.empty else set()
    places: dict[Label, list[int]] = {}
    for place, label in enumerate(samples.labels):
        if label in known:
            places.setdefault(label, []).append(place)
    if not places:
        return []
    chosen = [place for found in places.values() for place in _evenly(found)]
    names, part = learner.labels(), samples.part(torch.tensor(chosen))
    answers = [names[index] for index in learner.outputs(part, batch_size=TEST_BATCH).argmax(1).tolist()]
    counted: dict[Label, Counter[Label]] = {label: Counter() for label in places}
    for label, answer in zip(part.labels, answers, strict=True):
        counted[label][answer] += 1
    doubts = doubted(counted)
    rows = []
    for label, counts in counted.items():
        other = _other(label, counts)
        often = 0 if other is None else counts[other]
        name = None if other is None else str(other)
        total = len(places[label])
        rows.append(Incoming(str(label), total, counts.total(), counts[label], name, often, label in doubts))
    return sorted(rows, key=lambda row: (not row.doubtful, -row.as_other / row.looked_at, row.label))


def doubted(counted: dict[Label, Counter[Label]]) -> set[Label]:
    """The labels that may be wrong, given how often the samples of each are answered as what.

    One answer must come before the label itself by some standard errors of their difference, `√(both counts)`. For a
    label alone these are 2.5 (seven samples of seven), and the answer must be more than half of all. For labels that
    change places in a ring (cat for dog and dog for cat; cat, dog, owl, cat) they are 2, of their counts together: a
    weak version may take most oaks for maples, but not the maples for oaks as well.
    """
    ahead: dict[Label, Label] = {}
    for label, counts in counted.items():
        other = _other(label, counts)
        if other is not None and counts[other] > counts[label]:
            ahead[label] = other

    def errors(labels: Sequence[Label]) -> float:
        often = sum(counted[label][ahead[label]] for label in labels)
        same = sum(counted[label][label] for label in labels)
        return (often - same) / math.sqrt(often + same)

    found: set[Label] = set()
    for label, other in ahead.items():
        if errors([label]) >= _ALONE and 2 * counted[label][other] > counted[label].total():
            found.add(label)
        ring = _ring(label, ahead)
        if ring and errors(ring) >= _IN_A_RING:
            found.update(ring)
    return found


def doubts(rows: Sequence[Incoming]) -> list[str]:
    """A sentence for each doubtful label; one for two that have changed places."""
    doubtful = {row.label: row for row in rows if row.doubtful}
    sentences, told = [], set()
    for label, row in doubtful.items():
        if label in told:
            continue
        back = doubtful.get(row.other or "")
        share = f"{label} is answered as {row.other} in {_share(row)} of {row.looked_at} samples"
        if back is not None and back.other == label:
            told.add(back.label)
            also = f"{back.label} as {label} in {_share(back)} of {back.looked_at}"
            sentences.append(f"{share}, and {also}: are these two labels swapped?")
        else:
            sentences.append(f"{share}: are these labels right?")
    return sentences


def doubtful_share(rows: Iterable[Incoming]) -> float | None:
    """The share of the batch's samples of known labels that have a doubtful one; None where no label is known."""
    rows = list(rows)
    total = sum(row.samples for row in rows)
    return sum(row.samples for row in rows if row.doubtful) / total if total else None


def _other(label: Label, counts: Counter[Label]) -> Label | None:
    """The most frequent answer that is not the label; of equal ones the first by name."""
    others = [(-count, str(answer), answer) for answer, count in counts.items() if answer != label and count]
    return min(others, key=lambda one: one[:2])[2] if others else None


def _ring(label: Label, ahead: dict[Label, Label]) -> list[Label]:
    """The way from a label to the one that it is taken for, and on, if it comes back; else none."""
    ring = [label]
    while (following := ahead.get(ring[-1])) is not None:
        if following == label:
            return ring
        if following in ring:
            break
        ring.append(following)
    return []


def _evenly(places: list[int]) -> list[int]:
    if len(places) <= MOST:
        return places
    return [places[index * len(places) // MOST] for index in range(MOST)]


def _share(row: Incoming) -> str:
    return f"{row.as_other / row.looked_at:.0%}"
