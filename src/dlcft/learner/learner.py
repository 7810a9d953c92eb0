"""The learner: task after task from a pre-trained backbone. No mathematics, and the data is let go once learned."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.data.images import Preprocess
from dlcft.data.labels import Label, Labels
from dlcft.data.samples import Inputs, Samples
from dlcft.data.sources import Tokenizer
from dlcft.learner.adopt import margin_scale, split_head
from dlcft.learner.build import as_given, fingerprint
from dlcft.learner.core import HEAD, LearnerCore, data_fingerprint
from dlcft.learner.progress import Report, reporter
from dlcft.learner.state import Home
from dlcft.methods import Method, Ridge
from dlcft.methods.recipes import RECIPES, Recipe
from dlcft.network.classifier import Classifier, learned_state
from dlcft.store.files import CheckpointError


class Learner(LearnerCore):
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
        train: which of the backbone's parameters learn, see `Linearized`; recipes on its tangent space only.
        preprocess: what happens to images, in learning and predicting alike.
        tokenizer: makes a list of texts into the backbone's inputs; with it strings are texts. It is not saved.
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

    @classmethod
    def adopt(
        cls,
        model: nn.Module,
        head: str,
        labels: Sequence[Label],
        data: Any = None,
        method: str | Recipe = "dlcft-exact",
        *,
        weight: float = 1.0,
        **options: Any,
    ) -> Learner:
        """A learner that goes on from a classifier which already knows classes.

        The head is split off and brought to the scale of squared-loss targets. Closed-form methods pull to it instead
        of to zero; trained ones start from it. A sample of old data, if there is one, is remembered as task 0. For
        classes without any, closed-form methods suppose what fits to the head: docs/your-own-model.md tells what that
        costs. Until something is learned, closed-form methods answer as the classifier did.

        Args:
            model: the classifier. It is copied.
            head: the name of its last linear layer, such as "fc".
            labels: the names of its outputs, in order.
            data: labelled samples of these classes, see `Samples`.
            method: see `Learner`.
            weight: how much each of these samples counts; with a tenth of the old data at hand, 10.
            options: of `Learner`.

        Raises:
            ValueError: when the head is not the model's last layer, or labels do not fit.
        """
        backbone, layer = split_head(model, head)
        if len(labels) != layer.out_features or len(set(labels)) != len(labels):
            raise ValueError(f"there are {len(labels)} labels; {layer.out_features} different ones are needed.")
        if options.get("scenario", "class-il") == "task-il" or not weight > 0:
            raise ValueError("adopt needs one head for all tasks and a positive weight.")
        learner = cls(backbone, method, **options)
        learner._adopt(layer, Labels(labels), data, weight)
        return learner

    @property
    def model(self) -> Classifier:
        """The classifier.

        Raises:
            ValueError: before the first task.
        """
        if self._model is None:
            raise ValueError("nothing has been learned yet; call learn(data) first.")
        self.method.settle(self._model)
        return self._model

    @property
    def trained_backbone(self) -> nn.Module:
        """A copy of the backbone as training has left it: to be given to another learner, or used anywhere else.

        Raises:
            ValueError: where the network itself is not trained: linearised and closed-form methods leave it as it was.
        """
        if self.recipe.linear or not self.method.trains:
            others = (name for name, recipe in RECIPES.items() if not recipe.linear and recipe.method != "ridge")
            trained = ", ".join(others)
            raise ValueError(f"this method leaves the backbone as it was; those that train it are {trained}.")
        return as_given(self.model.backbone).eval()

    def labels(self, head: str = HEAD) -> list[Label]:
        """The label names of a head, in the order of its outputs."""
        return list(self._labels[self._known(head)].names)

    def learn(self, data: Any, *, head: str | None = None, progress: bool | Report = True, resume: bool = True) -> None:
        """Learn one task; its data is not kept.

        A learner that was saved or loaded notes its progress in that directory. If the process dies, load the learner
        and learn the same data again: it continues where it was, and ends as it would have ended.

        Args:
            data: see `Samples`.
            head: the task's name in "task-il"; not given otherwise.
            progress: a function to call, or whether to show a line on a terminal.
            resume: False to begin anew where a run was interrupted.

        Raises:
            ValueError: when the data does not fit, or brings labels that may not be new.
            FloatingPointError: when training diverges; the learner is then as it was before.
        """
        self._learn({self._head(head): self.samples(data)}, progress, resume)

    def learn_jointly(self, tasks: Mapping[str, Any], *, progress: bool | Report = True) -> None:
        """Learn several tasks at once, each on its own head: the upper bound of "task-il".

        Raises:
            ValueError: in another scenario.
        """
        if self.scenario != "task-il":
            raise ValueError(f"learn_jointly is for 'task-il'; in {self.scenario!r} join the data and call learn.")
        self._learn({self._head(head): self.samples(data) for head, data in tasks.items()}, progress, True)

    def forget(self, data: Any, *, head: str | None = None, weight: float | None = None) -> None:
        """Be as if these samples, learned before, had never been seen: exact, for closed-form methods.

        Samples that were learned twice are forgotten once. Labels that lose all their samples keep their place, with
        zero weights.

        Args:
            data: see `Samples`.
            head: the task's name in "task-il".
            weight: what each of them counted; 1 by default, or for the whole sample that was given to `adopt`, its
                weight. For a part of that sample it has to be given.

        Raises:
            ValueError: when the method cannot, or these samples cannot have been learned.
        """
        method, name, samples = self._closed_form("forget"), self._known(head), self.samples(data)
        unknown = self._labels[name].unknown(samples.labels)
        if unknown:
            raise ValueError(f"label {unknown[0]!r} was never learned, so its samples cannot be forgotten.")
        known = data_fingerprint({name: samples})
        adopted = next((entry for entry in self.history if "adopted" in entry and entry.get("data") == known), None)
        if weight is None:
            weight = 1.0 if adopted is None else adopted["weight"]
        if not weight > 0:
            raise ValueError(f"weight is {weight}; it must be positive.")
        batches = self._batches(samples, self._labels[name].indices(samples.labels), self.recipe.batch_size)
        method.forget(self.model, name, batches, weight)
        if adopted is not None and method.origin is not None:
            usual = margin_scale(adopted["adopted"], self.recipe.scale)
            method.origin = method.origin.without_sample(usual / adopted["scale"])
        entry = {"task": self.tasks, "heads": [name], "forgotten": len(samples), "data": known}
        self.history.append(entry)

    def learned_before(self, data: Any, *, head: str | None = None) -> int | None:
        """The task, counted from 0, in which this data was learned last, and not forgotten since; None if in none.

        It is known again by all labels and 64 of its samples, if order and form (pixels, or image files) are the same;
        where samples differ each time they are read (random augmentation), by their labels alone.
        """
        wanted = data_fingerprint({self._head(head): self.samples(data)})
        same = [entry for entry in self.history if entry.get("data") == wanted]
        learned = [entry["task"] for entry in same if "forgotten" not in entry]
        return learned[-1] if 2 * len(learned) > len(same) else None

    def merge(self, other: Learner) -> None:
        """Add all that another learner of the same backbone and settings has learned: as if this one had seen both.

        Raises:
            ValueError: when the method cannot, or the two look at different features.
        """
        method, theirs = self._closed_form("merge"), other._closed_form("merge")
        if other is self:
            raise ValueError("a learner cannot be merged with itself; that would count everything twice.")
        ours, others = self._kind(), other._kind()
        for name, value in ours.items():
            if others[name] != value:
                raise ValueError(
                    f"the other learner has another {name}, {others[name]!s:.50} in place of {value!s:.50}; "
                    "settings, scenario, backbone, preprocessing and train= must be the same."
                )
        if not method.adopted_alike(theirs):
            raise ValueError(
                "one of the two was adopted from a classifier; only learners that were adopted from the same one, "
                "without a sample, can be merged."
            )
        if other._model is None:
            return
        if self._model is None:
            self._model, self._width = copy.deepcopy(other._model), other._width
            self._model.set_heads({})
        seen, theirs_seen = (learned_state(model.backbone) for model in (self._model, other._model))
        same = seen.keys() == theirs_seen.keys() and all(torch.equal(seen[name], theirs_seen[name]) for name in seen)
        if not same:
            raise ValueError(
                "the other learner has another seed or direction; both must look at the same features "
                "(direction='random' does not depend on data)."
            )
        places: dict[int, int] = {}
        for head, labels in other._labels.items():
            known = self._labels.get(head, Labels())
            self._grow(head, known.append(known.unknown(labels.names)))
            columns = method.reserve(head, len(self._labels[head]))
            for column, index in zip(theirs.columns[head], self._labels[head].indices(labels.names), strict=True):
                places[column] = columns[int(index)]
        method.merge(theirs, [places[column] for column in range(len(places))])
        self.history += [{**entry, "task": entry["task"] + self.tasks} for entry in other.history]
        self.tasks += other.tasks

    @torch.no_grad()
    def outputs(self, x: Any, *, head: str | None = None, batch_size: int = 256) -> Tensor:
        """The head's outputs for inputs, see `Inputs`."""
        name, model = self._known(head), self.model.eval()
        inputs = x if isinstance(x, Samples | Inputs) else self.inputs(x)
        batches = self._batches(inputs, torch.zeros(len(inputs), dtype=torch.long), batch_size)
        return torch.cat([model(part, name).float().cpu() for part, _ in batches])

    def predict(self, x: Any, *, head: str | None = None) -> list[Label]:
        """The label of each input."""
        names = self._labels[self._known(head)].names
        return [names[index] for index in self.outputs(x, head=head).argmax(1).tolist()]

    @torch.no_grad()
    def evaluate(self, data: Any, *, head: str | None = None, batch_size: int = 256) -> dict[str, float]:
        """Accuracy, mean loss, and how many labels are `unknown`: never learned.

        An unknown label counts as an error; the loss is of the others alone, NaN if there are none.
        """
        name, samples, model = self._known(head), self.samples(data), self.model.eval()
        labels = self._labels[name]
        known = torch.tensor([not labels.unknown([label]) for label in samples.labels])
        names = [label if seen else labels.names[0] for label, seen in zip(samples.labels, known, strict=True)]
        right, total, start = 0, 0.0, 0
        for x, target in self._batches(samples, labels.indices(names), batch_size):
            seen = known[start : start + len(target)].to(target.device)
            outputs = model(x, name)[seen]
            right += int((outputs.argmax(1) == target[seen]).sum())
            total += len(outputs) * float(self.loss.value(outputs, target[seen])) if len(outputs) else 0.0
            start += len(target)
        count = int(known.sum())
        mean = total / count if count else math.nan
        return {"accuracy": right / len(samples), "loss": mean, "unknown": len(samples) - count}

    def predicted_increase(self) -> float | None:
        """How much the last task has raised the old tasks' mean loss, by the memory alone.

        For closed-form methods it is exact. None where there was nothing before, or after `load`, `forget` and `merge`.
        """
        increase = self.method.predicted_increase()
        if self.history and increase is not None:
            self.history[-1]["predicted_increase"] = increase
        return increase

    def save(self, directory: str | os.PathLike[str] | None = None, *, keep: int = 2, current: bool = True) -> int:
        """Write a new version into a directory: all of it or nothing, whatever happens meanwhile.

        Args:
            directory: where to; by default where it was saved or loaded before.
            keep: how many versions stay there.
            current: False to keep this version beside the one that `load` gives.

        Returns:
            The version's number.

        Raises:
            CheckpointError: when the directory holds another learner, or this one as another process has changed it.
            OSError: when it cannot be written; what it holds is as it was.
        """
        home = self._home
        if directory is not None and (home is None or not home.is_at(directory)):
            home = Home(directory)
        if home is None:
            raise ValueError("directory is not given, and this learner was neither saved nor loaded before.")
        if self._model is not None:
            self.method.settle(self._model)
        number = home.commit(*self._state(), keep=keep, current=current)
        self._home = home
        return number

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        backbone: nn.Module,
        *,
        version: int | None = None,
        device: str = "auto",
        tokenizer: Tokenizer | None = None,
        custom: Method | None = None,
    ) -> Learner:
        """The learner that a directory holds, on the backbone that it was saved with.

        Args:
            directory: where it was saved.
            backbone: the same pre-trained network, with the same weights.
            version: one that is kept there, for a look at it; by default the current one.
            device: see `Learner`.
            tokenizer: the same as it was learned with.
            custom: the method of one's own that it was saved with.

        Raises:
            CheckpointError: when a file is damaged, foreign or newer, or the backbone is another one.
        """
        home = Home(directory)
        tensors, header = home.read(version)
        if header["backbone"] != fingerprint(backbone):
            raise CheckpointError(
                f"the backbone's weights are not those that {directory} was learned on; give the same network."
            )
        if header["custom"] != (None if custom is None else type(custom).__name__):
            raise CheckpointError(f"{directory} was learned by the method {header['custom']!r}; give custom= that.")
        preprocess = None if header["preprocess"] is None else Preprocess.from_dict(header["preprocess"])
        learner = cls(
            backbone,
            Recipe(**header["recipe"]),
            scenario=header["scenario"],
            new_labels=header["new_labels"],
            seed=header["seed"],
            device=device,
            amp=header["amp"],
            train=header["train"],
            preprocess=preprocess,
            tokenizer=tokenizer,
            custom=custom,
        )
        learner._load_state(tensors, header)
        learner._home = home if version is None else None
        return learner

    def _kind(self) -> dict[str, Any]:
        """What two learners that are merged must share."""
        own = {"scenario": self.scenario, "backbone": self._fingerprint, "preprocessing": self.preprocess}
        return {**asdict(self.recipe), **own, "train": self._train_choice}

    def _closed_form(self, what: str) -> Ridge:
        if not isinstance(self.method, Ridge):
            exact = ", ".join(name for name, recipe in RECIPES.items() if recipe.method == "ridge")
            raise ValueError(f"{what} needs a closed-form method ({exact}); this one is trained.")
        return self.method

    def _learn(self, tasks: dict[str, Samples], progress: bool | Report, resume: bool) -> None:
        labels = {head: self._extended(head, samples) for head, samples in tasks.items()}
        data = data_fingerprint(tasks)
        with nullcontext() if self._home is None else self._home.learning(resume=resume):
            self._learn_samples(tasks, labels, data, progress)

    def _learn_samples(
        self, tasks: dict[str, Samples], labels: dict[str, Labels], data: str, progress: bool | Report
    ) -> None:
        kept, learned = self._snapshot(), False
        try:
            started = time.perf_counter()
            self._build(next(iter(tasks.values())))
            contexts = [self._context(head, samples, labels[head]) for head, samples in tasks.items()]
            curve = self._train(contexts, data, reporter(progress)) if self.method.trains else []
            trained = time.perf_counter()
            self.method.increase = None
            for context in contexts:
                self._remember(context)
            if len(contexts) > 1:
                self.method.learned_together()
            learned = True
        finally:
            if not learned:  # whatever the reason, an interruption among them
                self._restore(kept)
        self.history.append(
            {
                "task": self.tasks,
                "heads": list(tasks),
                "samples": sum(len(s) for s in tasks.values()),
                "data": data,
                "loss": curve,
                "predicted_increase": self.method.increase,
                "seconds_training": trained - started,
                "seconds_remembering": time.perf_counter() - trained,
            }
        )
        self.tasks += 1
