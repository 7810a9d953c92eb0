"""Methods: what is remembered of past tasks, and how it is paid for. The training loop belongs to none of them.

References:
    LwF: Li, Hoiem (2016), https://arxiv.org/abs/1606.09282
    ER, DER, DER++: Buzzega et al. (2020), https://arxiv.org/abs/2004.07211
    RanPAC: McDonnell et al. (2023), https://arxiv.org/abs/2307.02251
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlcft.buffer import Buffer
from dlcft.classifier import Classifier, Input
from dlcft.estimators import estimate
from dlcft.losses import Loss
from dlcft.memory import Memory
from dlcft.ridge import RIDGES, RidgeSums

Batches = Iterable[tuple[Input, Tensor]]
Augment = Callable[[Input, torch.Generator], Input]


@dataclass(frozen=True, eq=False)
class Task:
    """What a method may know of the task at hand; it is let go when the task ends.

    Attributes:
        model: the classifier.
        head: the head that learns.
        loss: of its outputs.
        batches: the data without augmentation, in order, as often as asked for.
        samples: how many.
        augment: what training does to a batch of inputs.
        generator: gives the random stream of a purpose.
    """

    model: Classifier
    head: str
    loss: Loss
    batches: Batches
    samples: int
    augment: Augment
    generator: Callable[[str], torch.Generator]


@dataclass(frozen=True, eq=False)
class Batch:
    """One training batch: inputs with and without augmentation, label indices, and how often the data was seen."""

    x: Input
    original: Input
    y: Tensor
    epoch: int


class Method(abc.ABC):
    """Hooks around the loop. A new method is one class with an `objective`."""

    trains = True
    """Whether the loop is run; closed-form methods do all their work in `finish`."""

    increase: float | None = None
    """What the memory said, after the last task, of the rise of the old mean loss; None if it says nothing."""

    def start(self, task: Task) -> None:
        """Before a task is trained, the head grown already."""

    @abc.abstractmethod
    def objective(self, task: Task, batch: Batch) -> Tensor:
        """What to minimise on one batch; it reads as the paper's equation."""

    def grown(self, names: tuple[str, str], outputs: int) -> None:
        """The head with these parameters has got new outputs with zero weights."""

    def observe(self, task: Task, batch: Batch) -> None:
        """After a step on a batch."""

    def finish(self, task: Task) -> None:
        """After a task: remember it."""

    def snapshot(self) -> Method:
        """A copy to go back to; what is never changed in place may be shared."""
        return copy.copy(self)


class Finetune(Method):
    """No memory: train on. With all data in one task it is joint training."""

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data`."""
        return task.loss.value(task.model(batch.x, task.head), batch.y)


@dataclass(eq=False)
class Quadratic(Method):
    """EWC, MAS, OSLA and DLCFT: one class with other switches.

    Args:
        curvature: an estimator's name (or `Statistics` class).
        include_head: whether the head is remembered; not so with one head a task.
        weigh_by: "tasks" (each counts 1, the paper) or "samples".
        mean: `(w L_data + w̄ L_reg)/(w + w̄)`, the paper's objective; else `L_data + strength·w̄·L_reg`, as the
            baselines trained with SGD, whose learning rate would shrink otherwise.
        strength: see `mean`.
        first_order: whether the memory keeps the gradient at its anchor.
        draws: of the estimator; None for exact.
        curvature_samples: how many samples the estimator looks at; None for all.
        buffer: of past samples, or None.
        balance: the paper's λ, between penalty and replay.
        replay_batch: how many are replayed a step.
    """

    curvature: Any
    include_head: bool = True
    weigh_by: str = "tasks"
    mean: bool = True
    strength: float = 1.0
    first_order: bool = False
    draws: int | None = 1
    curvature_samples: int | None = None
    buffer: Buffer | None = None
    balance: float = 0.5
    replay_batch: int = 32
    memory: Memory | None = None

    def start(self, task: Task) -> None:
        """Prepare the stream of replayed samples."""
        self._stream = task.generator("replay")

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`(w L_data + w̄ L_reg)/(w + w̄)` with `L_reg = λ·penalty + (1−λ)·L_replay`."""
        data = task.loss.value(task.model(batch.x, task.head), batch.y)
        if self.memory is None:
            return data
        old = self.memory.penalty(self._params(task))
        if self.buffer is not None and len(self.buffer):
            old = self.balance * old + (1 - self.balance) * _replayed_loss(
                task, self.buffer, self.replay_batch, self._stream
            )
        new_weight, old_weight = self._weight(task), self.memory.weight
        if self.mean:
            return (new_weight * data + self.strength * old_weight * old) / (new_weight + old_weight)
        return data + self.strength * old_weight * old

    def grown(self, names: tuple[str, str], outputs: int) -> None:
        """The memory grows with the head."""
        if self.memory is not None and names[0] in self.memory.anchor:
            self.memory = self.memory.grow(names, outputs)

    def finish(self, task: Task) -> None:
        """Estimate the curvature, merge it into the memory, fill the buffer."""
        params = self._params(task)
        if self.memory is not None:
            self.increase = self.memory.predicted_increase(params)
        found = estimate(
            self.curvature,
            task.model,
            task.batches,
            task.loss,
            task.head,
            draws=self.draws,
            generator=task.generator("curvature"),
            samples=self.curvature_samples,
            include_head=self.include_head,
            gradient=self.first_order,
        )
        remember = Memory.of if self.memory is None else self.memory.absorb
        self.memory = remember(params, found.curvature, self._weight(task), found.gradient)
        if self.buffer is not None:
            for x, y in task.batches:
                self.buffer.add(x, y, head=task.head, generator=self._stream)

    def snapshot(self) -> Method:
        """See `Method`."""
        kept = copy.copy(self)
        kept.buffer = copy.deepcopy(self.buffer)
        return kept

    def _params(self, task: Task) -> dict[str, torch.nn.Parameter]:
        return task.model.params(task.head if self.include_head else None)

    def _weight(self, task: Task) -> float:
        return float(task.samples) if self.weigh_by == "samples" else 1.0


@dataclass(eq=False)
class LwF(Method):
    """Keep the previous model's outputs on the new data.

    Args:
        strength: weight of the distillation.
        temperature: of the softmax, with cross-entropy; with squared loss the outputs themselves are compared.
    """

    strength: float = 1.0
    temperature: float = 2.0
    teacher: Classifier | None = None

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data + λ·L_distil`, over all outputs that the teacher had."""
        if self.teacher is None:
            return task.loss.value(task.model(batch.x, task.head), batch.y)
        z = task.model.features(batch.x)
        data = task.loss.value(task.model.head(task.head)(z), batch.y)
        with torch.no_grad():
            z_old = self.teacher.features(batch.x)
        return data + self.strength * sum(
            self._distance(
                task.model.head(head)(z)[:, : self.teacher.head(head).out_features],
                self.teacher.head(head)(z_old),
                task.loss,
            )
            for head in self.teacher.heads
        )

    def _distance(self, new: Tensor, old: Tensor, loss: Loss) -> Tensor:
        old = old.detach()
        if loss.is_quadratic:
            return 0.5 * (new - old).square().sum() / len(new)
        soft = (old / self.temperature).log_softmax(1), (new / self.temperature).log_softmax(1)
        return self.temperature**2 * F.kl_div(soft[1], soft[0], reduction="batchmean", log_target=True)

    def finish(self, task: Task) -> None:
        """The model as it is now becomes the teacher."""
        self.teacher = copy.deepcopy(task.model).eval().requires_grad_(False)


@dataclass(eq=False)
class Replay(Method):
    """ER, DER and DER++: replay past samples by their labels, by their logits, or both.

    Args:
        buffer: filled while training, in the first epoch.
        logits: DER's α: weight of the squared distance to the stored logits.
        labels: weight of the loss on replayed labels (ER: 1; DER++: β).
        replay_batch: how many are replayed a step.
    """

    buffer: Buffer
    logits: float = 0.0
    labels: float = 1.0
    replay_batch: int = 32

    def start(self, task: Task) -> None:
        """Prepare the stream of replayed samples."""
        self._stream = task.generator("replay")

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data + α‖f − f_stored‖² + β·L_replay`."""
        outputs = task.model(batch.x, task.head)
        self._outputs = outputs.detach()
        total = task.loss.value(outputs, batch.y)
        if not len(self.buffer):
            return total
        if self.logits:
            total = total + self.logits * self._distance(task)
        if self.labels:
            total = total + self.labels * _replayed_loss(task, self.buffer, self.replay_batch, self._stream)
        return total

    def _distance(self, task: Task) -> Tensor:
        """Mean squared distance to the stored logits, over the columns that were stored."""
        drawn = self.buffer.sample(self.replay_batch, self._stream)
        total, entries = torch.zeros((), device=drawn.y.device), 0
        for head, part in drawn.by_head():
            outputs = task.model(task.augment(part.x, self._stream), head)
            width = min(outputs.shape[1], part.logits.shape[1])
            stored = part.stored[:, :width]
            total = total + ((outputs[:, :width] - part.logits[:, :width]).square() * stored).sum()
            entries += int(stored.sum())
        return total / max(1, entries)

    def observe(self, task: Task, batch: Batch) -> None:
        """Offer the batch to the reservoir."""
        if batch.epoch == 0:
            logits = self._outputs if self.logits else None
            self.buffer.add(batch.original, batch.y, logits, head=task.head, generator=self._stream)

    def snapshot(self) -> Method:
        """See `Method`."""
        kept = copy.copy(self)
        kept.buffer = copy.deepcopy(self.buffer)
        return kept


@dataclass(eq=False)
class Ridge(Method):
    """Closed form on frozen features: exact for any order and split of the data; nothing to tune but the ridge.

    Args:
        ridge: relative to standardised features; None chooses it by generalised cross-validation from the sums.
        weigh_by: "samples" or "tasks" (each task counts the same).
        scale: α of the targets.
    """

    ridge: float | None = None
    weigh_by: str = "samples"
    scale: float = 15.0
    sums: dict[str, RidgeSums] | None = None

    trains = False

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """Never called."""
        raise NotImplementedError("ridge regression is solved, not trained")

    @torch.no_grad()
    def finish(self, task: Task) -> None:
        """Add the task's sums and solve."""
        layer = task.model.head(task.head)
        known = dict(self.sums or {})
        part = RidgeSums.empty(layer.in_features, device=layer.weight.device)
        part = part.extend((task.model.features(x), y) for x, y in task.batches)
        if self.weigh_by == "tasks":
            part = part.weighted(1 / part.weight)
        before = known.get(task.head)
        total = part if before is None else before.merge(part)
        total = total.grow(layer.out_features) if total.classes < layer.out_features else total
        known[task.head] = total
        ridge = self.ridge if self.ridge is not None else total.choose_ridge(RIDGES)
        if before is not None and before.classes:
            old = layer.weight[: before.classes].double(), layer.bias[: before.classes].double()
            base = before.loss(*old, self.scale)
        weight, bias = total.solve(ridge, scale=self.scale)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
        if before is not None and before.classes:
            grown = before.grow(len(weight)) if before.classes < len(weight) else before
            self.increase = grown.loss(weight, bias, self.scale) - base
        self.sums = known


def _replayed_loss(task: Task, buffer: Buffer, count: int, generator: torch.Generator) -> Tensor:
    """The mean loss on samples drawn from a buffer, each on its own head."""
    drawn = buffer.sample(min(count, len(buffer)), generator)
    total = torch.zeros((), device=drawn.y.device)
    for head, part in drawn.by_head():
        outputs = task.model(task.augment(part.x, generator), head)
        total = total + len(part.y) * task.loss.value(outputs, part.y)
    return total / len(drawn.y)
