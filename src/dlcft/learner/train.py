"""The one training loop. It belongs to no method, and every step's randomness depends on its position alone.

Hence an interrupted run continues from any position, given the parameters and the optimiser's state there, and ends as
it would have ended.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from dlcft.curvature.losses import ScaledMSE
from dlcft.data.augment import Augmentation
from dlcft.data.samples import Batches, to_device
from dlcft.learner.display import Progress, Report
from dlcft.learner.head import head_matrix, solve_trained, start_from_ridge
from dlcft.learner.notes import ProgressNotes
from dlcft.learner.parts import Parts
from dlcft.methods.base import Batch, Method, Task
from dlcft.methods.settings import Reading, Training
from dlcft.network import workers
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input, reference
from dlcft.network.linearize import Linearized
from dlcft.network.values import NotKept, Values

log = logging.getLogger("dlcft")

Tensors = dict[str, Tensor]
Streams = Callable[[str], torch.Generator]


@dataclass
class Position:
    """A position between two steps.

    Attributes:
        epoch: how many epochs are complete.
        step: how many steps of the current epoch are done.
        total: the sum of the objective over the samples of the current epoch.
        seen: how many samples these are.
        curve: the mean objective of every complete epoch.
        lr: the learning rate of this task, if it is not the setting's.
    """

    epoch: int = 0
    step: int = 0
    total: float = 0.0
    seen: int = 0
    curve: list[float] = field(default_factory=list)
    lr: float | None = None


class Run:
    """Training of one task (or of several at once, each on its own head) from a position to the end.

    Args:
        model: the classifier.
        method: gives the objective.
        tasks: their batches must be `Batches`.
        settings: optimiser, schedule, epochs, batch size.
        streams: gives the random stream of a purpose.
        amp: whether to train in bfloat16 where autocast does.
        batchnorm: whether BatchNorm learns its statistics.
        first: whether it is the first task.
        prefix: of the settings' names in messages.
        cache: the most bytes of frozen layers' values that are kept.
    """

    def __init__(
        self,
        model: Classifier,
        method: Method,
        tasks: Sequence[Task],
        settings: Training,
        streams: Streams,
        *,
        amp: bool = False,
        batchnorm: bool = False,
        first: bool = False,
        prefix: str = "",
        cache: float = 0.0,
    ) -> None:
        self.model, self.method, self.tasks, self.settings, self.streams = model, method, tasks, settings, streams
        self.amp, self.batchnorm, self.prefix, self.cache = amp, batchnorm, prefix, cache
        self.device = reference(model).device
        heads = [head for task in tasks for head in method.heads(task)]
        self.params = {name: p for head in heads for name, p in model.params(head).items()}
        self.optimizer = _optimizer(settings, list(self.params.values()))
        self.epoch_steps = sum(len(self._sizes(task)) for task in tasks)
        self.steps = settings.steps or settings.epochs * self.epoch_steps
        self.steps *= settings.first_times if first else 1
        self.position = Position()
        self.values: Values | None = None

    def to_end(self, report: Report, number: int, note: Callable[[], None] = lambda: None) -> list[float]:
        """Train to the end.

        Args:
            report: called after every step.
            number: of the task.
            note: called between steps.

        Returns:
            The mean objective of every epoch.

        Raises:
            FloatingPointError: when the objective stops being finite.
        """
        at, epochs = self.position, -(-self.steps // self.epoch_steps)
        self.values = self._keep_values() if self.cache and self.steps > self.epoch_steps else None
        if self.settings.careful and at == Position():
            at.lr = self._careful_lr()
        self.model.eval()  # dropout too: its randomness would not be of the position alone
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):
                module.train(self.batchnorm)
        done = self.epoch_steps * at.epoch + at.step
        started, first = time.perf_counter(), done
        while at.epoch < epochs:
            last = self.steps - self.epoch_steps * at.epoch  # the last epoch may be a part of one
            for task, indices in self._order(at.epoch)[at.step : last]:
                value = self._step(task, indices, done)
                at.total, at.seen, at.step = at.total + value * len(indices), at.seen + len(indices), at.step + 1
                done += 1
                left = (time.perf_counter() - started) / (done - first) * (self.steps - done)
                report(Progress(number, at.epoch + 1, epochs, at.total / at.seen, done / self.steps, left))
                note()
            at.curve.append(at.total / at.seen)
            log.info("task %d, epoch %d of %d: loss %.4g", number + 1, at.epoch + 1, epochs, at.curve[-1])
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
        whole, rest = divmod(task.samples, self.settings.batch_size)
        sizes = [self.settings.batch_size] * whole + [rest] * (rest > 0)
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
        """The objective on a batch; with several workers, this one's part of it: theirs add up to the whole.

        A worker for which nothing is left takes one sample that counts zero times, so that all draw the same numbers.
        """
        data = task.batches
        assert isinstance(data, Batches)
        generator = self.streams(f"step {done}")
        places = torch.arange(len(indices)).tensor_split(workers.count())[workers.place()]
        share = len(places) / len(indices)
        places = places if len(places) else torch.tensor([0])
        original = to_device(data.samples.fetch(indices[places]), self.device, dtype=data.dtype)
        x = _augmented_part(task, original, places, len(indices), generator)
        last = done >= self.steps - self.epoch_steps
        y = data.y[indices[places]].to(self.device)
        batch = Batch(x, original, y, self.position.epoch, generator, last, share > 0)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp), self._recalling(x, indices):
            objective = self.method.objective(task, batch)
        return objective if workers.count() == 1 else share * objective, batch

    def _keep_values(self) -> Values | None:
        """The values of the frozen layers for all samples, by one pass over them; None if they are not kept."""
        (task, *others), backbone = self.tasks, self.model.backbone
        whole = self.settings.augment == "none" and not self.amp and not others and workers.count() == 1
        if not isinstance(backbone, Linearized) or not whole:
            log.warning(
                "values of frozen layers are not kept: that is for one task on a linearised network, with "
                "augment='none', in full precision and one process"
            )
            return None
        few = torch.arange(min(64, task.samples))
        assert isinstance(task.batches, Batches)
        one, other = (tree_leaves(task.batches.samples.fetch(few)) for _ in range(2))
        if not all(map(torch.equal, one, other)):
            log.warning("values of frozen layers are not kept: the samples differ each time they are read")
            return None
        try:
            values = Values(backbone, (x for x, _ in task.batches), task.samples, self.cache)
        except NotKept as why:
            log.warning("values of frozen layers are not kept: %s", why)
            return None
        log.info("values of frozen layers are kept in %.2f GB", values.bytes / 1e9)
        return values

    def _recalling(self, x: Input, indices: Tensor) -> AbstractContextManager[None]:
        if self.values is None or not isinstance(x, Tensor):
            return nullcontext()
        return self.values.recalled(x, indices.to(x.device))

    def _gradients(self, task: Task, indices: Tensor, done: int) -> tuple[float, Batch]:
        """The objective's value on a batch, its gradients in the parameters, and the batch."""
        self.optimizer.zero_grad()
        with workers.together():
            objective, batch = self._objective(task, indices, done)
            if objective.isfinite():  # otherwise who calls tells
                objective.backward()
        value = objective.detach().clone()
        if workers.count() > 1:
            for p in self.params.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            workers.add_up([value, *(p.grad for p in self.params.values() if p.grad is not None)])
        return value.item(), batch

    def _careful_lr(self) -> float:
        """The recipe's learning rate, or less: with it a first step ends where the first batch's objective is least.

        Along a step θ + t·s a quadratic objective is `L + t⟨g, s⟩ + t²·bend`, least at `t = −⟨g, s⟩ / (2·bend)`.
        """
        task, indices = self._order(0)[0]
        kept = {name: p.detach().clone() for name, p in self.params.items()}
        before, _ = self._gradients(task, indices, 0)
        self.optimizer.step()
        with torch.no_grad():
            after = self._objective(task, indices, 0)[0].detach().clone()
            workers.add_up([after])
            changes = [(p.grad, p - kept[name]) for name, p in self.params.items() if p.grad is not None]
            slope = sum(float((grad * change).sum()) for grad, change in changes)
            for name, p in self.params.items():
                p.copy_(kept[name])
        self.optimizer.state.clear()
        bend = after.item() - before - slope
        return self.settings.lr * min(1.0, -slope / (2 * bend)) if bend > 0 and slope < 0 else self.settings.lr

    def _step(self, task: Task, indices: Tensor, done: int) -> float:
        value, batch = self._gradients(task, indices, done)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"training diverged in epoch {batch.epoch + 1} (the loss is {value}) with {self.prefix}lr="
                f"{self.settings.lr}; the learner is as it was before this task. Try a smaller {self.prefix}lr or "
                f"{self.prefix}clip=1.0."
            )
        self._set_lr(done)
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.settings.clip)
        self.optimizer.step()
        self.method.observe(task, batch)
        return value

    def _set_lr(self, done: int) -> None:
        share = 1 - done / self.steps
        if self.settings.schedule == "cosine":
            share = (1 + math.cos(math.pi * done / self.steps)) / 2
        if self.settings.schedule == "constant":
            share = 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = share * (self.settings.lr if self.position.lr is None else self.position.lr)


@dataclass
class TrainingLoop:
    """The loop that a method is given: see `methods.Loop`.

    Attributes:
        model: the classifier.
        method: gives the objective.
        settings: of a trained method; closed form never asks for the loop.
        streams: gives the random stream of a purpose.
        number: of the task, from 0.
        report: called after every step.
        amp: see `Run`.
        notes: where progress is noted, if anywhere.
        prefix: see `Run`.
        cache: see `Run`.
        started: whether the first task has trained the plain network, so that only its heads are to be solved.
        curve: the mean objective of every epoch, once trained.
        seconds: of starting the heads and training.
        origins: `head_matrix` of each head before the task.
        gathering: how far a closed-form method has gathered its sums.
    """

    model: Classifier
    method: Method
    settings: Reading
    streams: Streams
    number: int
    report: Report
    amp: bool = False
    notes: ProgressNotes | None = None
    prefix: str = ""
    cache: float = 0.0
    started: bool = False
    curve: list[float] = field(default_factory=list)
    seconds: float = 0.0
    origins: Tensors = field(default_factory=dict)
    gathering: Parts | None = None

    @property
    def first(self) -> bool:
        """Whether no task was learned before."""
        return self.number == 0

    def start_heads(self, tasks: Sequence[Task]) -> None:
        started = time.perf_counter()
        for task in tasks:
            loss = task.loss
            self.origins[task.head] = head_matrix(self.model.head(task.head))
            if isinstance(loss, ScaledMSE) and (self.started or self._training.head_start == "ridge"):
                start_from_ridge(task, loss.scale, self.method.past_of_head(task), keep=not self.method.refits_heads)
        self.seconds += time.perf_counter() - started

    def train(self, tasks: Sequence[Task]) -> None:
        if self.started:
            return
        started = time.perf_counter()
        # BatchNorm learns its statistics in the first task only, if at all; in a linearised network it is folded
        plain = not isinstance(self.model.backbone, Linearized)
        several = self._training.batch_size > 1 and all(task.samples > 1 for task in tasks)  # one has no variance
        batchnorm = plain and self._training.batchnorm == "first" and self.first and several
        if batchnorm and workers.count() > 1 and any(isinstance(m, _BatchNorm) for m in self.model.modules()):
            raise ValueError(
                "with several workers BatchNorm cannot learn its statistics; take batchnorm='frozen', and for "
                "linearised and closed-form methods start='pretrained'."
            )
        options: dict[str, Any] = {"amp": self.amp, "batchnorm": batchnorm, "first": self.first, "cache": self.cache}
        run = Run(self.model, self.method, tasks, self._training, self.streams, prefix=self.prefix, **options)
        if self.notes is None:
            self.curve = run.to_end(self.report, self.number)
        else:
            self._go_on(run, self.notes)
            parts: dict[str, Any] = {"model": self.model, "training": run}
            parts |= {"method": self.method} if self.method.gathers else {}
            note = functools.partial(self.notes.write, **parts)
            self.curve = run.to_end(self.report, self.number, note)
            note(now=True)  # before the memory is made, which may take as long as an epoch
        for task in tasks:
            # through a strict model's head ψ acts by W0, which is fixed
            if isinstance(task.loss, ScaledMSE) and self._training.head_end == "ridge" and not self.model.strict:
                origin, past = self.origins[task.head], self.method.past_of_head(task)
                solve_trained(task, task.loss.scale, origin, past, keep=not self.method.refits_heads)
        self.seconds += time.perf_counter() - started

    def parts(self, task: Task) -> Iterator[Task]:
        if self.gathering is None:
            self.gathering = Parts(self.model, self.method, self.number, self.report, self.notes)
        return self.gathering.of(task)

    def _go_on(self, run: Run, notes: ProgressNotes) -> None:
        """Bring a run to its last note, if there is one."""
        with notes.last() as found:
            if found:
                self.model.load_state_dict(found["model"][0], strict=False)
                run.load_state(*found["training"])
                if self.method.gathers:
                    self.method.load_state(*found["method"], self.model)

    @property
    def _training(self) -> Training:
        assert isinstance(self.settings, Training)
        return self.settings


def seeded(*key: object) -> torch.Generator:
    """A generator that depends on a key alone, such as seed, task and purpose, and on nothing that came before."""
    text = "/".join(map(str, key)).encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)


def augmented(augmentation: Augmentation, x: Input, generator: torch.Generator) -> Input:
    """An augmented batch of images; other inputs stay as they are."""
    return augmentation(x, generator) if isinstance(x, Tensor) and x.dim() == 4 else x


def _augmented_part(task: Task, x: Input, places: Tensor, size: int, generator: torch.Generator) -> Input:
    """The rows of an augmented batch at some places, as if the whole batch were there: random numbers go by place."""
    if len(places) == size or not isinstance(x, Tensor):
        return task.augment(x, generator)
    whole = x.new_zeros(size, *x.shape[1:])
    whole[places] = x
    augmented = task.augment(whole, generator)
    assert isinstance(augmented, Tensor)
    return augmented[places]


def _optimizer(settings: Training, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(params, lr=settings.lr, betas=(0.9, 0.999), weight_decay=settings.weight_decay)
    return torch.optim.SGD(params, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
