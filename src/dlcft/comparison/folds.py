"""Some of a user's samples, and their parts for cross-validation: every class in proportion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dlcft.data.labels import Label

_LEAST = 2  # of a class, to learn one and test on the other


def chosen(labels: Sequence[Label], most: int, *, seed: int = 0) -> Tensor:
    """The positions, in order, of at most `most` samples: classes keep their shares, and two samples if they have them.

    There are more where twice the number of classes is more.
    """
    ranks = _ranks(labels, seed)
    counts = Counter(labels)
    shares = torch.tensor([rank / counts[label] for rank, label in zip(ranks.tolist(), labels, strict=True)])
    needed = ranks < _LEAST
    order = shares.masked_fill(needed, -1.0).argsort(stable=True)
    return order[: max(most, int(needed.sum()))].sort().values


def split(labels: Sequence[Label], most: int, *, seed: int = 0) -> Tensor:
    """The fold of each sample, from 0; −1 for the only sample of a class, which is always learned and never tested.

    A class is spread over all folds, or over as many as it has samples: while one of its samples is tested, others are
    learned. There are at most `most` folds, and no more than the largest class has samples.

    Raises:
        ValueError: when there is one class, or no class has two samples.
    """
    counts = Counter(labels)
    largest = max(counts.values())
    if len(counts) < 2 or largest < _LEAST:
        said = f"{len(counts)} label{'s' if len(counts) != 1 else ''} with at most {largest} of each"
        raise ValueError(f"the data has {said}; two labels, and two samples of one of them, are needed to compare.")
    folds = min(most, largest)
    places = {label: place for place, label in enumerate(counts)}
    ranks = _ranks(labels, seed)
    tested = [index for index, label in enumerate(labels) if counts[label] >= _LEAST]
    tested.sort(key=lambda index: (places[labels[index]], int(ranks[index])))
    found = torch.full((len(labels),), -1)
    found[tested] = torch.arange(len(tested)) % folds
    return found


def _ranks(labels: Sequence[Label], seed: int) -> Tensor:
    """The place of each sample among those of its class, in a random order."""
    seen: Counter[Label] = Counter()
    ranks = torch.zeros(len(labels), dtype=torch.int64)
    for index in torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist():
        ranks[index] = seen[labels[index]]
        seen[labels[index]] += 1
    return ranks
