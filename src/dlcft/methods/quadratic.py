"""EWC, MAS, OSLA and DLCFT: the past as a quadratic form."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlcft.curvature.estimate import estimate
from dlcft.curvature.memory import Memory
from dlcft.curvature.statistics import InputGramStatistics, Statistics, find_statistics
from dlcft.data.samples import Batches as SampleBatches
from dlcft.methods.base import (
    Batch,
    Batches,
    Header,
    Loop,
    Method,
    PastOfHead,
    State,
    Task,
    Tensors,
    joined_states,
    split_states,
)
from dlcft.methods.replay import Buffer, replayed_loss
from dlcft.methods.settings import Model, Network, Reading, Scenario, Training, setting
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input
from dlcft.network.names import qualified

log = logging.getLogger("dlcft")


@dataclass
class Quadratic(Method):
    """EWC, MAS, OSLA and DLCFT: one class with other switches.

    Args:
        curvature: an estimator's name, or a `Statistics` class of one's own, also as `module:Name`.
        adapt: "always": every task trains the backbone. "first": only the first task does; later ones only solve the
            head in closed form, and `E[zzᵀ]` is all that is remembered, exactly (needs `head_start="ridge"`,
            `loss="mse"`, `strict=False`, and any curvature but diagonal, mas and dense). "auto": "first" in class-IL
            without a buffer, where training on makes new outputs answer for old inputs; otherwise "always".
        weigh_by: "tasks" (each counts 1, the paper) or "samples".
        mean: divide by w + w̄, as the paper; with SGD the effective learning rate then shrinks with every task.
        strength: factor on penalty and replay together.
        damping: weight of `½‖θ − θ_{t−1}‖²` beside it; not in class-IL, as in the authors' code.
        first_order: whether the penalty has the gradient at its anchor too.
        keep_gradient: whether the memory keeps that gradient in any case, for `predicted_increase`.
        draws: output gradients drawn for each sample; None for the exact sum.
        curvature_samples: how many samples the curvature is estimated from; None for all.
        curvature_augment: whether the curvature is estimated from augmented images.
        buffer: how many past samples are kept and replayed, in class-IL; 0 for none.
        balance: the paper's λ, between penalty and replay.
        replay_batch: samples replayed a step.
    """

    curvature: str | type[Statistics] = setting("exact-tk", kind=str)
    adapt: str = setting("always", among=("always", "first", "auto"))
    weigh_by: str = setting("tasks", among=("tasks", "samples"))
    mean: bool = True
    strength: float = setting(1.0, least=0)
    damping: float = setting(0.0, least=0)
    first_order: bool = False
    keep_gradient: bool = False
    draws: int | None = setting(1, optional=True, least=1)
    curvature_samples: int | None = setting(None, kind=int, optional=True, least=1)
    curvature_augment: bool = False
    buffer: int = setting(0, least=0)
    balance: float = setting(0.5, least=0, most=1)
    replay_batch: int = setting(32, least=1)

    def __post_init__(self) -> None:
        """See `Method`; the curvature is found by its name."""
        if isinstance(self.curvature, type):
            self.curvature = qualified(self.curvature)
        super().__post_init__()
        find_statistics(self.curvature)
        self.memory: Memory | None = None
        self.kept: Buffer | None = None
        self.trains_once = False

    def bind(self, scenario: Scenario, model: Model, training: Reading) -> None:
        super().bind(scenario, model, training)
        assert isinstance(model, Network)
        assert isinstance(training, Training)
        by_moment = find_statistics(self.curvature).on_head(self.loss) is InputGramStatistics
        solvable = by_moment and training.head_start == "ridge" and model.loss == "mse" and not model.strict
        if self.adapt == "first" and not solvable:
            raise ValueError(
                "adapt='first' needs head_start='ridge', loss='mse', strict=False and a curvature that keeps a head's "
                "E[zzᵀ]: not diagonal, mas or dense."
            )
        # a buffer belongs to class-incremental learning; elsewhere the paper's method has none
        self.kept = Buffer(self.buffer) if self.buffer and scenario == "class-il" else None
        if self.kept is not None and training.head_end == "ridge":
            raise ValueError(
                "head_end='ridge' would solve the head without the buffer; give head_end='trained', as dlcft-replay."
            )
        alone = scenario == "class-il" and self.kept is None
        self.trains_once = self.adapt == "first" or (self.adapt == "auto" and alone and solvable)

    def unused(self) -> dict[str, str]:
        once = (
            "the backbone is trained in the first task only, so its curvature is never used; to use it, also give "
            "adapt='always' or, in 'class-il', a buffer"
        )
        why = dict.fromkeys(("curvature", "draws", "curvature_samples"), once) if self.trains_once else {}
        if self.kept is None:
            replay = "samples are replayed in 'class-il' with a buffer only"
            why |= dict.fromkeys(("balance", "replay_batch", *(("buffer",) if self.buffer else ())), replay)
        return why

    def learn(self, tasks: Sequence[Task], loop: Loop) -> None:
        """See `Method`; with `trains_once`, later tasks solve their heads and leave the backbone."""
        if loop.first or not self.trains_once:
            super().learn(tasks, loop)
            return
        log.info("the backbone is trained in the first task only (adapt=%r): solving the head", self.adapt)
        loop.start_heads(tasks)
        for task in tasks:
            self.start(task)
        self.remember(tasks)

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`(w·L_data + strength·w̄·L_reg)/(w + w̄)` with `L_reg = λ·penalty + (1−λ)·L_replay`, λ the `balance`.

        w is the weight of the new task, w̄ that of all old ones: 1 and t−1 in the paper.
        """
        data = task.loss.value(task.model(batch.x, task.head), batch.y)
        if self.memory is None:
            return data
        old = self.memory.penalty(self._params(task), first_order=self.first_order)
        if self.kept is not None and len(self.kept):
            replayed = replayed_loss(task, self.kept, self.replay_batch, batch.generator)
            old = self.balance * old + (1 - self.balance) * replayed
        new_weight, old_weight = self._weight(task), self.memory.weight
        damped = 0.5 * self.damping * self._distance(task) if self.damping and self.scenario != "class-il" else 0.0
        if self.mean:
            return (new_weight * data + self.strength * old_weight * old) / (new_weight + old_weight) + damped
        return data + self.strength * old_weight * old + damped

    def _distance(self, task: Task) -> Tensor:
        """`‖θ − θ_{t−1}‖²`."""
        assert self.memory is not None
        anchor, params = self.memory.anchor, self._params(task)
        return torch.stack([(params[name] - anchor[name]).square().sum() for name in anchor]).sum()

    def past_of_head(self, task: Task) -> PastOfHead | None:
        """None unless the head's block is `Z ⊗ I` and the model is not strict."""
        name = task.model.head_names(task.head)[0]
        if self.memory is None or name not in self.memory.anchor or task.model.strict:
            return None
        moment = self.memory.curvature.head_moment(name)
        if moment is None:
            return None
        ratio = self.strength * self.memory.weight / (self._weight(task) if self.mean else 1.0)
        return PastOfHead(moment, ratio)

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
            self._curvature_batches(task),
            task.loss,
            task.head,
            draws=self.draws,
            generator=task.generator("curvature"),
            samples=self.curvature_samples,
            total=task.samples,
            include_backbone=not self.trains_once,
            include_head=self._includes_head,
            gradient=self.first_order or self.keep_gradient,
        )
        remember = Memory.of if self.memory is None else self.memory.absorb
        self.memory = remember(params, found.curvature, self._weight(task), found.gradient)
        if self.kept is not None:
            generator = task.generator("buffer")
            for x, y in task.batches:
                self.kept.add(x, y, head=task.head, generator=generator)

    def snapshot(self) -> Quadratic:
        snapshot = copy.copy(self)
        snapshot.kept = copy.deepcopy(self.kept)
        return snapshot

    def state(self) -> State:
        """The memory and the buffer."""
        return joined_states(memory=self.memory, buffer=self.kept)

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        parts = split_states(tensors, header)
        self.memory = Memory.from_state(*parts["memory"]) if "memory" in parts else None
        if "buffer" in parts:
            self.kept = Buffer.from_state(*parts["buffer"])

    def _curvature_batches(self, task: Task) -> Iterable[tuple[Input | None, Tensor]]:
        return _Augmented(task) if self.curvature_augment else _Shared(task.batches)

    @property
    def _includes_head(self) -> bool:
        """Whether the head is remembered: not in task-il, where later tasks never train it."""
        return self.scenario != "task-il"

    def _params(self, task: Task) -> dict[str, torch.nn.Parameter]:
        return task.model.params(task.head if self._includes_head else None)

    def _weight(self, task: Task) -> float:
        return task.weight * (task.samples if self.weigh_by == "samples" else 1.0)


class _Shared:
    """A task's batches, as often as asked for, without the inputs of those that other workers read."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Input | None, Tensor]]:
        return self.batches.with_gaps() if isinstance(self.batches, SampleBatches) else iter(self.batches)


class _Augmented:
    """The same, augmented alike in every pass over them."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __iter__(self) -> Iterator[tuple[Input | None, Tensor]]:
        generator = self.task.generator("augmented curvature")
        for x, y in _Shared(self.task.batches):
            if x is not None:
                yield self.task.augment(x, generator), y
            else:
                self.task.augment(self._like(len(y)), generator)  # the others draw as many numbers
                yield None, y

    def _like(self, count: int) -> Input:
        """So many inputs of the data's shape."""
        assert isinstance(self.task.batches, SampleBatches)
        one = self.task.batches.samples.fetch(torch.tensor([0]))
        return one.expand(count, *one.shape[1:]) if isinstance(one, Tensor) else one
