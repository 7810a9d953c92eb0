"""Closed form on fixed features, from dlcft-exact to the nearest class mean. The past as the sums that determine it.

References:
    McDonnell et al., RanPAC: random projections and pre-trained models for continual learning (2023),
        https://arxiv.org/abs/2307.02251
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dlcft.closed_form.discriminant import fitting_temperature, linear_discriminant, nearest_mean, on_targets
from dlcft.closed_form.sums import Part, RidgeSums
from dlcft.data.samples import Batches as SampleBatches
from dlcft.data.streams import StreamPart
from dlcft.methods.base import Batch, Batches, Header, Loop, Method, State, Task, Tensors, joined_states, split_states
from dlcft.methods.settings import Model, Reading, Scenario, setting
from dlcft.network import workers
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import filled, in_half, reference

_HUGE = 1e6  # of a usual sample's size: beyond that, the sums' rounding alone is 1e-4 of what others add to them
SOLUTIONS = ("ridge", "ncm", "lda", "shrunken-lda")


def accuracy_share(features: int, samples: int) -> float:
    """The share of cross-validation's ridge, which is for the squared error, that suits accuracy.

    Measured: a third of it where there are fewer samples than features, less where there are more. In eleven cases this
    was 0.3 points or less off the best ridge, but for one of 0.8 with 200 samples (docs/experiment-log.md).
    """
    return math.sqrt(0.1 * min(1.0, features / samples))


@dataclass(frozen=True, eq=False)
class Origin:
    """An adopted head: the ridge pulls to it, and it answers until something is learned.

    Attributes:
        weight: V0, outputs × features, of the first columns; later ones start from zero.
        bias: used only until something is learned.
        counts: for each output the weight of its samples that came with the head; zeros without any.
    """

    weight: Tensor
    bias: Tensor
    counts: Tensor

    def state(self) -> State:
        """Tensors, and a header that JSON can hold."""
        return {"weight": self.weight, "bias": self.bias, "counts": self.counts}, {}

    def without_sample(self, factor: float) -> Origin:
        """The origin after its adoption sample is forgotten, rescaled."""
        return Origin(factor * self.weight, factor * self.bias, torch.zeros_like(self.counts))

    def same(self, other: Origin) -> bool:
        """Whether both are the same head, without a sample."""
        alone = not (self.counts.any() or other.counts.any())
        return alone and torch.equal(self.weight, other.weight) and torch.equal(self.bias, other.bias)

    def is_all(self, sums: RidgeSums | None) -> bool:
        """Whether nothing else is in the sums."""
        if sums is None or not sums.samples:
            return True
        counts = torch.cat([self.counts, self.counts.new_zeros(max(0, sums.classes - len(self.counts)))])
        return torch.allclose(sums.grow(len(counts)).counts, counts.to(sums.counts))

    def answers(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Its weight and bias, with zeros for outputs that came later."""
        more = outputs - len(self.weight)
        weight = torch.cat([self.weight, self.weight.new_zeros(more, self.weight.shape[1])])
        return weight, torch.cat([self.bias, self.bias.new_zeros(more)])

    def supposed(self, sums: RidgeSums, scale: float) -> RidgeSums:
        """The sums, completed by Gaussian classes for outputs of this head without a sample.

        A linear head with weights w_c is the best for Gaussian classes of a common covariance Σ if their means are
        `m + g Σ w_c` (linear discriminant analysis). Σ and m are those of the data that there is; g is such that the
        head is ahead by α at these means.
        """
        seen = sums.counts > 0
        missing = [c for c in range(len(self.weight)) if not seen[c]]
        if not missing or not bool(seen.any()):
            return sums
        means = sums.class_sums[seen] / sums.counts[seen, None]
        within = sums.gram / sums.weight - means.T @ (means * (sums.counts[seen] / sums.weight)[:, None])
        weight = self.weight[missing].to(within)
        steps = weight @ within
        gain = scale / float((steps * weight).sum(1).mean().clamp(min=1e-12))
        placed = sums.class_sums.sum(0) / sums.weight + gain * steps
        each = float(sums.counts[seen].mean())
        counts, class_sums = sums.counts.clone(), sums.class_sums.clone()
        counts[missing], class_sums[missing] = each, each * placed
        gram = sums.gram + each * (len(missing) * within + placed.T @ placed)
        per_class = sums.samples / int(seen.sum())
        samples = sums.samples + round(per_class * len(missing))
        return replace(sums, counts=counts, class_sums=class_sums, gram=gram, samples=samples)


@dataclass
class Ridge(Method):
    """Exact for any order and split of the data: no learning rate, no epochs, nothing to tune but the ridge.

    All heads share one regression; a head's outputs are some of its columns, so that task-incremental learning is the
    same fit with the outputs restricted. `solve` solves it.

    The sums determine other classifiers too, by `solution`:

    - "ridge": ridge regression on `α·onehot`. Samples of small classes are taken for those of large ones.
    - "ncm": the nearest class mean, in the features as they are.
    - "lda": linear discriminant analysis with a ridge on the covariance.
    - "shrunken-lda": the same, each class mean shrunk by how well it is known, see `linear_discriminant`.

    All but "ridge" have outputs on the scale of its targets, see `on_targets`. A class without a sample, or whose
    samples were all forgotten, is never predicted. With an adopted head, which the ridge pulls to, all are "ridge"
    without equal classes.

    Args:
        ridge: relative to standardised features; None takes `accuracy_share` of `RidgeSums.choose_ridge`, which looks
            at the sums alone, so that order and split do not matter.
        weigh_by: "samples" or "tasks" (each task counts the same).
        equal_classes: whether all classes weigh the same, see `RidgeSums.solve`; for "lda" and "shrunken-lda" whether
            they are expected equally often. It changes nothing for "ncm".
        solution: "ridge", "ncm", "lda" or "shrunken-lda", see above.
    """

    ridge: float | None = setting(None, kind=float, optional=True, least=0)
    weigh_by: str = setting("samples", among=("samples", "tasks"))
    equal_classes: bool = False
    solution: str = setting("ridge", among=SOLUTIONS)

    closed_form: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale = 15.0
        self.sums: RidgeSums | None = None
        self.before: RidgeSums | None = None
        self.columns: dict[str, list[int]] = {}
        self.origin: Origin | None = None
        self.solved = True
        self.fits: list[tuple[RidgeSums | None, tuple[Tensor, Tensor]]] = []

    def bind(self, scenario: Scenario, model: Model, training: Reading) -> None:
        super().bind(scenario, model, training)
        self.scale = model.scale

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """Never called."""
        raise NotImplementedError("ridge regression is solved, not trained")

    def learn(self, tasks: Sequence[Task], loop: Loop) -> None:
        """Add the tasks' sums."""
        before = self.sums
        for task in tasks:
            for part in loop.parts(task):
                self.finish(part)
        self.before = before

    def finish(self, task: Task) -> None:
        """Add a task's sums."""
        if task.settle is not None and self.weigh_by == "tasks":
            raise ValueError("weigh_by is 'tasks', which needs the number of samples beforehand; a stream has none.")
        weight = task.weight / task.samples if self.weigh_by == "tasks" else task.weight
        added = self._sums(task, _of_usual_size(_rows(task.model, task.batches, weight), self.sums, task.batches))
        self._keep(added if self.sums is None else self.sums.merge(added))

    @property
    def empty(self) -> bool:
        """Whether all samples were forgotten, and there is no adopted head."""
        return self.origin is None and self.sums is not None and not self.sums.samples

    def forget(self, task: Task, *, origin_factor: float | None = None) -> None:
        """Remove samples, as if they had never been seen.

        Args:
            task: the samples, and the weight that each of them counted.
            origin_factor: when they are the sample of an adopted head, which told its scale: rescales that head.

        Raises:
            ValueError: when they cannot have been learned, or every task was given the same weight.
        """
        if self.weigh_by != "samples":
            raise ValueError(f"weigh_by is {self.weigh_by!r}; samples can be forgotten where it is 'samples'.")
        if self.sums is None:
            raise ValueError("nothing has been learned since the head was adopted, so nothing can be forgotten.")
        self._keep(self.sums.minus(self._sums(task, _rows(task.model, task.batches, task.weight))))
        if origin_factor is not None and self.origin is not None:
            self.origin = self.origin.without_sample(origin_factor)

    def merge(self, other: Ridge, places: Mapping[str, Sequence[int]]) -> None:
        """Add the sums of another learner.

        Args:
            other: its method.
            places: for each of its heads, the output here of each of its outputs.

        Raises:
            ValueError: when one was adopted from a classifier that the other was not adopted from.
        """
        if not self._adopted_alike(other):
            raise ValueError(
                "one of the two was adopted from a classifier; only learners that were adopted from the same one, "
                "without a sample, can be merged."
            )
        moved: dict[int, int] = {}
        for head, outputs in places.items():
            own = self._reserve(head, 1 + max(outputs))
            moved |= {column: own[place] for column, place in zip(other.columns[head], outputs, strict=True)}
        if other.sums is not None:
            theirs = other.sums.rearranged([moved[column] for column in range(len(moved))])
            self._keep(theirs if self.sums is None else self.sums.merge(theirs))

    def take(self, sums: RidgeSums, head: str) -> None:
        """Be as if these sums, and nothing else, had been learned for one head."""
        self.columns = {head: list(range(sums.classes))}
        self._keep(sums)

    def adopted(self, model: Classifier, head: str, task: Task | None) -> None:
        """The ridge pulls to the adopted head from now on; a sample counts as a first task."""
        layer = model.head(head)
        self._reserve(head, layer.out_features)
        if task is not None:
            self.finish(task)
        counts = torch.zeros(layer.out_features).double() if self.sums is None else self.sums.counts.cpu()
        self.origin = Origin(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu(), counts)

    @torch.no_grad()
    def solve(self, model: Classifier) -> None:
        """Solve the regression, unless it was solved since the sums changed last."""
        if self.solved:
            return
        weight, bias = self._solution(self.sums)
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise ValueError("the regression has no finite solution for the learned data.")
        for head, columns in self.columns.items():
            layer = model.head(head)
            layer.weight.copy_(weight[columns])
            layer.bias.copy_(bias[columns])
            if len(self.columns) > 1 and self.origin is None and self.sums is not None:
                _below_others(layer, self.sums.counts[columns] > 0, self.scale)
        self.usual_temperature = None
        if self.solution != "ridge" and self.origin is None and self.sums is not None and self.sums.samples:
            self.usual_temperature = fitting_temperature(self.sums, weight, bias, self.scale)
        self.solved = True

    def predicted_increase(self) -> float | None:
        """The exact rise of the mean loss of all data before the last task; None if unknown.

        It is unknown in task-il, where a sample's loss counts the outputs of its own head: second moments are summed
        over all heads. Only a ridge regression minimises that loss: with other solutions it may fall.
        """
        old = self.old_loss()
        if old is None or self.before is None:
            return None
        return self.before.loss(*self._solution(self.sums), self.scale) - old

    def old_loss(self) -> float | None:
        """The exact mean loss of all data before the last task, by the fit to these; unknown as the increase is."""
        if self.before is None or self.sums is None or not self.before.samples or self.scenario == "task-il":
            return None
        return self.before.loss(*self._solution(self.before), self.scale)

    def state(self) -> State:
        """The sums."""
        tensors, header = joined_states(sums=self.sums, origin=self.origin)
        own = {"columns": self.columns, "solved": self.solved, "temperature": self.usual_temperature}
        return tensors, {"parts": header, **own}

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        parts = split_states(tensors, header["parts"])
        self.sums = RidgeSums.from_state(*parts["sums"]) if "sums" in parts else None
        self.origin = Origin(**parts["origin"][0]) if "origin" in parts else None
        self.columns, self.solved, self.before = header["columns"], header["solved"], None
        self.usual_temperature = header.get("temperature")  # earlier versions had none
        if in_half(reference(model)) and "sums" in parts and "epsilon" not in parts["sums"][1]:
            self.solved = False  # saved when heads were in half precision too: rounded, or not finite

    def _sums(self, task: Task, rows: Iterator[Part]) -> RidgeSums:
        """The sums of the rows of a task's samples, of those of all workers."""
        with workers.together():
            sums = self._none(task.model).extend(rows)
        outputs: Sequence[int] = range(sums.classes)
        if task.settle is not None:
            assert isinstance(task.batches, StreamPart)
            outputs = task.settle(list(task.batches.labels))
        columns = self._reserve(task.head, task.model.head(task.head).out_features)
        sums = sums.rearranged([columns[output] for output in outputs])
        return sums.over_workers(sum(len(columns) for columns in self.columns.values()))

    def _none(self, model: Classifier) -> RidgeSums:
        """Empty sums, on the model's device if that has float64."""
        device = reference(model).device
        return RidgeSums.empty(model.feature_count, device="cpu" if device.type == "mps" else device)

    def _reserve(self, head: str, outputs: int) -> list[int]:
        """The columns of a head; new ones stand behind all others."""
        known = self.columns.get(head, [])
        first = sum(len(columns) for columns in self.columns.values())
        columns = [*known, *range(first, first + outputs - len(known))]
        self.columns = {**self.columns, head: columns}
        return columns

    def _adopted_alike(self, other: Ridge) -> bool:
        """Whether both start from the same head without a sample, which would count twice; or from none."""
        if self.origin is None or other.origin is None:
            return self.origin is other.origin
        return self.origin.same(other.origin)

    def _keep(self, sums: RidgeSums) -> None:
        outputs = sum(len(columns) for columns in self.columns.values())
        self.sums = sums.grow(outputs) if sums.classes < outputs else sums
        self.before, self.solved = None, False

    def _solution(self, sums: RidgeSums | None) -> tuple[Tensor, Tensor]:
        """The fit to sums, computed once for the current sums and those before the last task."""
        for known, fit in self.fits:
            if known is sums:
                return fit
        fit = self._solve(sums)
        current = [(known, found) for known, found in self.fits if known is self.sums or known is self.before]
        self.fits = [*current, (sums, fit)]
        return fit

    def _solve(self, sums: RidgeSums | None) -> tuple[Tensor, Tensor]:
        outputs = sum(len(columns) for columns in self.columns.values())
        if self.origin is not None and self.origin.is_all(sums):
            return self.origin.answers(outputs)
        assert sums is not None
        if not sums.samples:
            return sums.class_sums, sums.counts  # everything was forgotten: zeros
        # with an adopted head, only what was measured there: a ridge regression, and equal classes if it is chosen
        equal = self.equal_classes and self.solution == "ridge"
        options: dict[str, Any] = {"equal_classes": equal, "scale": self.scale}
        if self.origin is not None:
            sums = self.origin.supposed(sums.grow(outputs), self.scale)
            options["start"] = self.origin.answers(outputs)[0]
        elif self.solution != "ridge":
            return on_targets(sums, *self._discriminant(sums), self.scale)
        return sums.solve(self._ridge(sums, options), **options)

    def _discriminant(self, sums: RidgeSums) -> tuple[Tensor, Tensor]:
        if self.solution == "ncm":
            return nearest_mean(sums)
        shrunken = self.solution == "shrunken-lda"
        return linear_discriminant(sums, self._ridge(sums, {}), equal_classes=self.equal_classes, shrunken=shrunken)

    def _ridge(self, sums: RidgeSums, options: dict[str, Any]) -> float:
        if self.ridge is not None:
            return self.ridge
        share = accuracy_share(sums.features, sums.samples)
        if "start" in options or options.get("equal_classes"):
            return share * sums.choose_ridge(**options)
        return share * sums.usual_ridge  # whatever the scale


def _below_others(layer: nn.Linear, seen: Tensor, scale: float) -> None:
    """Put the outputs without a sample by α below the mean of a head's others.

    All outputs sum to α, so that zero is never the largest of all; but it may be of those of one head.
    """
    if seen.any() and not seen.all():
        seen = seen.to(layer.weight.device)
        layer.weight[~seen] = layer.weight[seen].mean(0)
        layer.bias[~seen] = layer.bias[seen].mean() - scale


def _of_usual_size(rows: Iterator[Part], before: RidgeSums | None, batches: Batches) -> Iterator[Part]:
    """The rows, as long as no sample's features are far larger than all others, which it would hide.

    Raises:
        ValueError: names the first that is.
    """
    usual = math.sqrt(float(before.gram.trace()) / before.weight) if before is not None and before.samples else 0.0
    seen = 0
    for part in rows:
        sizes = torch.linalg.vector_norm(part[0], dim=1, dtype=torch.float64)
        usual = usual or float(sizes.median())
        largest = int(sizes.argmax()) if len(sizes) else 0
        if usual and float(sizes[largest]) > _HUGE * usual:
            name = ""
            if workers.count() == 1 and isinstance(batches, SampleBatches):  # others read other batches in between
                name = f" ({batches.samples.name(batches.span.start + seen + largest)})"
            times = float(sizes[largest]) / usual
            raise ValueError(
                f"a sample{name} has features {times:.1g} times as large as usual ones, and would hide all others; "
                "leave it out, or bring its values to their scale."
            )
        seen += len(sizes)
        yield part


def _rows(model: Classifier, batches: Batches, weight: float) -> Iterator[Part]:
    """Features, label indices and weights, batch by batch."""
    model.eval()
    for x, y in batches.of_worker() if isinstance(batches, SampleBatches) else batches:
        with torch.no_grad():
            features = model.features(filled(x, len(y)))[: len(y)]
        yield features, y, features.new_full((len(y),), weight)
