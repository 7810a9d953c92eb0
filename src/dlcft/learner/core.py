"""What a learner is made of: settings, the classifier with its labels, training, and all of it as a state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.data.augment import Augmentation
from dlcft.data.images import Preprocess, UnitImages
from dlcft.data.labels import Labels
from dlcft.data.samples import Batches, Inputs, Samples, to_device
from dlcft.data.sources import Tokenizer
from dlcft.learner.adopt import centred_head, fitted_scale, margin_scale
from dlcft.learner.build import (
    DIRECTION_SAMPLES,
    assembled,
    fingerprint,
    first_features,
    named_selection,
    prepared,
    start_from_ridge,
)
from dlcft.learner.progress import Report
from dlcft.learner.state import Home
from dlcft.learner.train import Training, augmented
from dlcft.methods import Finetune, Method, Ridge, Task
from dlcft.methods.base import joined_states, split_states
from dlcft.methods.recipes import Recipe, Scenario, named_recipe
from dlcft.methods.ridge import Origin
from dlcft.network.classifier import Classifier, learned_state
from dlcft.network.inputs import reference
from dlcft.network.linearize import Selection

HEAD = "main"
_TOGETHER = 32  # samples whose features are looked at first: large images must not need more memory than learning them


class LearnerCore:
    """The inside of a `Learner`, whose arguments it takes."""

    def __init__(
        self,
        backbone: nn.Module,
        method: str | Recipe = "dlcft-exact",
        *,
        scenario: Scenario = "class-il",
        new_labels: str | None = None,
        seed: int = 0,
        device: str = "auto",
        amp: bool = False,
        train: Selection = None,
        preprocess: Preprocess | None = None,
        tokenizer: Tokenizer | None = None,
        custom: Method | None = None,
        **settings: Any,
    ) -> None:
        if scenario not in ("data-il", "task-il", "class-il"):
            raise ValueError(f"scenario is {scenario!r}; it must be 'data-il', 'task-il' or 'class-il'.")
        if new_labels not in (None, "grow", "error"):
            raise ValueError(f"new_labels is {new_labels!r}; it must be 'grow' or 'error'.")
        self.recipe = named_recipe(method, settings) if isinstance(method, str) else method.with_settings(settings)
        self.scenario: Scenario = scenario
        self.new_labels = new_labels or ("error" if scenario == "data-il" else "grow")
        self.seed = seed
        self.device = _device(device)
        self.amp = amp
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        # the backbone normalises, so that augmentation comes before
        self._reading = preprocess
        if preprocess is not None and preprocess.mean is not None:
            kind = UnitImages if max(preprocess.mean) <= 1 else Preprocess
            self._reading = kind(**{**asdict(preprocess), "mean": None, "std": None})
        self.loss = self.recipe.make_loss()
        self.method = custom if custom is not None else self.recipe.make_method(scenario)
        self.tasks = 0
        self.history: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self._augment = augmented(Augmentation(self.recipe.augment))
        self._train_choice = named_selection(backbone, train)
        self._backbone = prepared(backbone, self.recipe, self._train_choice, preprocess).to(self.device)
        self._dtype = reference(self._backbone).dtype
        self._fingerprint = fingerprint(backbone)
        self._model: Classifier | None = None
        self._width: int | None = None
        self._labels: dict[str, Labels] = {}
        self._home: Home | None = None

    @property
    def directory(self) -> Path | None:
        """Where it was saved or loaded; None if neither."""
        return None if self._home is None else self._home.store.directory

    @property
    def saved_hash(self) -> str | None:
        """The hash of the version that it was saved as, or loaded from; None if neither."""
        return None if self._home is None else self._home.version

    def samples(self, data: Any) -> Samples:
        """Labelled data as this learner reads it; wherever data is asked for, this may be given instead."""
        if isinstance(data, Samples):
            return data
        return Samples(data, preprocess=self._reading, tokenizer=self.tokenizer)

    def inputs(self, x: Any) -> Inputs:
        """Inputs as this learner reads them; wherever inputs are asked for, this may be given instead."""
        return Inputs(x, preprocess=self._reading, tokenizer=self.tokenizer)

    def _batches(self, samples: Samples | Inputs, y: Tensor, size: int) -> Batches:
        return Batches(samples, y, size, self.device, dtype=self._dtype)

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
        if not self._labels:
            raise ValueError("nothing has been learned yet; call learn(data) first.")
        if name is None or name not in self._labels:
            raise ValueError(f"head is {head!r}; learned so far: {', '.join(self._labels) or 'none'}.")
        return name

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
        count = DIRECTION_SAMPLES if self.recipe.tangent_features and self.recipe.direction == "principal" else 1
        some = torch.linspace(0, len(samples) - 1, min(count, len(samples))).long()
        parts = (to_device(samples.fetch(few), self.device, dtype=self._dtype) for few in some.split(_TOGETHER))
        self._assemble(torch.cat([first_features(self._backbone, x) for x in parts]))

    def _assemble(self, z: Tensor) -> None:
        model = assembled(self._backbone, self.recipe, z, self._train_choice, self.seed)
        self._model, self._width = model.to(self.device), z.shape[1]

    def _context(self, head: str, samples: Samples, labels: Labels) -> Task:
        assert self._model is not None
        self._grow(head, labels)
        batches = self._batches(samples, labels.indices(samples.labels), self.recipe.batch_size)
        return Task(self._model, head, self.loss, batches, len(samples), self._augment, self._stream)

    def _grow(self, head: str, labels: Labels) -> None:
        assert self._model is not None
        if head not in self._model.heads:
            self._model.add_head(head, len(labels))
        elif len(labels) > self._model.head(head).out_features:
            self._model.grow(head, len(labels))
            self.method.grown(self._model.head_names(head), len(labels))
        self._labels[head] = labels

    def _train(self, tasks: list[Task], data: str, report: Report) -> list[float]:
        assert self._model is not None
        for task in tasks:
            if self.recipe.head == "ridge" and self.loss.is_quadratic:
                keep = not isinstance(self.method, Finetune)
                start_from_ridge(task, self.recipe.scale, self.method.past_of_head(task), keep=keep)
            self.method.start(task)
        if self.tasks and self.recipe.adapts_once(self.scenario):
            return []
        # BatchNorm learns its statistics in the first task only, if at all
        batchnorm = not self.recipe.linear and self.recipe.batchnorm == "first" and self.tasks == 0
        streams, options = self._stream, {"amp": self.amp, "batchnorm": batchnorm}
        training = Training(self._model, self.method, tasks, self.recipe, streams, **options)
        if self._home is None:
            return training.run(report, self.tasks)
        self._home.resume(training, data)
        save = self._home.saver(training, data)
        curve = training.run(report, self.tasks, lambda: save(False))
        save(True)  # before the memory is made, which may take as long as an epoch
        return curve

    def _remember(self, task: Task) -> None:
        """What is never trained again need not be remembered."""
        assert self._model is not None
        resting = list(self._model.params().values()) if self.recipe.adapts_once(self.scenario) else []
        try:
            for parameter in resting:
                parameter.requires_grad_(False)
            self.method.finish(task)
        finally:
            for parameter in resting:
                parameter.requires_grad_(True)

    def _stream(self, purpose: str) -> torch.Generator:
        """A generator that depends on the seed, the task and the purpose, and on nothing that came before."""
        key = f"{self.seed}/{self.tasks}/{purpose}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        return torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def _adopt(self, layer: nn.Linear, labels: Labels, data: Any, weight: float) -> None:
        samples = None if data is None else self.samples(data)
        factor = margin_scale(len(labels), self.recipe.scale)
        if samples is None:
            self._assemble(torch.randn(2, layer.in_features, generator=self._stream("direction")).to(layer.weight))
        else:
            unknown = labels.unknown(samples.labels)
            if unknown:
                raise ValueError(f"a sample has the label {unknown[0]!r}, which is not among the model's labels.")
            self._build(samples)
            batches = self._batches(samples, labels.indices(samples.labels), self.recipe.batch_size)
            logits = torch.cat([layer(first_features(self._backbone, x)).float().cpu() for x, _ in batches])
            factor = fitted_scale(logits, batches.y, self.recipe.scale)
            if factor <= 0:
                raise ValueError("the sample's labels contradict the classifier's answers; are `labels` in its order?")
        assert self._model is not None
        self._grow(HEAD, labels)
        own, (w, b) = self._model.head(HEAD), centred_head(layer)
        if not self.loss.is_quadratic:
            factor = 1.0
        if self.recipe.method == "ridge" and self.recipe.random_features and not self.recipe.tangent_features:
            raise ValueError("ranpac does not see the features that the head was made for; take another method.")
        wide = torch.cat([w, w.new_zeros(len(w), own.in_features - w.shape[1])], 1)
        own.weight.copy_(factor * wide)
        own.bias.copy_(factor * b)
        if isinstance(self.method, Ridge):
            self.method.reserve(HEAD, len(labels))
        if samples is None:
            self.method.adopted(self._model)
        else:
            task = replace(self._context(HEAD, samples, labels), weight=weight)
            with torch.enable_grad():
                self._remember(task)
        if isinstance(self.method, Ridge):
            counts = torch.zeros(len(labels)).double() if self.method.sums is None else self.method.sums.counts.cpu()
            self.method.origin = Origin(own.weight.double().cpu(), own.bias.double().cpu(), counts)
        count = 0 if samples is None else len(samples)
        self.history.append(
            {
                "task": 0,
                "heads": [HEAD],
                "adopted": len(labels),
                "samples": count,
                "data": None if samples is None else data_fingerprint({HEAD: samples}),
                "weight": weight,
                "scale": factor,
                "loss": [],
                "predicted_increase": None,
            }
        )
        self.tasks = 1

    def _snapshot(self) -> tuple[Any, ...]:
        """Everything that learning changes; a frozen network is not among it."""
        kept = learned_state(self._backbone) if self._model is None else self._model.state()
        return kept, self._model, self._width, dict(self._labels), self.method.snapshot()

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        kept, self._model, self._width, self._labels, self.method = snapshot
        if self._model is None:
            self._backbone.load_state_dict(kept, strict=False)
        else:
            self._model.load_state(*kept)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that `load` needs."""
        own = type(self.method) is not type(self.recipe.make_method(self.scenario))
        tensors, parts = joined_states(model=self._model, method=self.method)
        return tensors, {
            "backbone": self._fingerprint,
            "recipe": asdict(self.recipe),
            "custom": type(self.method).__name__ if own else None,
            "scenario": self.scenario,
            "new_labels": self.new_labels,
            "seed": self.seed,
            "amp": self.amp,
            "train": self._train_choice,
            "preprocess": None if self.preprocess is None else self.preprocess.to_dict(),
            "width": self._width,
            "labels": {head: labels.names for head, labels in self._labels.items()},
            "tasks": self.tasks,
            "history": self.history,
            "notes": self.notes,
            "parts": parts,
        }

    def _load_state(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        parts = split_states(tensors, header["parts"])
        if header["width"] is not None:
            self._assemble(torch.zeros(2, header["width"]).to(reference(self._backbone)))
            assert self._model is not None
            self._model.load_state(*parts["model"])
            own, described = parts["method"]
            self.method.load_state({name: t.to(self.device) for name, t in own.items()}, described, self._model)
        self._labels = {head: Labels(names) for head, names in header["labels"].items()}
        self.tasks, self.history, self.notes = header["tasks"], header["history"], header["notes"]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(repr(n) for n, there in available.items() if there)
        raise ValueError(f"device is {name!r}; it must be 'auto' or, on this machine, one of {usable}.")
    return torch.device(name)


def data_fingerprint(tasks: Mapping[str, Samples]) -> str:
    """Names the data of several heads, to tell whether it is the same as before."""
    return "+".join(f"{head}:{samples.fingerprint()}" for head, samples in tasks.items())
