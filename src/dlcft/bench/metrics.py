"""Figures of merit of a stream of tasks, from its accuracy matrix, and probes of features and of curvature.

`R[t, j]` is the accuracy on task j after learning task t; entries with j > t may be missing (NaN).

References:
    Lopez-Paz, Ranzato, Gradient episodic memory (2017), https://arxiv.org/abs/1706.08840
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call

from dlcft.curvature.losses import Loss
from dlcft.network.classifier import Classifier, evaluating
from dlcft.network.inputs import Input
from dlcft.network.linearize import Linearized, forward_mode_kernels

Tensors = dict[str, Tensor]
Batches = Iterable[tuple[Input, Tensor]]


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


def largest_eigenvalue(
    model: Classifier,
    batches: Batches,
    loss: Loss,
    head: str,
    *,
    iterations: int = 20,
    generator: torch.Generator | None = None,
) -> float:
    """The largest eigenvalue of the Gauss-Newton matrix (the Fisher matrix) of the mean loss, by power iteration.

    No matrix is formed: one product is a directional derivative of the outputs, the loss's Hessian in them, and a
    backward pass. The value never exceeds the true one, and rises to it with more iterations.

    Args:
        model: the classifier; its trainable parameters count, and it is left as it was.
        batches: pairs of input and label indices, gone through once an iteration.
        loss: of the outputs of `head`.
        head: a head's name.
        iterations: how many products.
        generator: where the first direction comes from.

    Raises:
        ValueError: when there is no iteration to do, or no data.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; it must be at least 1.")
    if isinstance(batches, Iterator):
        batches = list(batches)
    params = model.params(head)
    # torch's generators draw on the CPU
    image: Tensors = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in params.items()}
    value = 0.0
    with evaluating(model):
        for _ in range(iterations):
            length = _dot(image, image) ** 0.5
            if not length:
                break
            direction = {name: t / length for name, t in image.items()}
            image = _gauss_newton_product(model, batches, loss, head, direction)
            value = _dot(direction, image)
    return value


def _gauss_newton_product(model: Classifier, batches: Batches, loss: Loss, head: str, direction: Tensors) -> Tensors:
    """`E[Jᵀ H J]·direction`, with H the Hessian of the loss in the outputs."""
    params = model.params(head)
    total = {name: torch.zeros_like(t) for name, t in direction.items()}
    count = 0
    for x, labels in batches:
        change = _output_change(model, x, head, direction)
        with torch.enable_grad():
            outputs = model(x, head)
            pulled = _hessian_product(loss, outputs.detach(), labels, change)
            grads = torch.autograd.grad(outputs, list(params.values()), pulled, allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                total[name] += grad
        count += len(labels)
    if not count:
        raise ValueError("there is no data; the curvature needs at least one batch.")
    return {name: t / count for name, t in total.items()}


@torch.no_grad()
def _output_change(model: Classifier, x: Input, head: str, direction: Tensors) -> Tensor:
    """`J·direction`: how the outputs change."""
    params = {name: p.detach() for name, p in model.params(head).items()}
    if isinstance(model.backbone, Linearized):
        # forward mode cannot be nested; these outputs are quadratic in θ, so the central difference is exact
        ahead, behind = (
            functional_call(model, {name: p + sign * direction[name] for name, p in params.items()}, (x, head))
            for sign in (1, -1)
        )
        return (ahead - behind) / 2  # type: ignore[no-any-return]
    with forward_mode_kernels(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, direction[name]) for name, p in params.items()}
        change = forward_ad.unpack_dual(functional_call(model, duals, (x, head))).tangent
    assert isinstance(change, Tensor)  # the head's parameters reach the outputs
    return change


def _hessian_product(loss: Loss, outputs: Tensor, labels: Tensor, change: Tensor) -> Tensor:
    """The Hessian of each sample's loss in its outputs, times their change."""
    outputs = outputs.requires_grad_()
    summed = loss.value(outputs, labels) * len(labels)
    (grad,) = torch.autograd.grad(summed, outputs, create_graph=True)
    return torch.autograd.grad(grad, outputs, change)[0]


def _dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return float(sum((t.double() * other[name].double()).sum() for name, t in one.items()))


def _checked(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"the accuracy matrix has shape {tuple(matrix.shape)}; tasks × tasks is needed.")
    return matrix
