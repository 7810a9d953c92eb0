"""Figures of merit of a stream of tasks, from its accuracy matrix, and a probe of features.

`R[t, j]` is the accuracy on task j after learning task t; entries with j > t may be missing (NaN).

References:
    Lopez-Paz, Ranzato, Gradient episodic memory (2017), https://arxiv.org/abs/1706.08840
"""

from __future__ import annotations

import torch
from torch import Tensor


def average_accuracy(matrix: Tensor) -> float:
    """ACC: the mean over all tasks after the last one, `mean_j R[T, j]`."""
    return float(_checked(matrix)[-1].mean())


def backward_transfer(matrix: Tensor) -> float:
    """BWT: `mean_{j<T} (R[T, j] − R[j, j])`; 0 for a single task. Negative: something was forgotten."""
    matrix = _checked(matrix)
    if len(matrix) == 1:
        return 0.0
    return float((matrix[-1] - matrix.diagonal())[:-1].mean())


def forgetting(matrix: Tensor) -> float:
    """`mean_{j<T} (max_{t<T} R[t, j] − R[T, j])`; 0 for a single task."""
    matrix = _checked(matrix)
    if len(matrix) == 1:
        return 0.0
    best = matrix[:-1].nan_to_num(nan=-torch.inf).amax(0)
    return float((best - matrix[-1])[:-1].mean())


def recovered(method: float, none: float, joint: float) -> float:
    """How much of the distance from no memory to joint training a method recovers: `(method − none)/(joint − none)`."""
    return (method - none) / (joint - none) if joint != none else float("nan")


def nearest_neighbours(features: Tensor, labels: Tensor, queries: Tensor, k: int = 20, chunk: int = 1024) -> Tensor:
    """The label that most of the k nearest references (by cosine) have, for every query; ties go to the nearer side.

    Args:
        features: of the references, samples × features.
        labels: theirs.
        queries: features of what is asked.
        k: how many neighbours vote.
        chunk: queries at a time.
    """
    if not 1 <= k <= len(features):
        raise ValueError(f"k is {k}; it must lie between 1 and the number of references, {len(features)}.")
    classes = int(labels.max()) + 1
    references = torch.nn.functional.normalize(features, dim=1)
    found = []
    for part in torch.nn.functional.normalize(queries, dim=1).split(chunk):
        similarity, index = (part @ references.T).topk(k, 1)
        votes = torch.zeros(len(part), classes, dtype=similarity.dtype, device=similarity.device)
        # a vote weighs 1 and a little for nearness, which decides ties
        votes.scatter_add_(1, labels[index], 1 + 1e-4 * similarity)
        found.append(votes.argmax(1))
    return torch.cat(found)


def _checked(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"the accuracy matrix has shape {tuple(matrix.shape)}; tasks × tasks is needed.")
    return matrix
