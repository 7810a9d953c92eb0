"""How a learner learns a task: from the data that is given to a record of what was learned."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.closed_form.depth import Activation
from dlcft.curvature.losses import Loss
from dlcft.data.images import Preprocess
from dlcft.data.labels import Labels
from dlcft.data.samples import Batches, Inputs, Samples
from dlcft.data.sources import Tokenizer
from dlcft.data.streams import Stream, StreamBatches
from dlcft.learner.adopt import centred_head, fitted_scale, margin_scale
from dlcft.learner.build import Builder, as_given
from dlcft.learner.display import Report, reporter
from dlcft.learner.gathering import Gathered, gathered_samples, gathered_stream
from dlcft.learner.gathering import fingerprint as fingerprint_of
from dlcft.learner.heads import HEAD, Heads, Settling
from dlcft.learner.notes import ProgressNotes
from dlcft.learner.records import Adopted, Learned, Record, read_record
from dlcft.learner.state import check_current
from dlcft.learner.train import TrainingLoop, seeded
from dlcft.methods.base import Augment, Method, Task, joined_states, split_states
from dlcft.methods.recipes import Recipe
from dlcft.methods.settings import Features, Scenario
from dlcft.network import workers
from dlcft.network.classifier import Classifier, learned_state
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store


class Learning:
    """What a `Learner` holds, and how it learns; the `Learner` is what users call.

    Attributes:
        recipe: what it learns on, how, and by which method.
        method: with the memory of the past.
        scenario: see `Learner`.
        seed: of everything random.
        device: where the model lies.
        amp: see `Learner`.
        preprocess: see `Learner`.
        tokenizer: see `Learner`.
        new_labels: see `Learner`.
        notes: facts that are saved with it.
        loss: of the outputs.
        tasks: how many were learned.
        history: a record for each time that something was learned or forgotten.
        store: where it was saved or loaded, if it was.
        saved_hash: of the version there that it was saved as or loaded from.
        ahead: whether it has learned something since; its next task cannot be continued from there.
    """

    recipe: Recipe
    method: Method
    scenario: Scenario
    seed: int
    device: torch.device
    amp: bool
    preprocess: Preprocess | None
    tokenizer: Tokenizer | None
    new_labels: str
    notes: dict[str, Any]
    loss: Loss
    tasks: int
    history: list[Record]
    store: Store | None
    saved_hash: str | None
    ahead: bool
    _reading: Preprocess | None
    _augment: Augment
    _builder: Builder
    _model: Classifier | None
    _heads: Heads

    @property
    def model(self) -> Classifier:
        """The classifier. Closed-form methods bring its heads up to date in `solve`.

        Raises:
            ValueError: before the first task.
        """
        if self._model is None:
            raise ValueError("nothing has been learned yet; call learn(data) first.")
        return self._model

    def solve(self) -> None:
        """Bring the heads up to date: closed-form methods solve their regression, unless nothing has changed.

        `outputs`, `predict`, `evaluate` and `save` call it.
        """
        if self._model is not None:
            self.method.solve(self._model)

    def samples(self, data: Any) -> Samples:
        """Labelled data as this learner reads it; accepted wherever data is."""
        if isinstance(data, Samples):
            return data
        return Samples(data, preprocess=self._reading, tokenizer=self.tokenizer)

    def inputs(self, x: Any) -> Inputs:
        """Inputs as this learner reads them; accepted wherever inputs are."""
        return Inputs(x, preprocess=self._reading, tokenizer=self.tokenizer)

    def _gathered(self, data: Any, shares: bool = False) -> Gathered:
        with workers.together():
            samples = Samples.none() if data is None and shares else self.samples(data)
        return gathered_samples(samples, shares=shares)

    def _stream_of(self, data: Any, shares: bool) -> Gathered:
        if not self.recipe.closed_form or (self.tasks == 0 and self._builder.first is not None):
            raise ValueError(
                f"data is a {type(data).__name__}, which is read once, and this method reads its data several times; "
                "closed-form methods with start='pretrained', such as 'dlcft-exact', learn from it."
            )
        reading: dict[str, Any] = {"preprocess": self._reading, "tokenizer": self.tokenizer}
        return gathered_stream(Stream(() if data is None else data, shares=shares, **reading))

    def _learn(self, tasks: dict[str, Gathered], progress: bool | Report, resume: bool, cache: float = 0.0) -> None:
        labels = {head: self._heads.extended(head, given.labels) for head, given in tasks.items()}
        with ExitStack() as held:
            with workers.together():
                if self.store is not None and workers.place() == 0:  # which writes for all
                    held.enter_context(self.store.lock())
                    check_current(self.store, self.saved_hash)
                    if not resume:
                        self.store.clear_progress()
            before, learned = self._snapshot(), False
            try:
                record = self._learn_samples(tasks, labels, progress, cache)
                learned = True
            finally:
                if not learned:  # whatever the reason, an interruption among them
                    self._restore(before)
        self.history.append(workers.from_first(record))
        self.tasks, self.ahead = self.tasks + 1, True

    def _learn_samples(
        self, tasks: dict[str, Gathered], labels: dict[str, Labels], progress: bool | Report, cache: float
    ) -> Learned:
        began, data = time.perf_counter(), fingerprint_of(tasks)
        notes = None if self.store is None or self.ahead else ProgressNotes(self.store, data)
        options: dict[str, Any] = {"amp": self.amp, "notes": notes}
        started = self.tasks == 0 and self._builder.first is not None
        seconds, curve = 0.0, []
        if started:
            first = self._train_start(tasks, labels, reporter(progress), options)
            seconds, curve = first.seconds, first.curve
        if self._model is None:
            self._model = self._build(next(iter(tasks.values())).samples)
        for head in tasks:
            self._grow(head, labels[head])
        todo = [self._task(head, given, labels[head]) for head, given in tasks.items()]
        settings, streams = self.recipe.training, self._stream
        loop = TrainingLoop(self._model, self.method, settings, streams, self.tasks, reporter(progress), **options)
        loop.started, loop.cache = started, cache
        self.method.learn(todo, loop)
        totals = [t.batches.total if isinstance(t.batches, StreamBatches) else t.samples for t in todo]
        count, training = sum(totals), seconds + loop.seconds
        remembering = time.perf_counter() - began - training
        curve, increase = curve + loop.curve, self.method.increase
        return Learned(self.tasks, [*tasks], count, data, curve, increase, training, remembering)

    def _build(self, samples: Samples) -> Classifier:
        """The classifier, from a look at the first samples of the first worker that has any."""
        with workers.together():
            z = self._builder.look_at(samples) if len(samples) else None
        looks = workers.gathered((None if z is None else z.cpu(), self._builder.activations))
        seen, self._builder.activations = next(look for look in looks if look[0] is not None)
        assert seen is not None
        return self._builder.build_on(seen.to(self.device))

    def _train_start(
        self, tasks: dict[str, Gathered], labels: dict[str, Labels], report: Report, options: dict[str, Any]
    ) -> TrainingLoop:
        """Train the plain network on the first task, and go on from there."""
        builder = self._builder.plain()
        recipe = builder.recipe
        model, method = builder.build(next(iter(tasks.values())).samples), recipe.make_method(self.scenario)
        loss, todo = recipe.model.make_loss(), []
        for head, given in tasks.items():
            model.add_head(head, len(labels[head]))
            samples, y = given.samples, labels[head].indices(given.samples.labels)
            batches = Batches(samples, y, recipe.training.batch_size, self.device, dtype=builder.dtype)
            todo.append(Task(model, head, loss, batches, len(samples), self._augment, self._stream))
        loop = TrainingLoop(model, method, recipe.training, self._stream, self.tasks, report, **options)
        loop.prefix = "start_"
        method.learn(todo, loop)
        self._builder.start_from(as_given(builder.backbone), [given.samples for given in tasks.values()])
        return loop

    def _batches(self, samples: Inputs, y: Tensor, size: int, *, own: bool = False, bounded: bool = True) -> Batches:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"batch_size is {size!r}; a whole number from 1 on is needed.")
        return Batches(samples, y, size, self.device, dtype=self._builder.dtype, own=own, bounded=bounded)

    def _task(self, head: str, given: Gathered, labels: Labels) -> Task:
        size = self.recipe.training.batch_size
        if given.stream is not None:
            streamed = StreamBatches(given.stream, size, self.device, self._builder.dtype)
            settle = Settling(self._heads, head, self._grow)
            return Task(self.model, head, self.loss, streamed, 0, self._augment, self._stream, settle=settle)
        y = labels.indices(given.samples.labels)
        batches = self._batches(given.samples, y, size, own=given.own, bounded=self.recipe.closed_form)
        return Task(self.model, head, self.loss, batches, given.total, self._augment, self._stream)

    def _grow(self, head: str, labels: Labels) -> None:
        model = self.model
        if head not in model.heads:
            model.add_head(head, len(labels))
        elif len(labels) > model.head(head).out_features:
            model.grow(head, len(labels))
            self.method.grown(model.head_names(head), len(labels))
        self._heads.labels[head] = labels

    def _stream(self, purpose: str) -> torch.Generator:
        return seeded(self.seed, self.tasks, purpose)

    def _snapshot(self) -> tuple[Any, ...]:
        """Everything that learning changes; a frozen network does not."""
        kept = learned_state(self._builder.backbone) if self._model is None else self._model.state()
        return kept, self._model, copy.copy(self._builder), dict(self._heads.labels), self.method.snapshot()

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        kept, self._model, self._builder, self._heads.labels, self.method = snapshot
        if self._model is None:
            self._builder.backbone.load_state_dict(kept, strict=False)
        else:
            self._model.load_state(*kept)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, and a header that JSON can hold: all that `load` needs beside the backbone."""
        started = None if self._builder.started is None else self._builder
        looked = self._builder.activations
        tensors, parts = joined_states(model=self._model, method=self.method, start=started)
        return tensors, {
            "backbone": self._builder.fingerprint,
            "recipe": self.recipe.to_dict(),
            "scenario": self.scenario,
            "new_labels": self.new_labels,
            "seed": self.seed,
            "amp": self.amp,
            "train": self._builder.train,
            "preprocess": None if self.preprocess is None else self.preprocess.to_dict(),
            "width": self._builder.width,
            "activations": None if looked is None else [one.to_json() for one in looked],
            "labels": {head: labels.names for head, labels in self._heads.labels.items()},
            "tasks": self.tasks,
            "history": [record.to_dict() for record in self.history],
            "notes": self.notes,
            "parts": parts,
        }

    def _load_state(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        parts = split_states(tensors, header["parts"])
        if "start" in parts:
            self._builder.load_state(*parts["start"])
        if header.get("activations") is not None:
            self._builder.activations = [Activation.from_json(one) for one in header["activations"]]
        if header["width"] is not None:
            self._model = self._builder.build_on(torch.zeros(2, header["width"]).to(self.device, self._builder.dtype))
            self._model.load_state(*parts["model"])
            own, described = parts["method"]
            self.method.load_state({name: t.to(self.device) for name, t in own.items()}, described, self._model)
        self._heads.labels = {head: Labels().append(names) for head, names in header["labels"].items()}
        self._check_heads()
        self.history = [read_record(content) for content in header["history"]]
        self.tasks, self.notes = header["tasks"], header["notes"]

    def _check_heads(self) -> None:
        """Refuse heads whose labels are not as many as their outputs, or repeat."""
        heads = {} if self._model is None else {name: self._model.head(name).out_features for name in self._model.heads}
        named = {head: len(set(labels.names)) for head, labels in self._heads.labels.items()}
        if heads != named:
            raise CheckpointError(f"a learner was saved with heads of {heads} outputs, and {named} different labels.")

    @torch.no_grad()
    def _adopt(self, layer: nn.Linear, labels: Labels, samples: Samples | None, weight: float) -> None:
        part = self.recipe.model
        if isinstance(part, Features) and not part.keeps_features:
            raise ValueError("ranpac does not see the features that the head was made for; take another method.")
        factor = margin_scale(len(labels), part.scale)
        if samples is None:
            z = torch.randn(2, layer.in_features, generator=self._stream("direction"))
            self._model = self._builder.build_on(z.to(layer.weight))
        else:
            unknown = labels.unknown(samples.labels)
            if unknown:
                raise ValueError(f"a sample has the label {unknown[0]!r}, which is not among the model's labels.")
            self._model = self._builder.build(samples)
            batches = self._batches(samples, labels.indices(samples.labels), self.recipe.training.batch_size)
            logits = torch.cat([layer(self._builder.features(x)).float().cpu() for x, _ in batches])
            factor = fitted_scale(logits, batches.y, part.scale)
            if factor <= 0:
                raise ValueError("the sample's labels contradict the classifier's answers; are `labels` in its order?")
        if not self.loss.is_quadratic:
            factor = 1.0
        self._grow(HEAD, labels)
        own, (w, b) = self._model.head(HEAD), centred_head(layer)
        own.weight.copy_(factor * torch.cat([w, w.new_zeros(len(w), own.in_features - w.shape[1])], 1))
        own.bias.copy_(factor * b)
        given = None if samples is None else gathered_samples(samples, shares=False)
        task = None if given is None else replace(self._task(HEAD, given, labels), weight=weight)
        with torch.enable_grad():
            self.method.adopted(self._model, HEAD, task)
        count, known = (0, None) if given is None else (given.total, fingerprint_of({HEAD: given}))
        self.history.append(Adopted(0, [HEAD], len(labels), count, known, weight, factor))
        self.tasks = 1

    def _ready(self, head: str | None) -> tuple[str, Classifier]:
        """A known head, and the model with its heads solved."""
        name = self._heads.known(head)
        self.solve()
        return name, self.model.eval()

    def _check_known(self) -> None:
        """Refuse to answer from nothing: of equal outputs the first label would win."""
        if self.method.empty:
            raise ValueError("nothing is known any more, because all samples were forgotten; call learn(data) first.")
