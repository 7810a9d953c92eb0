"""The contract of a method: hooks around one training loop that belongs to none of them."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dlcft.curvature.losses import Loss, ScaledMSE
from dlcft.data.labels import Label
from dlcft.methods.settings import Features, Model, Reading, Scenario, check_settings
from dlcft.network import workers
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input

Batches = Iterable[tuple[Input, Tensor]]
Augment = Callable[[Input, torch.Generator], Input]
Tensors = dict[str, Tensor]
Header = dict[str, Any]
State = tuple[Tensors, Header]
M = TypeVar("M", bound="Method")


class Settle(Protocol):
    """Makes a head's outputs for the labels of a stream."""

    def __call__(self, labels: Sequence[Label]) -> list[int]:
        """The output of each label, made if it is new; all workers call it together, each with its labels."""

    def known(self) -> list[Label]:
        """The labels of the head, in the order of its outputs."""


@dataclass(frozen=True, eq=False)
class Task:
    """The task at hand, as a method sees it; it is let go when the task ends.

    Attributes:
        model: the classifier.
        head: the head that learns.
        loss: of its outputs.
        batches: the data without augmentation, in order, as often as asked for.
        samples: how many.
        augment: training's random change of a batch of inputs.
        generator: gives the random stream of a purpose.
        weight: how much the task counts in memory; usually 1.
        settle: for a stream, whose labels are known once they are read.
    """

    model: Classifier
    head: str
    loss: Loss
    batches: Batches
    samples: int
    augment: Augment
    generator: Callable[[str], torch.Generator]
    weight: float = 1.0
    settle: Settle | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """One training batch.

    Attributes:
        x: inputs, augmented.
        original: inputs as they came.
        y: label indices.
        epoch: how often the data was seen before.
        generator: the random stream of this step.
        last: whether it is among the last steps, as many as a pass over the data has.
        counts: False for a sample that stands in where a worker has no part of the batch.
    """

    x: Input
    original: Input
    y: Tensor
    epoch: int
    generator: torch.Generator
    last: bool = False
    counts: bool = True

    def whole(self, part: Input) -> Input:
        """The rows of all workers' parts of the batch, in its order, of this worker's rows."""
        if workers.count() == 1:
            return part
        parts = [rows for rows in workers.gathered(part if self.counts else None) if rows is not None]
        return tree_map(lambda *tensors: torch.cat(tensors), *parts)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class PastOfHead:
    """The memory of a head under squared loss: `½·weight·⟨D, D Z⟩` for a change D of its weights.

    Attributes:
        moment: `Z = E[zzᵀ]` of the features of the past, z with a last 1.
        weight: how much the past counts where the new task counts 1.
    """

    moment: Tensor
    weight: float


class Loop(Protocol):
    """The training loop, as `Method.learn` sees it."""

    @property
    def first(self) -> bool:
        """Whether no task was learned before."""

    def start_heads(self, tasks: Sequence[Task]) -> None:
        """Bring the heads to their starting point: see `Training.head_start`."""

    def train(self, tasks: Sequence[Task]) -> None:
        """Train the backbone and the heads on `Method.objective`, from where an interrupted run was."""

    def parts(self, task: Task) -> Iterator[Task]:
        """A task in parts, from where an interrupted run was: for methods whose memory is a sum over samples."""


@dataclass
class Method(abc.ABC):
    """A learning method: a dataclass whose fields are its settings. One with an `objective` is complete.

    `bind` is called once, when a learner is made; then for each task `learn`, which calls `start`, the loop (with
    `heads`, `objective` and `observe` in every step) and `finish`. A saved method is its class, its settings and its
    `state`.
    """

    closed_form: ClassVar[bool] = False
    """Whether it is solved on fixed features instead of trained."""

    gathers: ClassVar[bool] = False
    """Whether its state changes inside a task, so that a progress note must hold it."""

    refits_heads: ClassVar[bool] = False
    """Whether a start by ridge regression also refits old outputs that no memory knows."""

    def __post_init__(self) -> None:
        """Check the settings, and start without a memory."""
        check_settings(self)
        self.usual_temperature: float | None = None  # that suits the outputs where no held-out data tells one, if known
        self.increase: float | None = None  # of the old tasks' mean loss by the last one, as predicted
        self.scenario: Scenario = "class-il"
        self.loss: Loss = ScaledMSE()

    def bind(self, scenario: Scenario, model: Model, training: Reading) -> None:
        """Prepare for learning in a scenario, on a model.

        Raises:
            ValueError: when the method cannot work there.
        """
        if isinstance(model, Features) != self.closed_form:
            has, needs = ("fixed features", "a network") if not self.closed_form else ("a network", "fixed features")
            raise ValueError(f"the recipe's model is {has}; {type(self).__name__} needs {needs}.")
        self.scenario, self.loss = scenario, model.make_loss()

    def unused(self) -> dict[str, str]:
        """Settings without effect in this scenario, each with the reason."""
        return {}

    def learn(self, tasks: Sequence[Task], loop: Loop) -> None:
        """Learn a task; or several at once, each on its own head."""
        loop.start_heads(tasks)
        for task in tasks:
            self.start(task)
        loop.train(tasks)
        self.remember(tasks)

    def remember(self, tasks: Sequence[Task]) -> None:
        """Call `finish` for each task; of several at once the increase of the old loss is unknown."""
        self.increase = None
        for task in tasks:
            self.finish(task)
        if len(tasks) > 1:
            self.increase = None

    def start(self, task: Task) -> None:
        """Called before a task is trained, its head grown already."""

    @abc.abstractmethod
    def objective(self, task: Task, batch: Batch) -> Tensor:
        """The function to minimise, on one batch."""

    def observe(self, task: Task, batch: Batch) -> None:
        """Called after a step on a batch."""

    def finish(self, task: Task) -> None:
        """Called after a task was trained: remember it."""

    def heads(self, task: Task) -> list[str]:
        """The heads that the objective trains; duplicates are allowed."""
        return [task.head]

    def grown(self, names: tuple[str, str], outputs: int) -> None:
        """The head with these parameters has got new outputs with zero weights."""

    def past_of_head(self, task: Task) -> PastOfHead | None:
        """The memory of the task's head before it is trained; None if there is none."""
        return None

    def adopted(self, model: Classifier, head: str, task: Task | None) -> None:
        """The head comes from a trained classifier; `task` holds a sample of its data, if there is one."""
        if task is not None:
            self.finish(task)

    def solve(self, model: Classifier) -> None:
        """Bring the heads up to date with the memory: closed-form methods solve their regression here."""

    def predicted_increase(self) -> float | None:
        """The rise of the old tasks' mean loss through the last task, by the memory alone; None if unknown."""
        return self.increase

    def old_loss(self) -> float | None:
        """The old tasks' mean loss before the last task, which `predicted_increase` adds to; None if unknown."""
        return None

    @property
    def empty(self) -> bool:
        """Whether nothing is known any more, because all samples were forgotten."""
        return False

    def forget(self, task: Task, *, origin_factor: float | None = None) -> None:
        """Remove samples from the memory; see `Ridge.forget`.

        Raises:
            ValueError: when the method cannot.
        """
        raise ValueError(f"forget needs a closed-form method such as 'dlcft-exact'; {type(self).__name__} is trained.")

    def merge(self: M, other: M, places: Mapping[str, Sequence[int]]) -> None:
        """Add the memory of another learner; see `Ridge.merge`.

        Raises:
            ValueError: when the method cannot.
        """
        raise ValueError(f"merge needs a closed-form method such as 'dlcft-exact'; {type(self).__name__} is trained.")

    def snapshot(self: M) -> M:
        """A copy to go back to; parts that are never changed in place are shared."""
        return copy.copy(self)

    def state(self) -> State:
        """The memory as tensors and a header that JSON can hold."""
        return {}, {}

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        """The inverse of `state`; the model is restored already."""


class HasState(Protocol):
    """A part of a method's memory."""

    def state(self) -> State:
        """Tensors, and a header that JSON can hold."""


def joined_states(**parts: HasState | None) -> State:
    """The states of several parts; None for one that is absent."""
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
