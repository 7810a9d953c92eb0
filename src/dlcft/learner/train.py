"""The one training loop. It belongs to no method, and every step's randomness depends on its position alone.

Hence a run that was interrupted continues from any position, given the parameters and the optimiser's state there, and
ends as it would have ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlcft.data.augment import Augmentation
from dlcft.data.samples import Batches, to_device
from dlcft.learner.progress import Progress, Report
from dlcft.methods import Batch, Method, Task
from dlcft.methods.recipes import Recipe
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input, reference

log = logging.getLogger("dlcft")

Tensors = dict[str, Tensor]
Streams = Callable[[str], torch.Generator]


@dataclass
class Position:
    """Where training stands: between two steps.

    Attributes:
        epoch: how many epochs are complete.
        step: how many steps of the epoch under way.
        total: the sum of the objective over its samples.
        seen: how many samples.
        curve: the mean objective of every complete epoch.
        lr: the learning rate of this task, if it is not the recipe's.
    """

    epoch: int = 0
    step: int = 0
    total: float = 0.0
    seen: int = 0
    curve: list[float] = field(default_factory=list)
    lr: float | None = None


class Training:
    """Training of one task (or of several at once, each on its own head).

    Args:
        model: the classifier.
        method: gives the objective.
        tasks: what is learned; their batches must be `Batches`.
        recipe: optimiser, schedule, epochs, batch size.
        streams: gives the random stream of a purpose.
        amp: whether to train in bfloat16 where autocast does.
        batchnorm: whether BatchNorm learns its statistics.
    """

    def __init__(
        self,
        model: Classifier,
        method: Method,
        tasks: list[Task],
        recipe: Recipe,
        streams: Streams,
        *,
        amp: bool = False,
        batchnorm: bool = False,
    ) -> None:
        self.model, self.method, self.tasks, self.recipe, self.streams = model, method, tasks, recipe, streams
        self.amp, self.batchnorm = amp, batchnorm
        self.device = reference(model).device
        heads = [head for task in tasks for head in method.heads(task)]
        self.params = {name: p for head in heads for name, p in model.params(head).items()}
        self.optimizer = _optimizer(recipe, list(self.params.values()))
        self.steps = recipe.epochs * sum(len(self._sizes(task)) for task in tasks)
        self.position = Position()

    def run(self, report: Report, task_number: int, save: Callable[[], None] = lambda: None) -> list[float]:
        """Train to the end from the position; `save` is called between steps.

        Returns:
            The mean objective of every epoch.

        Raises:
            FloatingPointError: when the objective stops being finite.
        """
        at, epochs = self.position, self.recipe.epochs
        if self.recipe.careful and at == Position():
            at.lr = self._careful_lr()
        self.model.eval()  # dropout too: its randomness would not be of the position alone
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):
                module.train(self.batchnorm)
        done = self.steps // epochs * at.epoch + at.step
        started, first = time.perf_counter(), done
        while at.epoch < epochs:
            for task, indices in self._order(at.epoch)[at.step :]:
                value = self._step(task, indices, done)
                at.total, at.seen, at.step = at.total + value * len(indices), at.seen + len(indices), at.step + 1
                done += 1
                left = (time.perf_counter() - started) / (done - first) * (self.steps - done)
                report(Progress(task_number, at.epoch + 1, epochs, at.total / at.seen, done / self.steps, left))
                save()
            at.curve.append(at.total / at.seen)
            log.info("task %d, epoch %d of %d: loss %.4g", task_number, at.epoch + 1, epochs, at.curve[-1])
            at.epoch, at.step, at.total, at.seen = at.epoch + 1, 0, 0.0, 0
        self.model.eval()
        return at.curve

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """The optimiser's tensors and the position; the parameters are the model's own business."""
        slots = self.optimizer.state_dict()["state"]
        tensors = {f"{i}/{key}": t for i, slot in slots.items() for key, t in slot.items() if isinstance(t, Tensor)}
        return tensors, asdict(self.position)

    def load_state(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        slots: dict[int, Tensors] = {}
        for name, tensor in tensors.items():
            index, _, key = name.partition("/")
            slots.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.position = Position(**header)

    def _sizes(self, task: Task) -> list[int]:
        """Of the batches; BatchNorm cannot learn from one sample alone, which the batch before takes in."""
        whole, rest = divmod(task.samples, self.recipe.batch_size)
        sizes = [self.recipe.batch_size] * whole + [rest] * (rest > 0)
        if self.batchnorm and rest == 1 and whole:
            sizes[-2:] = [sizes[-2] + 1]
        return sizes

    def _order(self, epoch: int) -> list[tuple[Task, Tensor]]:
        generator = self.streams(f"order {epoch}")
        batches = [
            (task, indices)
            for task in self.tasks
            for indices in torch.randperm(task.samples, generator=generator).split(self._sizes(task))
        ]
        if len(self.tasks) > 1:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        return batches

    def _objective(self, task: Task, indices: Tensor, done: int) -> tuple[Tensor, Batch]:
        data = task.batches
        assert isinstance(data, Batches)
        generator = self.streams(f"step {done}")
        original = to_device(data.samples.fetch(indices), self.device, dtype=data.dtype)
        x = task.augment(original, generator)
        batch = Batch(x, original, data.y[indices].to(self.device), self.position.epoch, generator)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            return self.method.objective(task, batch), batch

    def _careful_lr(self) -> float:
        """The recipe's learning rate, or less: with it a first step ends where the first batch's objective is least.

        Along a step θ + t·s a quadratic objective is `L + t⟨g, s⟩ + t²·bend`, least at `t = −⟨g, s⟩ / (2·bend)`.
        """
        task, indices = self._order(0)[0]
        kept = {name: p.detach().clone() for name, p in self.params.items()}
        before, _ = self._objective(task, indices, 0)
        self.optimizer.zero_grad()
        before.backward()
        self.optimizer.step()
        with torch.no_grad():
            after, _ = self._objective(task, indices, 0)
            changes = [(p.grad, p - kept[name]) for name, p in self.params.items() if p.grad is not None]
            slope = sum(float((grad * change).sum()) for grad, change in changes)
            for name, p in self.params.items():
                p.copy_(kept[name])
        self.optimizer.state.clear()
        bend = after.item() - before.item() - slope
        return self.recipe.lr * min(1.0, -slope / (2 * bend)) if bend > 0 and slope < 0 else self.recipe.lr

    def _step(self, task: Task, indices: Tensor, done: int) -> float:
        objective, batch = self._objective(task, indices, done)
        value = objective.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"training diverged in epoch {batch.epoch + 1} (the loss is {value}) with lr={self.recipe.lr}; the "
                "learner is as it was before this task. Try a smaller lr or clip=1.0."
            )
        self._set_lr(done)
        self.optimizer.zero_grad()
        objective.backward()
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.recipe.clip)
        self.optimizer.step()
        self.method.observe(task, batch)
        return value

    def _set_lr(self, done: int) -> None:
        share = (1 + math.cos(math.pi * done / self.steps)) / 2 if self.recipe.schedule == "cosine" else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = share * (self.recipe.lr if self.position.lr is None else self.position.lr)


def augmented(augmentation: Augmentation) -> Callable[[Input, torch.Generator], Input]:
    """An augmentation that leaves alone what is no batch of images."""
    return lambda x, generator: augmentation(x, generator) if isinstance(x, Tensor) and x.dim() == 4 else x


def _optimizer(recipe: Recipe, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimizer == "adam":
        return torch.optim.Adam(params, lr=recipe.lr, betas=(0.9, 0.999), weight_decay=recipe.weight_decay)
    return torch.optim.SGD(params, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
