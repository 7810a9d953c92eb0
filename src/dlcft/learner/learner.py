"""The learner: task after task from a pre-trained backbone. No mathematics, and no data is kept once learned."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.data.augment import Augmentation
from dlcft.data.images import Preprocess
from dlcft.data.labels import Label, Labels, counted
from dlcft.data.samples import Inputs, Samples, to_device
from dlcft.data.sources import Tokenizer
from dlcft.data.streams import is_stream
from dlcft.learner.adopt import check_last, margin_scale, split_head
from dlcft.learner.build import (
    Builder,
    as_given,
    computes_bfloat16,
    find_device,
    fingerprint,
    without_normalising,
)
from dlcft.learner.display import Report
from dlcft.learner.gathering import fingerprint as fingerprint_of
from dlcft.learner.heads import Heads
from dlcft.learner.learning import Learning
from dlcft.learner.merging import check_mergeable
from dlcft.learner.records import Adopted, Forgotten, Learned, Record
from dlcft.learner.state import as_written, check_current, read_learner, refuse_unimported, write_learner
from dlcft.learner.train import augmented
from dlcft.methods.base import Method
from dlcft.methods.recipes import RECIPES, Recipe, as_recipe, described
from dlcft.methods.settings import SCENARIOS, Features, Scenario
from dlcft.network import workers
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input
from dlcft.network.linearize import Selection
from dlcft.network.pooled import with_features
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

log = logging.getLogger("dlcft")


class Learner(Learning):
    """Learns task after task from a pre-trained backbone, without keeping their data.

    Args:
        backbone: any module that maps a batch to feature vectors, or a base model of transformers (`AutoModel`). It is
            copied.
        method: a name in `RECIPES`; a `Method` of one's own, as an object or as `module:Name`; or a `Recipe`.
        scenario: "class-il" (one head that grows with new labels), "data-il" (one head, the labels of the first
            task), or "task-il" (one head a task, named when learning and predicting).
        new_labels: "grow" or "error", for labels that a later task brings; "error" is the default of "data-il".
        seed: fixes everything random.
        device: "auto", "cpu", "cuda" or "mps".
        amp: train in bfloat16 where the device's autocast does; closed-form features have `bfloat16=True` for that.
        train: which of the backbone's parameters learn, see `Linearized`; recipes on its tangent space only.
        preprocess: of images, in learning and predicting alike.
        tokenizer: turns a list of texts into the backbone's inputs; with it strings are texts. It is not saved.
        settings: settings of the method to change, such as `epochs=10`.

    Raises:
        ValueError: when a name or value is unknown, or the method has no such setting.

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
        method: str | Method | Recipe = "dlcft-exact",
        *,
        scenario: Scenario = "class-il",
        new_labels: str | None = None,
        seed: int = 0,
        device: str = "auto",
        amp: bool = False,
        train: Selection = None,
        preprocess: Preprocess | None = None,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> None:
        if scenario not in SCENARIOS:
            raise ValueError(f"scenario is {scenario!r}; it must be 'data-il', 'task-il' or 'class-il'.")
        if new_labels not in (None, "grow", "error"):
            raise ValueError(f"new_labels is {new_labels!r}; it must be 'grow' or 'error'.")
        if not isinstance(seed, int) or seed < 0 or not isinstance(amp, bool):
            raise ValueError(
                f"seed is {seed!r} and amp {amp!r}; a whole number from 0 on, and a truth value, are needed."
            )
        self.recipe = as_recipe(method, settings)
        self.method = self.recipe.make_method(scenario)
        for name, why in self.method.unused().items():
            if name in settings:
                raise ValueError(f"{name}={settings[name]!r} has no effect in {scenario!r}: {why}.")
        self.scenario: Scenario = scenario
        self.new_labels = new_labels or ("error" if scenario == "data-il" else "grow")
        self.seed = seed
        self.device = find_device(device)
        self.amp = amp
        if (amp or self.recipe.settings.get("bfloat16")) and not computes_bfloat16(self.device):
            log.warning("this processor has no instructions for bfloat16: it will be slower than float32")
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.loss = self.recipe.model.make_loss()
        self.tasks = 0
        self.history: list[Record] = []
        self.notes: dict[str, Any] = {}
        # the backbone normalises, so that augmentation comes before
        self._reading = without_normalising(preprocess)
        self._augment = partial(augmented, Augmentation(self.recipe.training.augment))
        first = self.recipe.first_task(scenario)
        if first is not None and train is not None:
            if self.recipe.settings["start"] == "first-task":
                raise ValueError("train= is for start='pretrained': the first task would train the whole network.")
            first = None
        self._builder = Builder(
            backbone,
            self.recipe,
            first=first,
            train=train,
            preprocess=preprocess,
            seed=seed,
            device=self.device,
        )
        self._model: Classifier | None = None
        self._heads = Heads(scenario, self.new_labels)
        self.store: Store | None = None
        self.saved_hash: str | None = None
        self.ahead = False

    @classmethod
    def adopt(
        cls,
        model: nn.Module,
        head: str,
        labels: Sequence[Label],
        data: Any = None,
        method: str | Method | Recipe = "dlcft-exact",
        *,
        weight: float = 1.0,
        example: Any = None,
        **options: Any,
    ) -> Learner:
        """A learner that goes on from a classifier which already knows classes.

        The head is split off and brought to the scale of squared-loss targets. Closed-form methods pull to it instead
        of to zero; trained ones start from it. A sample of old data, if there is one, is remembered as task 0. For
        classes without samples, closed-form methods assume data that fits to the head: docs/your-own-model.md says what
        that costs. Until something is learned, closed-form methods answer as the classifier did.

        Args:
            model: the classifier. It is copied.
            head: the name of its last linear layer, such as "fc".
            labels: the names of its outputs, in order.
            data: labelled samples of these classes, see `Samples`.
            method: see `Learner`.
            weight: how much each of these samples counts; with a tenth of the old data at hand, 10.
            example: one or more inputs without labels. Methods with `depth_features` need it if there is neither `data`
                nor a preprocessing with a size: it shows the shapes inside the network, and is not learned.
            options: of `Learner`.

        Raises:
            ValueError: when the head is not the model's last layer, or labels do not fit.
        """
        backbone, layer = split_head(model, head)
        if len(labels) != layer.out_features or len(set(labels)) != len(labels):
            raise ValueError(f"there are {len(labels)} labels; {layer.out_features} different ones are needed.")
        if options.get("scenario", "class-il") == "task-il" or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"adopt needs one head for all tasks and a positive weight; weight is {weight!r}.")
        learner = cls(backbone, method, **options)
        if learner.recipe.start is not None and learner.recipe.start.start == "first-task":
            raise ValueError("start='first-task' is for a network that has learned no task; adopt needs 'pretrained'.")
        samples = None if data is None else learner.samples(data)
        if samples is not None:
            few = samples.fetch(torch.arange(min(8, len(samples))))
            x = to_device(few, learner.device, dtype=learner._builder.dtype)
            check_last(model, learner._builder.features(x), layer, x, learner.preprocess)
        elif isinstance(learner.recipe.model, Features) and learner.recipe.model.depth_features:
            learner._builder.look(learner.example(example))
        learner._adopt(layer, Labels(labels), samples, weight)
        return learner

    def __repr__(self) -> str:
        samples = sum(-one.samples if isinstance(one, Forgotten) else one.samples for one in self.history)
        labels = {head: len(labels) for head, labels in self._heads.labels.items()}
        knows = f"tasks learned {self.tasks}, samples {samples}, labels {sum(labels.values())}"
        heads = f", heads {', '.join(labels)}" if self.scenario == "task-il" and labels else ""
        place = "" if self.directory is None else f", in {str(self.directory)!r}"
        return f"Learner({described(self.recipe)}, scenario={self.scenario!r}: {knows}{heads}{place})"

    @property
    def trained_backbone(self) -> nn.Module:
        """A copy of the backbone as training has left it: to be given to another learner, or used anywhere else.

        Raises:
            ValueError: when the method is linearised or closed form, which leave the network as it was.
        """
        if self._builder.started is not None:
            return copy.deepcopy(self._builder.started)
        if self.recipe.linear or self.recipe.closed_form:
            trained = ", ".join(name for name, one in RECIPES.items() if not one.linear and not one.closed_form)
            raise ValueError(f"this method leaves the backbone as it was; those that train it are {trained}.")
        return as_given(self.model.backbone).eval()

    @property
    def directory(self) -> Path | None:
        """Where it was saved or loaded; None if neither."""
        return None if self.store is None else self.store.directory

    def labels(self, head: str | None = None) -> list[Label]:
        """The label names of a head, in the order of its outputs."""
        return list(self._heads.labels[self._heads.known(head)].names)

    def learn(
        self,
        data: Any,
        *,
        head: str | None = None,
        progress: bool | Report = True,
        resume: bool = True,
        shares: bool = False,
        cache_gb: float = 0.0,
    ) -> None:
        """Learn one task; its data is not kept.

        A learner that was saved or loaded notes its progress in that directory. If the process dies, load the learner
        and learn the same data again: it continues where it was, and ends as it would have ended.

        Args:
            data: see `Samples`. For closed-form methods also a stream, which is read once: an iterator of (input,
                label) pairs, an `IterableDataset` of torch or of Hugging Face.
            head: the task's name in "task-il"; not given otherwise.
            progress: a function to call, or whether to show a line on a terminal.
            resume: False to begin anew where a run was interrupted.
            shares: with several workers (see docs/many-machines.md), whether each brings its own part of the data, or
                None; by default all bring the same, and each reads a part of it. For closed-form methods.
            cache_gb: the most memory, in units of 10⁹ bytes, that may hold what the frozen network computes for each
                sample. Epochs of a linearised network without augmentation are then shorter (docs/cost.md); the log
                says if it does not fit. The data must be the same each time it is read.

        Raises:
            ValueError: when the data does not fit, or brings labels that may not be new.
            FloatingPointError: when training diverges; the learner is then as it was before.
        """
        if shares and not self.recipe.closed_form:
            raise ValueError("shares=True is for closed-form methods; for others give all workers the same data.")
        if not cache_gb >= 0:
            raise ValueError(f"cache_gb is {cache_gb!r}; 0 or more is needed.")
        if cache_gb and self.recipe.closed_form:
            raise ValueError("cache_gb is for trained methods; closed-form methods read each sample once.")
        name = self._heads.to_learn(head)
        streams = any(workers.gathered(is_stream(data)))
        given = self._stream_of(data, shares) if streams else self._gathered(data, shares)
        self._learn({name: given}, progress, resume, 1e9 * cache_gb)

    def learn_jointly(self, tasks: Mapping[str, Any], *, progress: bool | Report = True) -> None:
        """Learn several tasks at once, each on its own head: the upper bound of "task-il".

        Raises:
            ValueError: in another scenario.
        """
        if self.scenario != "task-il":
            raise ValueError(f"learn_jointly is for 'task-il'; in {self.scenario!r} join the data and call learn.")
        given = {self._heads.to_learn(head): self._gathered(data) for head, data in tasks.items()}
        self._learn(given, progress, True)

    def forget(self, data: Any, *, head: str | None = None, weight: float | None = None, shares: bool = False) -> None:
        """Be as if these samples, learned before, had never been seen: exact, for closed-form methods.

        Samples that were learned twice are forgotten once. Labels that lose all their samples keep their place, with
        zero weights.

        Args:
            data: see `Samples`.
            head: the task's name in "task-il".
            weight: how much each of them counted; 1 by default, or for the whole sample that was given to `adopt`, its
                weight. For a part of that sample it has to be given.
            shares: see `learn`.

        Raises:
            ValueError: when the method cannot, or these samples cannot have been learned.
        """
        name, given = self._heads.known(head), self._gathered(data, shares)
        unknown = self._heads.labels[name].unknown(given.labels)
        if unknown:
            raise ValueError(f"label {unknown[0]!r} was never learned, so its samples cannot be forgotten.")
        if seen := self._builder.trained_on(given.samples):
            raise ValueError(
                f"{seen} of these samples were in the first task, which has trained the network itself "
                "(start='first-task'), so they cannot be forgotten."
            )
        known = fingerprint_of({name: given})
        adopted = next((one for one in self.history if isinstance(one, Adopted) and one.data == known), None)
        if weight is None:
            weight = 1.0 if adopted is None else adopted.weight
        if not weight > 0:
            raise ValueError(f"weight is {weight}; it must be positive.")
        usual = None if adopted is None else margin_scale(adopted.labels, self.recipe.model.scale) / adopted.scale
        task = replace(self._task(name, given, self._heads.labels[name]), weight=weight)
        self.method.forget(task, origin_factor=usual)
        self.history.append(Forgotten(self.tasks, [name], given.total, known))
        self.ahead = True

    def learned_before(self, data: Any, *, head: str | None = None) -> int | None:
        """The last task, counted from 0, in which this data was learned and not forgotten since; None if in none.

        Data is recognised by all labels and 64 of its samples, if order and form (pixels, or image files) are the same;
        where samples differ each time they are read (random augmentation), by their labels alone.
        """
        wanted = fingerprint_of({self._heads.to_learn(head): self._gathered(data)})
        same = [record for record in self.history if record.data == wanted]
        learned = [record.task for record in same if not isinstance(record, Forgotten)]
        return learned[-1] if 2 * len(learned) > len(same) else None

    def merge(self, other: Learner) -> None:
        """Add all that another learner of the same backbone and settings has learned: as if this one had seen both.

        Raises:
            ValueError: when the method cannot, or the two look at different features.
        """
        if not isinstance(other, Learner):
            raise TypeError(f"merge takes another Learner, not a {type(other).__name__}.")
        if other is self:
            raise ValueError("a learner cannot be merged with itself; that would count everything twice.")
        check_mergeable(self, other)
        labels, places = {}, {}
        for head, new in other._heads.labels.items():
            labels[head] = self._heads.extended(head, new.names)
            places[head] = labels[head].indices(new.names).tolist()
        self.method.merge(other.method, places)
        if self._model is None and other._model is not None:
            self._model, self._builder.width = copy.deepcopy(other._model), other._builder.width
            self._builder.activations = other._builder.activations
            self._model.set_heads({})
        for head in labels:
            self._grow(head, labels[head])
        self.history += [replace(record, task=record.task + self.tasks) for record in other.history]
        self.tasks, self.ahead = self.tasks + other.tasks, True

    @torch.no_grad()
    def outputs(self, x: Any, *, head: str | None = None, batch_size: int = 256) -> Tensor:
        """The head's outputs for inputs, see `Inputs`.

        Raises:
            ValueError: when one is not a finite number.
        """
        name, model = self._ready(head)
        inputs = x if isinstance(x, Samples | Inputs) else self.inputs(x)
        batches = self._batches(inputs, torch.zeros(len(inputs), dtype=torch.long), batch_size)
        with workers.together():
            found = [_finite(model(part, name)).float().cpu() for part, _ in batches.of_worker()]
        shares = workers.gathered(found)  # each worker's every n-th batch
        return torch.cat([shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))])

    @torch.inference_mode(False)
    def module(self, *, head: str | None = None, probabilities: bool = False, example: Any = None) -> nn.Module:
        """A plain module from a batch to the head's outputs: a graph of ordinary operations with a copy of the weights.

        Nothing of the learner is in it: it serves where dlcft is not installed, on batches of any size, and with
        `torch.export`, `torch.compile`, `torch.jit.trace` and ONNX (see `dlcft.learner.export`). It takes what the
        network takes: images as floats in [0, 1] and of one size, which it normalises itself.

        Args:
            head: the task's name in "task-il".
            probabilities: whether to give `softmax(outputs / temperature)` instead.
            example: one or more inputs, where neither a preprocessing with a size nor a tokenizer tells their shape.

        Raises:
            ValueError: when the network cannot be written down as one graph.
        """
        from dlcft.learner.module import Answers, full_floats, plain_module  # torch.export is slow to import

        name, model = self._ready(head)
        answers = Answers(model, name, self.temperature if probabilities else None)
        return plain_module(answers, full_floats(self.example(example)))[0]

    def predict(self, x: Any, *, head: str | None = None, batch_size: int = 256) -> list[Label]:
        """The label of each input.

        Raises:
            ValueError: when an output is not a finite number, or all samples were forgotten.
        """
        names = self._heads.labels[self._heads.known(head)].names
        self._check_known()
        return [names[index] for index in self.outputs(x, head=head, batch_size=batch_size).argmax(1).tolist()]

    def predict_proba(self, x: Any, *, head: str | None = None, batch_size: int = 256) -> Tensor:
        """The probability of each label for each input, in the order of `labels()`: `softmax(outputs / temperature)`.

        Raises:
            ValueError: when an output is not a finite number.
        """
        self._check_known()
        outputs = self.outputs(x, head=head, batch_size=batch_size)
        return (outputs.double() / self.temperature).softmax(1)

    @property
    def temperature(self) -> float:
        """What outputs are divided by for probabilities.

        It is the one that `dlcft update` fitted on a holdout last, if there was one (`notes["temperature"]`); else one
        that suits the method's outputs, and probabilities are not calibrated.
        """
        self.solve()
        return self.notes.get("temperature") or self.method.usual_temperature or self.recipe.model.scale / 10

    @torch.no_grad()
    def evaluate(self, data: Any, *, head: str | None = None, batch_size: int = 256) -> dict[str, Any]:
        """Accuracy, mean loss, how many labels are `unknown` (never learned), and `per_label` right and all samples.

        An unknown label counts as an error in `accuracy`, and not in `accuracy_known`; the loss is of the others alone.
        Both are NaN if there are none.

        Raises:
            ValueError: when an output is not a finite number.
        """
        self._check_known()
        (name, model), samples = self._ready(head), self.samples(data)
        labels = self._heads.labels[name]
        known = torch.tensor([not labels.unknown([label]) for label in samples.labels])
        names = [label if seen else labels.names[0] for label, seen in zip(samples.labels, known, strict=True)]
        batches = self._batches(samples, torch.arange(len(samples)), batch_size)
        sums, indices = torch.zeros(1, dtype=torch.float64), labels.indices(names).to(self.device)
        hits = torch.zeros(len(samples), dtype=torch.float64)
        with workers.together():
            for x, places in batches.of_worker():
                seen, target = known[places.cpu()].to(self.device), indices[places]
                outputs = _finite(model(x, name))[seen]
                sums += len(outputs) * float(self.loss.value(outputs, target[seen])) if len(outputs) else 0.0
                hits[places[seen].cpu()] = (outputs.argmax(1) == target[seen]).double().cpu()
        workers.add_up([sums, hits])
        count, right = int(known.sum()), int(hits.sum())
        return {
            "accuracy": right / len(samples),
            "accuracy_known": right / count if count else math.nan,
            "loss": float(sums) / count if count else math.nan,
            "unknown": len(samples) - count,
            "per_label": counted(samples.labels, hits.tolist()),
        }

    def predicted_increase(self) -> float | None:
        """How much the last task has raised the old tasks' mean loss, by the memory alone.

        For closed-form methods it is exact, and unknown in "task-il". None where it is unknown, where there was nothing
        before, or after `load`, `forget` and `merge`.
        """
        return self.method.predicted_increase()

    def annotate(self, **facts: Any) -> None:
        """Add facts, such as a measured accuracy, to the record of the last task; they are saved with it.

        Raises:
            ValueError: when the last record is not of a task.
        """
        if not self.history or not isinstance(self.history[-1], Learned):
            raise ValueError("there is no record of a task to annotate; learn one first.")
        self.history[-1] = self.history[-1].annotated(facts)

    def save(self, directory: str | os.PathLike[str] | None = None, *, keep: int = 2, current: bool = True) -> int:
        """Write a new version into a directory: all of it or nothing, whatever happens meanwhile.

        Args:
            directory: by default where it was saved or loaded before.
            keep: how many versions stay there.
            current: False to keep this version beside the one that `load` gives.

        Returns:
            The version's number.

        Raises:
            CheckpointError: when the directory holds another learner, or this one as another process has changed it.
            OSError: when it cannot be written; the message says whether its versions are as they were.
        """
        store, known = self.store, self.saved_hash
        if directory is not None and (store is None or Path(directory).resolve() != store.directory.resolve()):
            store, known = Store(directory), None
        if store is None:
            raise ValueError("directory is not given, and this learner was neither saved nor loaded before.")
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1.")
        self.solve()
        written: tuple[int, str | None] = (0, None)
        with workers.together():
            if workers.place() == 0:
                tensors, header = self.state()
                with store.writing():
                    check_current(store, known)
                    number = write_learner(store, tensors, header, keep=keep, current=current)
                    now = store.current
                written = number, None if now is None else now.sha256
        number, self.saved_hash = workers.from_first(written)
        self.store, self.ahead = store, False
        return number

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str] | Store,
        backbone: nn.Module,
        *,
        version: int | None = None,
        device: str = "auto",
        tokenizer: Tokenizer | None = None,
    ) -> Learner:
        """The learner that a directory holds, on the backbone that it was saved with.

        A method or curvature of one's own is found by its `module:Name`; that module must be imported already.

        Args:
            directory: where it was saved, or the `Store` there.
            backbone: the same pre-trained network, with the same weights.
            version: one that is kept there, for a look at it; by default the current one.
            device: see `Learner`.
            tokenizer: the same as it was learned with.

        Raises:
            CheckpointError: when a file is damaged, foreign or newer, or the backbone is another one.
        """
        store = directory if isinstance(directory, Store) else Store(directory)
        tensors, header, sha256 = read_learner(store, version)
        if header["backbone"] != fingerprint(with_features(backbone)):
            raise CheckpointError(
                f"the backbone's weights are not those that {store.directory} was learned on; give the same network."
            )
        refuse_unimported([header["recipe"], header["parts"]], store.directory)
        find_device(device)  # a mistake of the caller, not of what was saved
        with as_written(store.directory):
            preprocess = None if header["preprocess"] is None else Preprocess.from_dict(header["preprocess"])
            learner = cls(
                backbone,
                Recipe.from_dict(header["recipe"]),
                scenario=header["scenario"],
                new_labels=header["new_labels"],
                seed=header["seed"],
                device=device,
                amp=header["amp"],
                train=header["train"],
                preprocess=preprocess,
                tokenizer=tokenizer,
            )
            learner._load_state(tensors, header)
        if version is None:
            learner.store, learner.saved_hash = store, sha256
        return learner

    def example(self, given: Any = None) -> Input:
        """A small batch as the network takes it: of inputs that are given, or made up where their shape is known.

        Raises:
            ValueError: when it is not known.
        """
        size = None if self.preprocess is None else self.preprocess.size
        if given is None and self.tokenizer is not None:
            given = ["an example", "another one of some more words"]
        if given is not None:
            inputs = self.inputs(given)
            x = inputs.fetch(torch.arange(min(3, len(inputs))))
        elif self.preprocess is not None and size is not None:
            x = torch.rand(3, self.preprocess.channels or 3, *size, generator=self._stream("example"))
        else:
            raise ValueError(
                "there is neither data nor example= nor a preprocessing with a size; one of them is needed to see the "
                "shapes inside the network."
            )
        return to_device(x, self.device, dtype=self._builder.dtype)


def _finite(outputs: Tensor) -> Tensor:
    """Refuse outputs that are no numbers: the largest of them would still be some label."""
    wrong = int((~outputs.isfinite()).any(1).sum())
    if wrong:
        raise ValueError(
            f"the outputs of {wrong} of {len(outputs)} inputs are not finite; inputs must be finite, and so small that "
            "the network computes them in its own precision."
        )
    return outputs
