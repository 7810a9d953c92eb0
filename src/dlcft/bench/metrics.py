"""Figures of merit: of an accuracy matrix, of a learner on a stream, of features and of curvature.

`R[t, j]` is the accuracy on task j after learning task t; entries with j > t may be missing (NaN).

References:
    Lopez-Paz, Ranzato, Gradient episodic memory (2017), https://arxiv.org/abs/1706.08840
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.functional import vhp

from dlcft.bench.streams import Pair, Stream
from dlcft.curvature.losses import Loss
from dlcft.learner.heads import HEAD
from dlcft.learner.learner import Learner
from dlcft.network.classifier import Classifier, evaluating
from dlcft.network.forward_mode import forward_mode_kernels
from dlcft.network.inputs import Input, functional_call
from dlcft.network.linearize import Linearized

NEIGHBOURS = 20  # that vote in the probe of features
OLD_IMAGES = 500  # that the rise of the old tasks' loss is measured on
Tensors = dict[str, Tensor]
Batches = Iterable[tuple[Input, Tensor]]


def backward_transfer(matrix: Tensor) -> float:
    """BWT: `mean_{j<T} (R[T, j] − R[j, j])`; 0 for a single task. Negative: something was forgotten."""
    return float((matrix[-1] - matrix.diagonal())[:-1].mean()) if len(matrix) > 1 else 0.0


def forgetting(matrix: Tensor) -> float:
    """`mean_{j<T} (max_{t<T} R[t, j] − R[T, j])`; 0 for a single task."""
    if len(matrix) == 1:
        return 0.0
    best = matrix[:-1].nan_to_num(nan=-torch.inf).amax(0)
    return float((best - matrix[-1])[:-1].mean())


class Examiner:
    """Tests a learner on a stream. In closed form, features never change and are computed once.

    With `mirrored`, outputs and features are the means over an image and its mirror image, for every method alike:
    those that learn from mirror images are tested on them.
    """

    def __init__(self, learner: Learner, stream: Stream, *, mirrored: bool = False) -> None:
        self.learner, self.stream, self.mirrored = learner, stream, mirrored
        self._fixed: dict[int, Tensor] = {}
        self._neighbours: float | None = None

    def accuracies(self, tasks: int) -> list[float]:
        """On each of the first tasks, or on the test set that all share."""
        return [self._accuracy(index) for index in range(1 if self.stream.shares_test else tasks)]

    def neighbours(self) -> float:
        """The accuracy of nearest neighbours among the features of all training images, of tasks to come too."""
        if not self.learner.method.closed_form or self._neighbours is None:
            everything = self.stream.joint().tasks[0]
            (known, labels), (asked, truth) = everything.train, everything.test
            found = nearest_neighbours(self._features(known), labels, self._features(asked), NEIGHBOURS)
            self._neighbours = float((found == truth).double().mean())
        return self._neighbours

    def old_loss(self, tasks: int, images: int = OLD_IMAGES) -> float:
        """The mean over the first tasks of the loss on training images, as many of each, so many in all."""
        old = self.stream.tasks[:tasks]
        some = [(evenly(task.train, max(1, images // tasks)), task.head) for task in old]
        if all(head is None for _, head in some):
            x, y = (torch.cat(parts) for parts in zip(*(pair for pair, _ in some), strict=True))
            return float(self.learner.evaluate((x, y))["loss"])
        return float(sum(self.learner.evaluate(pair, head=head)["loss"] for pair, head in some) / len(some))

    @torch.no_grad()
    def _accuracy(self, index: int) -> float:
        learner, task = self.learner, self.stream.tasks[index]
        (x, y), head = task.test, task.head or HEAD
        if learner.method.closed_form:
            if index not in self._fixed:
                self._fixed[index] = self._features(x)
            learner.solve()
            layer = learner.model.head(head)
            outputs = layer(self._fixed[index].to(layer.weight))
        else:
            outputs = torch.stack([learner.outputs(view, head=task.head) for view in self._views(x)]).mean(0)
        names = learner.labels(head)
        right: list[bool] = [
            names[answer] == label for answer, label in zip(outputs.argmax(1).tolist(), y.tolist(), strict=True)
        ]
        return sum(right) / len(right)

    @torch.no_grad()
    def _features(self, x: Tensor) -> Tensor:
        model = self.learner.model.eval()
        views = []
        for view in self._views(x):
            inputs = self.learner.inputs(view)
            batches = self.learner._batches(inputs, torch.zeros(len(inputs), dtype=torch.long), 256)
            views.append(torch.cat([model.features(part).float().cpu() for part, _ in batches]))
        return torch.stack(views).mean(0)

    def _views(self, x: Tensor) -> list[Tensor]:
        """The images, and their mirror images; features of closed form are means over both already."""
        return [x, x.flip(-1)] if self.mirrored and not self.learner.method.closed_form else [x]


def evenly(pair: Pair, count: int) -> Pair:
    """So many images, evenly spaced: in a stream they stand class by class."""
    x, y = pair
    chosen = torch.linspace(0, len(y) - 1, min(count, len(y))).round().long()
    return x[chosen], y[chosen]


def nearest_neighbours(features: Tensor, labels: Tensor, queries: Tensor, k: int = 20, chunk: int = 1024) -> Tensor:
    """The label that most of the k nearest references (by cosine) have, for every query; ties go to the nearer side.

    Features of the references, which have the labels, and of the queries are samples × features; a chunk of queries is
    looked at together.
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
    model: Classifier, batches: Batches, loss: Loss, head: str, *, iterations: int, generator: torch.Generator
) -> float:
    """The largest eigenvalue of the Gauss-Newton matrix (the Fisher matrix) of the mean loss, by power iteration.

    No matrix is formed: one product is a directional derivative of the outputs, the loss's Hessian in them, and a
    backward pass. The value never exceeds the true one, and rises to it with more iterations. Trainable parameters
    count; the model is left as it was.
    """
    batches = list(batches)
    # torch's generators draw on the CPU
    image = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in model.params(head).items()}
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
    _, product = vhp(lambda outputs: loss.value(outputs, labels) * len(labels), outputs, change)
    assert isinstance(product, Tensor)
    return product


def _dot(one: Tensors, other: Tensors) -> float:
    return float(sum((t.double() * other[name].double()).sum() for name, t in one.items()))
