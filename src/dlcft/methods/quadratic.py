"""EWC, MAS, OSLA and DLCFT: the past as a quadratic form."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlcft.curvature.blocks import InputGram
from dlcft.curvature.estimate import estimate
from dlcft.curvature.memory import Memory
from dlcft.methods.base import Batch, Header, Method, PastOfHead, State, Task, Tensors, joined_states, split_states
from dlcft.methods.buffer import Buffer
from dlcft.methods.replay import replayed_loss
from dlcft.network.classifier import Classifier


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
        first_order: whether the penalty has the gradient at its anchor too.
        keep_gradient: whether the memory keeps that gradient in any case, for `predicted_increase`.
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
    keep_gradient: bool = False
    draws: int | None = 1
    curvature_samples: int | None = None
    buffer: Buffer | None = None
    balance: float = 0.5
    replay_batch: int = 32
    memory: Memory | None = None

    def past_of_head(self, task: Task) -> PastOfHead | None:
        """See `Method`: where the head's block is `Z ⊗ I`, and all that ψ does goes through the head's features."""
        names = task.model.head_names(task.head)
        if self.memory is None or names[0] not in self.memory.anchor or task.model.strict:
            return None
        block = next(block for block in self.memory.curvature.blocks.values() if names[0] in block.names)
        if not isinstance(block, InputGram):
            return None
        ratio = self.strength * self.memory.weight / (self._weight(task) if self.mean else 1.0)
        return PastOfHead(block.gram[0], ratio)

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`(w L_data + w̄ L_reg)/(w + w̄)` with `L_reg = λ·penalty + (1−λ)·L_replay`."""
        data = task.loss.value(task.model(batch.x, task.head), batch.y)
        if self.memory is None:
            return data
        old = self.memory.penalty(self._params(task), first_order=self.first_order)
        if self.buffer is not None and len(self.buffer):
            old = self.balance * old + (1 - self.balance) * replayed_loss(
                task, self.buffer, self.replay_batch, batch.generator
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
            total=task.samples,
            include_head=self.include_head,
            gradient=self.first_order or self.keep_gradient,
        )
        remember = Memory.of if self.memory is None else self.memory.absorb
        self.memory = remember(params, found.curvature, self._weight(task), found.gradient)
        if self.buffer is not None:
            generator = task.generator("buffer")
            for x, y in task.batches:
                self.buffer.add(x, y, head=task.head, generator=generator)

    def snapshot(self) -> Method:
        """See `Method`."""
        kept = copy.copy(self)
        kept.buffer = copy.deepcopy(self.buffer)
        return kept

    def state(self) -> State:
        """The memory and the buffer."""
        return joined_states(memory=self.memory, buffer=self.buffer)

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        """See `Method`."""
        parts = split_states(tensors, header)
        self.memory = Memory.from_state(*parts["memory"]) if "memory" in parts else None
        if "buffer" in parts:
            self.buffer = Buffer.from_state(*parts["buffer"])

    def _params(self, task: Task) -> dict[str, torch.nn.Parameter]:
        return task.model.params(task.head if self.include_head else None)

    def _weight(self, task: Task) -> float:
        return task.weight * (task.samples if self.weigh_by == "samples" else 1.0)
