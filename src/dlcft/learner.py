"""The learner: one training loop for every method. No mathematics, no reference to the data once it is learned."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from dlcft.augment import Augmentation
from dlcft.classifier import Classifier, Input, call
from dlcft.data import Batches, Label, Labels, Samples, to_device
from dlcft.linearize import Linearized
from dlcft.methods import Batch, Method, Task
from dlcft.prepare import fold_batchnorm
from dlcft.progress import Progress, Report, reporter
from dlcft.recipes import RECIPES, Recipe, Scenario
from dlcft.ridge import RIDGES, RidgeSums
from dlcft.tangent import Projection

log = logging.getLogger("dlcft")
HEAD = "main"


class Learner:
    """Learns task after task from a pre-trained backbone, without keeping their data.

    Args:
        backbone: any module that maps a batch to feature vectors. It is copied.
        method: a name in `RECIPES`, or a `Recipe`.
        scenario: "class-il" (one head that grows with new labels), "data-il" (one head, the labels of the first
            task), or "task-il" (one head a task, named when learning and predicting).
        new_labels: "grow" or "error", for labels that a later task brings; "error" is the default of "data-il".
        seed: fixes everything random.
        device: "auto", "cpu", "cuda" or "mps".
        amp: train in bfloat16 where the device's autocast does.
        train: which of the backbone's parameters learn, see `Linearized`; linearised recipes only.
        custom: a `Method` of one's own in place of the recipe's.
        settings: fields of the `Recipe` to change, such as `epochs=10`.

    Raises:
        ValueError: when a name or setting is not known.

    Example:
        >>> backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        >>> learner = Learner(backbone, "dlcft", epochs=2)
        >>> x = torch.randn(20, 4)
        >>> learner.learn((x, ["cat", "dog"] * 10))
        >>> learner.learn((x, ["dog", "owl"] * 10))
        >>> learner.labels()
        ['cat', 'dog', 'owl']
        >>> len(learner.predict(x))
        20
    """

    def __init__(
        self,
        backbone: nn.Module,
        method: str | Recipe = "dlcft",
        *,
        scenario: Scenario = "class-il",
        new_labels: str | None = None,
        seed: int = 0,
        device: str = "auto",
        amp: bool = False,
        train: Any = None,
        custom: Method | None = None,
        **settings: Any,
    ) -> None:
        if scenario not in ("data-il", "task-il", "class-il"):
            raise ValueError(f"scenario is {scenario!r}; it must be 'data-il', 'task-il' or 'class-il'.")
        if new_labels not in (None, "grow", "error"):
            raise ValueError(f"new_labels is {new_labels!r}; it must be 'grow' or 'error'.")
        if isinstance(method, str) and method not in RECIPES:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(RECIPES)}.")
        self.recipe = (RECIPES[method] if isinstance(method, str) else method).with_settings(settings)
        self.scenario: Scenario = scenario
        self.new_labels = new_labels or ("error" if scenario == "data-il" else "grow")
        self.seed = seed
        self.device = _device(device)
        self.amp = amp
        self.loss = self.recipe.make_loss()
        self.method = custom if custom is not None else self.recipe.make_method(scenario)
        self.augment = Augmentation(self.recipe.augment)
        self.tasks = 0
        self.history: list[dict[str, Any]] = []
        self._backbone = self._prepared(backbone, train)
        self._model: Classifier | None = None
        self._labels: dict[str, Labels] = {}

    @property
    def model(self) -> Classifier:
        """The classifier.

        Raises:
            ValueError: before the first task.
        """
        if self._model is None:
            raise ValueError("nothing has been learned yet; call learn(data) first.")
        return self._model

    def labels(self, head: str = HEAD) -> list[Label]:
        """The label names of a head, in the order of its outputs."""
        return list(self._labels[self._known(head)].names)

    def learn(self, data: Any, *, head: str | None = None, progress: bool | Report = True) -> None:
        """Learn one task; its data is not kept.

        Args:
            data: see `Samples`.
            head: the task's name in "task-il"; not given otherwise.
            progress: a function to call, or whether to show a line on a terminal.

        Raises:
            ValueError: when the data does not fit, or brings labels that may not be new.
            FloatingPointError: when training diverges; the learner is then as it was before.
        """
        self._learn({self._head(head): Samples(data)}, progress)

    def learn_jointly(self, tasks: Mapping[str, Any], *, progress: bool | Report = True) -> None:
        """Learn several tasks at once, each on its own head: the upper bound of "task-il".

        Raises:
            ValueError: in another scenario.
        """
        if self.scenario != "task-il":
            raise ValueError(f"learn_jointly is for 'task-il'; in {self.scenario!r} join the data and call learn.")
        self._learn({self._head(head): Samples(data) for head, data in tasks.items()}, progress)

    @torch.no_grad()
    def outputs(self, x: Any, *, head: str | None = None, batch_size: int = 256) -> Tensor:
        """The head's outputs for inputs: a tensor or array (or tuple or dict of them)."""
        name = self._known(head)
        samples = Samples((x, [0] * _length(x)))
        self.model.eval()
        batches = Batches(samples, torch.zeros(len(samples), dtype=torch.long), batch_size, self.device)
        return torch.cat([self.model(part, name).float().cpu() for part, _ in batches])

    def predict(self, x: Any, *, head: str | None = None) -> list[Label]:
        """The label of each input."""
        names = self._labels[self._known(head)].names
        return [names[index] for index in self.outputs(x, head=head).argmax(1).tolist()]

    @torch.no_grad()
    def evaluate(self, data: Any, *, head: str | None = None, batch_size: int = 256) -> dict[str, float]:
        """Accuracy and mean loss on labelled data; a label that was never learned counts as an error."""
        name = self._known(head)
        samples = Samples(data)
        labels = self._labels[name]
        known = [label if not labels.unknown([label]) else labels.names[0] for label in samples.labels]
        seen = torch.tensor([not labels.unknown([label]) for label in samples.labels])
        y = labels.indices(known)
        self.model.eval()
        right, total = 0, 0.0
        for start, (x, target) in zip(
            range(0, len(samples), batch_size), Batches(samples, y, batch_size, self.device), strict=True
        ):
            outputs = self.model(x, name)
            hit = (outputs.argmax(1) == target).cpu() & seen[start : start + batch_size]
            right += int(hit.sum())
            total += len(target) * float(self.loss.value(outputs, target))
        return {"accuracy": right / len(samples), "loss": total / len(samples)}

    def predicted_increase(self) -> float | None:
        """How much the last task has raised the old tasks' mean loss, by the memory alone; None if there is none."""
        return self.method.increase

    def _prepared(self, backbone: nn.Module, train: Any) -> nn.Module:
        if not isinstance(backbone, nn.Module):
            raise TypeError(f"the backbone is a {type(backbone).__name__}; an nn.Module is needed.")
        if self.recipe.linear:
            return Linearized(fold_batchnorm(backbone), train=train).to(self.device)
        if train is not None:
            raise ValueError("train= is for linearised recipes.")
        plain = copy.deepcopy(backbone).to(self.device)
        return plain.requires_grad_(self.recipe.method != "ridge")

    def _head(self, head: str | None) -> str:
        if (self.scenario == "task-il") != (head is not None):
            raise ValueError(
                "in 'task-il' every task needs a head= name."
                if head is None
                else f"head= is for 'task-il', not {self.scenario!r}."
            )
        return HEAD if head is None else head

    def _known(self, head: str | None) -> str:
        name = HEAD if head is None and self.scenario != "task-il" else head
        if name is None or name not in self._labels:
            raise ValueError(f"head is {head!r}; learned so far: {', '.join(self._labels) or 'none'}.")
        return name

    def _learn(self, tasks: dict[str, Samples], progress: bool | Report) -> None:
        labels = {head: self._extended(head, samples) for head, samples in tasks.items()}
        kept, learned = self._snapshot(), False
        try:
            self._build(next(iter(tasks.values())))
            contexts = [self._context(head, samples, labels[head]) for head, samples in tasks.items()]
            started = time.perf_counter()
            for context in contexts:
                self._initialise(context)
                self.method.start(context)
            curve = self._train(contexts, progress) if self.method.trains else []
            trained = time.perf_counter()
            self.method.increase = None
            for context in contexts:
                self.method.finish(context)
            learned = True
        finally:
            if not learned:  # whatever the reason, an interruption among them
                self._restore(kept)
        self.history.append(
            {
                "task": self.tasks,
                "heads": list(tasks),
                "samples": sum(len(s) for s in tasks.values()),
                "loss": curve,
                "predicted_increase": self.method.increase,
                "seconds_training": trained - started,
                "seconds_remembering": time.perf_counter() - trained,
            }
        )
        self.tasks += 1

    def _extended(self, head: str, samples: Samples) -> Labels:
        labels = self._labels.get(head, Labels())
        new = labels.unknown(samples.labels)
        if new and len(labels) and self.new_labels == "error":
            raise ValueError(f"label {new[0]!r} is new; with new_labels='error' only {labels.names[:10]} are accepted.")
        return labels.append(new)

    def _build(self, samples: Samples) -> None:
        """The classifier is made when the first batch tells how long the features are."""
        if self._model is not None:
            return
        with torch.no_grad():
            self._backbone.eval()
            z = call(self._backbone, to_device(samples.fetch(torch.arange(1)), self.device))
        if not isinstance(z, Tensor) or z.dim() != 2:
            got = f"a tensor of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise ValueError(f"the backbone must map a batch to a batch × features matrix; it gave {got}.")
        backbone, features = self._backbone, z.shape[1]
        if self.recipe.projection:
            backbone = Projection(backbone, features, self.recipe.projection, self._stream("projection", task=-1))
            features = self.recipe.projection
        self._model = Classifier(backbone, features, strict=self.recipe.strict).to(self.device)

    def _context(self, head: str, samples: Samples, labels: Labels) -> Task:
        if head not in self.model.heads:
            self.model.add_head(head, len(labels))
        elif len(labels) > self.model.head(head).out_features:
            self.model.grow(head, len(labels))
            self.method.grown(self.model.head_names(head), len(labels))
        self._labels[head] = labels
        y = labels.indices(samples.labels)
        batches = Batches(samples, y, self.recipe.batch_size, self.device)
        return Task(self.model, head, self.loss, batches, len(samples), self._augmented, self._stream)

    def _initialise(self, task: Task) -> None:
        """A head that has learned nothing starts from the ridge solution, where the recipe says so."""
        layer = task.model.head(task.head)
        if (
            self.recipe.head != "ridge"
            or bool(layer.weight.any())
            or not self.method.trains
            or not self.loss.is_quadratic
        ):
            return
        task.model.eval()
        with torch.no_grad():
            sums = RidgeSums.empty(layer.in_features, device=self.device)
            sums = sums.extend((task.model.features(x), y) for x, y in task.batches)
            weight, bias = sums.solve(sums.choose_ridge(RIDGES), scale=self.recipe.scale)
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
            if self.recipe.strict:
                task.model.fix_directions(task.head, layer.weight)

    def _train(self, tasks: list[Task], progress: bool | Report) -> list[float]:
        recipe, model = self.recipe, self.model
        params = {name: p for task in tasks for name, p in model.params(task.head).items()}
        optimizer = _optimizer(recipe, list(params.values()))
        steps = [-(-task.samples // recipe.batch_size) for task in tasks]
        schedule: LRScheduler | None = None
        if recipe.schedule == "cosine":
            schedule = CosineAnnealingLR(optimizer, recipe.epochs * sum(steps))
        report = reporter(progress)
        self._set_mode()
        curve, done, started = [], 0, time.perf_counter()
        for epoch in range(recipe.epochs):
            total, seen = 0.0, 0
            for task, indices in self._order(tasks, epoch):
                value = self._step(task, indices, epoch, optimizer, params)
                if schedule is not None:
                    schedule.step()
                total, seen, done = total + value * len(indices), seen + len(indices), done + 1
                share = done / (recipe.epochs * sum(steps))
                left = (time.perf_counter() - started) * (1 - share) / share
                report(Progress(self.tasks, epoch + 1, recipe.epochs, total / seen, share, left))
            curve.append(total / seen)
            log.info("task %d, epoch %d of %d: loss %.4g", self.tasks, epoch + 1, recipe.epochs, curve[-1])
        model.eval()
        return curve

    def _order(self, tasks: list[Task], epoch: int) -> list[tuple[Task, Tensor]]:
        generator = self._stream(f"order {epoch}")
        batches = [
            (task, indices)
            for task in tasks
            for indices in torch.randperm(task.samples, generator=generator).split(self.recipe.batch_size)
        ]
        if len(tasks) > 1:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        self._augmentation = self._stream(f"augmentation {epoch}")
        return batches

    def _step(
        self,
        task: Task,
        indices: Tensor,
        epoch: int,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, nn.Parameter],
    ) -> float:
        data = task.batches
        assert isinstance(data, Batches)
        original = to_device(data.samples.fetch(indices), self.device)
        batch = Batch(self._augmented(original, self._augmentation), original, data.y[indices].to(self.device), epoch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            objective = self.method.objective(task, batch)
        value = objective.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"training diverged in epoch {epoch + 1} (the loss is {value}) with lr={self.recipe.lr}; the learner "
                "is as it was before this task. Try a smaller lr or clip=1.0."
            )
        optimizer.zero_grad()
        objective.backward()
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(params.values(), self.recipe.clip)
        optimizer.step()
        self.method.observe(task, batch)
        return value

    def _set_mode(self) -> None:
        """BatchNorm learns its statistics in the first task only, if at all."""
        self.model.train(not self.recipe.linear and self.recipe.batchnorm == "first" and self.tasks == 0)

    def _augmented(self, x: Input, generator: torch.Generator) -> Input:
        return self.augment(x, generator) if isinstance(x, Tensor) and x.dim() == 4 else x

    def _stream(self, purpose: str, task: int | None = None) -> torch.Generator:
        """A generator that depends on the seed, the task and the purpose, and on nothing that came before."""
        key = f"{self.seed}/{self.tasks if task is None else task}/{purpose}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        return torch.Generator().manual_seed(seed)

    def _snapshot(self) -> tuple[Any, ...]:
        """Everything that learning changes; the frozen network is not among it."""
        module = self._backbone if self._model is None else self._model
        tensors = {n: t.detach().clone() for n, t in module.state_dict().items() if "base." not in n}
        heads = {} if self._model is None else {n: self._model.head(n).out_features for n in self._model.heads}
        return tensors, heads, self._model, dict(self._labels), self.method.snapshot()

    def _restore(self, kept: tuple[Any, ...]) -> None:
        tensors, heads, self._model, self._labels, self.method = kept
        if self._model is not None:
            for name in list(self._model.heads):
                del self._model.heads[name]
            for name, outputs in heads.items():
                self._model.add_head(name, outputs)
        (self._backbone if self._model is None else self._model).load_state_dict(tensors, strict=False)


def _optimizer(recipe: Recipe, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimizer == "adam":
        return torch.optim.Adam(params, lr=recipe.lr, betas=(0.9, 0.999), weight_decay=recipe.weight_decay)
    return torch.optim.SGD(params, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(repr(n) for n, there in available.items() if there)
        raise ValueError(f"device is {name!r}; it must be 'auto' or, on this machine, one of {usable}.")
    return torch.device(name)


def _length(x: Any) -> int:
    if isinstance(x, Mapping):
        return len(next(iter(x.values())))
    return len(x[0]) if isinstance(x, tuple) else len(x)
