"""Which of several methods to take, from their answers to the same samples: a rule that can be said in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RULE = (
    "the closed-form method that is smallest on disk among those within one standard error (of the paired difference) "
    "of the most accurate one; a trained method only if it is ahead of all of these by more than two"
)
DEFAULT = "dlcft-exact"
_CLOSED, _TRAINED = 1.0, 2.0  # standard errors
_ALIKE = 1.01  # sizes that differ by less are the same


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of a method.

    Attributes:
        right: for each sample whether the answer was right; anything where it was not tested.
        tested: which samples were.
        bytes: on disk.
        closed_form: whether it was solved, not trained.
    """

    right: Tensor
    tested: Tensor
    bytes: int
    closed_form: bool


def weights(classes: Tensor, *, balanced: bool) -> Tensor:
    """How much each sample counts: the same; or each class the same."""
    if not balanced:
        return torch.ones(len(classes), dtype=torch.float64)
    return 1 / torch.bincount(classes).double()[classes]


def share_right(one: Answers, weight: Tensor) -> tuple[float, float]:
    """The weighted share of right answers, and its standard error."""
    return _mean(one.right[one.tested].double(), weight[one.tested])


def ahead(one: Answers, other: Answers, weight: Tensor) -> tuple[float, float]:
    """By how much the first is more accurate, on samples that both were tested on; and the standard error of that.

    The samples are the same, so that what is hard for both is no part of the error.
    """
    both = one.tested & other.tested
    return _mean(one.right[both].double() - other.right[both].double(), weight[both])


def recommended(methods: Mapping[str, Answers], weight: Tensor) -> str:
    """The name of the method that `RULE` chooses; of several of the same size the most accurate one, or the default."""
    closed = [name for name, one in methods.items() if one.closed_form]
    best = _most_accurate(methods, closed or list(methods), weight)
    near = [name for name in closed or methods if _within(methods[best], methods[name], weight, _CLOSED)]
    small = _ALIKE * min(methods[name].bytes for name in near)
    alike = [name for name in near if methods[name].bytes <= small]
    choice = max(alike, key=lambda name: (share_right(methods[name], weight)[0], name == DEFAULT))
    if not closed:
        return choice
    others = [name for name, one in methods.items() if not one.closed_form]
    better = [name for name in others if not _within(methods[name], methods[best], weight, _TRAINED)]
    return _most_accurate(methods, better, weight) if better else choice


def _most_accurate(methods: Mapping[str, Answers], names: Sequence[str], weight: Tensor) -> str:
    return max(names, key=lambda name: share_right(methods[name], weight)[0])


def _within(better: Answers, worse: Answers, weight: Tensor, errors: float) -> bool:
    """Whether the first is ahead by no more than so many standard errors."""
    difference, error = ahead(better, worse, weight)
    return difference <= errors * error


def _mean(values: Tensor, weight: Tensor) -> tuple[float, float]:
    """The weighted mean, and its standard error."""
    share = weight / weight.sum()
    mean = (share * values).sum()
    error = (share * (values - mean)).square().sum().sqrt()
    return float(mean), float(error)
