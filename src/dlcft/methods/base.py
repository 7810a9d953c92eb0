"""The contract of a method, and the method that remembers nothing."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dlcft.curvature.losses import Loss
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input

Batches = Iterable[tuple[Input, Tensor]]
Augment = Callable[[Input, torch.Generator], Input]
Tensors = dict[str, Tensor]
Header = dict[str, Any]
State = tuple[Tensors, Header]


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
        weight: how much the task counts in memory, where 1 is usual.
    """

    model: Classifier
    head: str
    loss: Loss
    batches: Batches
    samples: int
    augment: Augment
    generator: Callable[[str], torch.Generator]
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Batch:
    """One training batch.

    Attributes:
        x: inputs, augmented.
        original: inputs as they came.
        y: label indices.
        epoch: how often the data was seen before.
        generator: the random stream of this step.
    """

    x: Input
    original: Input
    y: Tensor
    epoch: int
    generator: torch.Generator


@dataclass(frozen=True, eq=False)
class PastOfHead:
    """What is remembered of a head under squared loss: `½·weight·⟨D, D Z⟩` for a change D from where it stands.

    Attributes:
        moment: `Z = E[zzᵀ]` of the features of the past, z with a last 1.
        weight: how much the past counts where the new task counts 1.
    """

    moment: Tensor
    weight: float


class Method(abc.ABC):
    """Hooks around the loop. A new method is one class with an `objective`."""

    trains = True
    """Whether the loop is run; closed-form methods do all their work in `finish`."""

    increase: float | None = None
    """What the memory said, after the last task, of the rise of the old mean loss; None if it says nothing."""

    def start(self, task: Task) -> None:
        """Before a task is trained, the head grown already."""

    def past_of_head(self, task: Task) -> PastOfHead | None:
        """What the memory knows of the task's head, before it is trained; None if nothing."""
        return None

    @abc.abstractmethod
    def objective(self, task: Task, batch: Batch) -> Tensor:
        """What to minimise on one batch; it reads as the paper's equation."""

    def heads(self, task: Task) -> list[str]:
        """The heads that are trained, some perhaps twice: the task's own, and others that the objective is about."""
        return [task.head]

    def adopted(self, model: Classifier) -> None:
        """The model comes from elsewhere, and nothing is there of what it has learned."""

    def grown(self, names: tuple[str, str], outputs: int) -> None:
        """The head with these parameters has got new outputs with zero weights."""

    def observe(self, task: Task, batch: Batch) -> None:
        """After a step on a batch."""

    def finish(self, task: Task) -> None:
        """After a task: remember it."""

    def learned_together(self) -> None:
        """After several tasks at once: what all of them did to those before is not known."""
        self.increase = None

    def settle(self, model: Classifier) -> None:
        """Before a prediction: bring the heads up to date with what was learned."""

    def predicted_increase(self) -> float | None:
        """By how much, says the memory, the last task has raised the mean loss of those before it; None if unknown."""
        return self.increase

    def snapshot(self) -> Method:
        """A copy to go back to; what is never changed in place may be shared."""
        return copy.copy(self)

    def state(self) -> State:
        """What it remembers, as tensors and a header that JSON can hold."""
        return {}, {}

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        """The inverse of `state`, for a model that is restored already."""

    def unfinished_state(self) -> State:
        """What it gathers while a task is trained: beside the model, all that a resumed task needs."""
        return {}, {}

    def load_unfinished(self, tensors: Tensors, header: Header) -> None:
        """The inverse of `unfinished_state`."""


class HasState(Protocol):
    """A part of a method's memory."""

    def state(self) -> State:
        """Tensors, and a header that JSON can hold."""


def joined_states(**parts: HasState | None) -> State:
    """The states of several parts, of those that are there."""
    tensors: Tensors = {}
    header: Header = {}
    for name, part in parts.items():
        if part is not None:
            own, header[name] = part.state()
            tensors |= {f"{name}/{key}": tensor for key, tensor in own.items()}
    return tensors, header


def split_states(tensors: Mapping[str, Tensor], header: Header) -> dict[str, State]:
    """The inverse of `joined_states`."""
    return {
        name: ({k.removeprefix(f"{name}/"): t for k, t in tensors.items() if k.startswith(f"{name}/")}, own)
        for name, own in header.items()
    }
