"""Closed form on fixed features: ridge, ranpac, tangent and dlcft-exact. The past as the sums that determine the fit.

References:
    McDonnell et al., RanPAC: random projections and pre-trained models for continual learning (2023),
        https://arxiv.org/abs/2307.02251
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlcft.closed_form.sums import Part, RidgeSums
from dlcft.methods.base import (
    Batch,
    Batches,
    Header,
    Method,
    State,
    Task,
    Tensors,
    joined_states,
    split_states,
)
from dlcft.network.classifier import Classifier


def accuracy_share(features: int, samples: int) -> float:
    """The share of cross-validation's ridge, which is for the squared error, that suits accuracy.

    Measured: a third of it where there are fewer samples than features, less where there are more. In eleven cases this
    was 0.3 points or less off the best ridge, but for one of 0.8 with 200 samples (docs/experiment-log.md).
    """
    return math.sqrt(0.1 * min(1.0, features / samples))


@dataclass(frozen=True, eq=False)
class Origin:
    """What the ridge pulls to, and what is answered as long as nothing was learned: a head that was adopted.

    Attributes:
        weight: V0, outputs × features, of the first columns; later ones start from zero.
        bias: used only as long as nothing was learned.
        counts: the weight of the samples of each output that came with it; zeros without any.
    """

    weight: Tensor
    bias: Tensor
    counts: Tensor

    def state(self) -> State:
        """Tensors, and a header that JSON can hold."""
        return {"weight": self.weight, "bias": self.bias, "counts": self.counts}, {}

    def without_sample(self, factor: float) -> Origin:
        """What it is when the sample that came with it, and told its scale, is forgotten: that times `factor`."""
        return Origin(factor * self.weight, factor * self.bias, torch.zeros_like(self.counts))

    def same(self, other: Origin) -> bool:
        """Whether both are one head, without a sample."""
        alone = not (self.counts.any() or other.counts.any())
        return alone and torch.equal(self.weight, other.weight) and torch.equal(self.bias, other.bias)

    def is_all(self, sums: RidgeSums | None) -> bool:
        """Whether nothing was learned beside it, or all of that has been forgotten."""
        if sums is None or not sums.samples:
            return True
        counts = torch.cat([self.counts, self.counts.new_zeros(max(0, sums.classes - len(self.counts)))])
        return torch.allclose(sums.grow(len(counts)).counts, counts.to(sums.counts))

    def answers(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Its weight and bias, zero for outputs that have come and gone."""
        more = outputs - len(self.weight)
        weight = torch.cat([self.weight, self.weight.new_zeros(more, self.weight.shape[1])])
        return weight, torch.cat([self.bias, self.bias.new_zeros(more)])

    def supposed(self, sums: RidgeSums, scale: float) -> RidgeSums:
        """The sums, and for outputs of this head without a sample those of Gaussians that fit to it.

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
        return RidgeSums(counts, class_sums, gram, sums.samples + round(per_class * len(missing)))


@dataclass(eq=False)
class Ridge(Method):
    """Exact for any order and split of the data: no learning rate, no epochs, nothing to tune but the ridge.

    All heads share one regression; a head's outputs are some of its columns, so that task-incremental learning is the
    same fit with the outputs restricted. It is solved when a prediction asks for it.

    Args:
        ridge: relative to standardised features; None takes `accuracy_share` of `RidgeSums.choose_ridge`, which looks
            at the sums alone, so that order and split do not matter.
        weigh_by: "samples" or "tasks" (each task counts the same).
        scale: α of the targets.
        balance: see `RidgeSums.solve`.
        origin: what the ridge pulls to, or None for zero.
    """

    ridge: float | None = None
    weigh_by: str = "samples"
    scale: float = 15.0
    balance: bool = False
    sums: RidgeSums | None = None
    columns: dict[str, list[int]] = field(default_factory=dict)
    before: RidgeSums | None = None
    solved: bool = True
    origin: Origin | None = None
    fits: list[tuple[RidgeSums | None, tuple[Tensor, Tensor]]] = field(default_factory=list)

    trains = False

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """Never called."""
        raise NotImplementedError("ridge regression is solved, not trained")

    def finish(self, task: Task) -> None:
        """Add the task's sums."""
        layer = task.model.head(task.head)
        columns = self.reserve(task.head, layer.out_features)
        before = self.sums or RidgeSums.empty(layer.in_features, device=_sums_device(layer.weight.device))
        weight = task.weight / task.samples if self.weigh_by == "tasks" else task.weight
        total = before.extend(_rows(task.model, columns, task.batches, weight))
        self._keep(total, self.sums)

    def learned_together(self) -> None:
        """See `Method`."""
        self.before = None

    def reserve(self, head: str, outputs: int) -> list[int]:
        """The columns of a head, new ones behind all others where it has more outputs than before."""
        known = self.columns.get(head, [])
        first = sum(len(columns) for columns in self.columns.values())
        columns = [*known, *range(first, first + outputs - len(known))]
        self.columns = {**self.columns, head: columns}
        return columns

    def forget(self, model: Classifier, head: str, batches: Batches, weight: float = 1.0) -> None:
        """Take samples out again, as if they had never been seen.

        Args:
            model: whose features they were seen by.
            head: theirs.
            batches: the samples.
            weight: what each of them counted.

        Raises:
            ValueError: when they cannot have been learned, or every task was given the same weight.
        """
        if self.weigh_by != "samples" or self.sums is None:
            raise ValueError(f"weigh_by is {self.weigh_by!r}; samples can be taken out where it is 'samples'.")
        none = RidgeSums.empty(self.sums.features, dtype=self.sums.gram.dtype, device=self.sums.gram.device)
        self._keep(self.sums.minus(none.extend(_rows(model, self.columns[head], batches, weight))), None)

    def adopted_alike(self, other: Ridge) -> bool:
        """Whether both start from the same head, and no sample came with it, which would count twice; or from none."""
        if self.origin is None or other.origin is None:
            return self.origin is other.origin
        return self.origin.same(other.origin)

    def merge(self, other: Ridge, places: list[int]) -> None:
        """Add what another one has seen, its column i to this one's column `places[i]`."""
        if other.sums is not None:
            moved = other.sums.rearranged(places)
            self._keep(moved if self.sums is None else self.sums.merge(moved), None)

    @torch.no_grad()
    def settle(self, model: Classifier) -> None:
        """Solve, unless that has been done since something was learned."""
        if self.solved:
            return
        weight, bias = self._solution(self.sums)
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise ValueError("the regression has no finite solution for what was learned.")
        for head, columns in self.columns.items():
            layer = model.head(head)
            layer.weight.copy_(weight[columns])
            layer.bias.copy_(bias[columns])
        self.solved = True

    def predicted_increase(self) -> float | None:
        """Exactly by how much the last task has raised the mean loss of all data before it; None if unknown."""
        if self.before is None or self.sums is None or not self.before.samples:
            return None
        now, then = self._solution(self.sums), self._solution(self.before)
        return self.before.loss(*now, self.scale) - self.before.loss(*then, self.scale)

    def state(self) -> State:
        """The sums."""
        tensors, header = joined_states(sums=self.sums, origin=self.origin)
        return tensors, {"parts": header, "columns": self.columns, "solved": self.solved}

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        """See `Method`."""
        parts = split_states(tensors, header["parts"])
        self.sums = RidgeSums.from_state(*parts["sums"]) if "sums" in parts else None
        self.origin = Origin(**parts["origin"][0]) if "origin" in parts else None
        self.columns, self.solved, self.before = header["columns"], header["solved"], None

    def _keep(self, sums: RidgeSums, before: RidgeSums | None) -> None:
        outputs = sum(len(columns) for columns in self.columns.values())
        self.sums = sums.grow(outputs) if sums.classes < outputs else sums
        self.before = before
        self.solved = False

    def _solution(self, sums: RidgeSums | None) -> tuple[Tensor, Tensor]:
        """The fit to sums, each computed once as long as they are here."""
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
            return sums.class_sums, sums.counts  # all that was learned has been forgotten: zeros
        options: dict[str, Any] = {"balance": self.balance, "scale": self.scale}
        if self.origin is not None:
            sums = self.origin.supposed(sums.grow(outputs), self.scale)
            options["start"] = self.origin.answers(outputs)[0]
        ridge = self.ridge
        if ridge is None:
            ridge = accuracy_share(sums.features, sums.samples) * sums.choose_ridge(**options)
        return sums.solve(ridge, **options)


def _sums_device(device: torch.device) -> torch.device:
    """Where float64 is to be had."""
    return torch.device("cpu") if device.type == "mps" else device


def _rows(model: Classifier, columns: list[int], batches: Batches, weight: float) -> Iterator[Part]:
    """Features, column indices and weights, batch by batch."""
    model.eval()
    for x, y in batches:
        with torch.no_grad():
            features = model.features(x)
        yield features, torch.tensor(columns, device=y.device)[y], features.new_full((len(y),), weight)
