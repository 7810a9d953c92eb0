"""Estimation: from a classifier, data and a loss to the curvature of the mean loss, and its gradient.

The matrix is the generalised Gauss-Newton matrix, block by block: exact if a block can hold it, otherwise in the
approximation that the estimator is named after. Averages are over samples; nothing depends on the batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dlcft.curvature.blocks import Block, Dense, Diagonal
from dlcft.curvature.form import Curvature
from dlcft.curvature.losses import Loss
from dlcft.curvature.rows import (
    backward,
    find_layers,
    log,
    parameter_names,
    per_sample_gradients,
    recording,
    without_rows,
)
from dlcft.curvature.statistics import ESTIMATORS, Statistics, find_statistics
from dlcft.network import workers
from dlcft.network.classifier import Classifier, evaluating
from dlcft.network.inputs import Input, call
from dlcft.network.linearize import Linearized

__all__ = ["ESTIMATORS", "Estimate", "Statistics", "estimate", "find_statistics"]

Batches = Iterable[tuple[Input | None, Tensor]]

PASS_SAMPLES = 64  # most samples whose activations and gradients are held at once
DENSE_LIMIT = 20_000


@dataclass(frozen=True, eq=False)
class Estimate:
    """The result of `estimate`.

    Attributes:
        curvature: of the mean loss.
        samples: how many samples it is the mean of.
        gradient: of the mean loss, if asked for.
    """

    curvature: Curvature
    samples: int
    gradient: dict[str, Tensor] | None


def estimate(
    estimator: str | type[Statistics],
    model: Classifier,
    batches: Batches,
    loss: Loss,
    head: str,
    *,
    draws: int | None = 1,
    generator: torch.Generator | None = None,
    samples: int | None = None,
    total: int | None = None,
    include_head: bool = True,
    include_backbone: bool = True,
    gradient: bool = False,
    max_factor: int = 8192,
) -> Estimate:
    """The curvature of the mean loss at the classifier's parameters.

    Args:
        estimator: a name in `ESTIMATORS`, a `Statistics` class, or its "module:Name".
        model: the classifier; it is not changed.
        batches: pairs of input and label indices. Estimators with a first pass go over them twice. With several
            workers all give the same batches, each without the inputs (None) of those that others read.
        loss: of the outputs of `head`.
        head: a head's name.
        draws: output gradients sampled per sample; None for the exact sum, one backward pass per output.
        generator: the source of the draws.
        samples: how many samples to use, drawn by the generator out of `total`; None for all of them.
        total: how many samples there are; if None, the first ones are used.
        include_head: whether to cover the head's parameters; in task-incremental learning they are not.
        include_backbone: False to cover the head alone, without any backward pass.
        gradient: whether to compute the gradient of the mean loss too.
        max_factor: layers with more inputs or outputs than this get diagonal blocks.

    Raises:
        ValueError: when the estimator is unknown, nothing is covered, there is no data, or a number is not finite.
    """
    kind = find_statistics(estimator)
    if samples is not None and samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1, or None for all.")
    if not (include_head or include_backbone):
        raise ValueError("include_head and include_backbone are both False; one of them must be True.")
    parts = _Limited(batches, samples, total, generator)
    run = _Run(kind, model, parts, loss, head, draws, generator, include_head, include_backbone, max_factor)
    with evaluating(model):
        blocks = run.by_layer(gradient) if kind.by_layer else run.dense(gradient)
    for name, block in blocks.items():
        if not all(_finite(t) for t in block.tensors().values()):
            raise ValueError(
                f"the curvature of {name!r} is not finite: its inputs or gradients are not (or overflow "
                f"{next(iter(block.tensors().values())).dtype})."
            )
    curvature = Curvature(blocks)
    left_out = run.params.keys() - set(curvature.names)
    if left_out:
        raise ValueError(f"no curvature was found for the trainable parameter {sorted(left_out)[0]!r}.")
    workers.add_up(run.gradient.values())
    whole = sum(workers.gathered(run.count))  # more than the total where all have read the same few batches
    found = {name: value / whole for name, value in run.gradient.items() if name in run.params}
    return Estimate(curvature, run.total, found if gradient else None)


class _Limited:
    """The chosen samples, in batches of at most `PASS_SAMPLES`, as often as asked for.

    They are drawn, because data may be sorted by class.
    """

    def __init__(
        self, batches: Batches, samples: int | None, total: int | None, generator: torch.Generator | None
    ) -> None:
        self.batches = list(batches) if isinstance(batches, Iterator) else batches  # for a second pass
        self.places = None if samples is None else torch.arange(samples)  # in order; None for all
        if samples is not None and total is not None and samples < total:
            self.places = torch.randperm(total, generator=generator)[:samples].sort().values

    def __iter__(self) -> Iterator[tuple[Input | None, Tensor]]:
        before = 0
        for x, labels in self.batches:
            if self.places is not None and before > int(self.places[-1]):
                return
            inside = torch.arange(len(labels))
            if self.places is not None:
                inside = self.places[(self.places >= before) & (self.places < before + len(labels))] - before
            before += len(labels)
            whole = len(inside) == len(labels)
            plain = dict(x) if isinstance(x, Mapping) else x
            for start in range(0, len(inside), PASS_SAMPLES):
                stop = min(start + PASS_SAMPLES, len(inside))
                part = slice(start, stop) if whole else inside[start:stop].to(labels.device)
                yield tree_map_only(Tensor, lambda t, part=part: t[part], plain), labels[part]


@dataclass
class _Rows:
    """One batch's rows."""

    layers: dict[str, tuple[list[Tensor], list[list[Tensor]]]]  # by name: inputs by use; by draw, gradients by use
    z: Tensor  # the head's inputs
    output_grads: Tensor  # draws × samples × outputs
    others: dict[str, Tensor]  # gradients (draws × samples × shape) by sample of the parameters in no such layer


@dataclass
class _Run:
    """One call of `estimate`.

    The gradient of a linearised classifier with respect to ψ is that of the frozen network, for every ψ. So the hooks
    are on the frozen network. Only the features z, and with them the outputs, need the first-order change.
    """

    kind: type[Statistics]
    model: Classifier
    batches: _Limited
    loss: Loss
    head: str
    draws: int | None
    generator: torch.Generator | None
    include_head: bool
    include_backbone: bool
    max_factor: int

    def __post_init__(self) -> None:
        model, head = self.model, self.head
        self.head_names = model.head_names(head)
        linearized = model.backbone if isinstance(model.backbone, Linearized) else None
        self.network = linearized.base if linearized else model.backbone
        self.output = linearized.output if linearized else None
        self.prefix = "backbone.delta." if linearized else "backbone."
        trainable = list(model.params()) if self.include_backbone else []
        left_out = [name for name in trainable if not name.startswith(self.prefix)]
        if left_out:
            raise ValueError(f"no curvature is defined for the trainable parameter {left_out[0]!r}.")
        self.trainable = [name.removeprefix(self.prefix) for name in trainable]
        params = model.params(head if self.include_head else None)
        self.params = {name: p for name, p in params.items() if self.include_backbone or name in self.head_names}
        self.layers = find_layers(self.network, self.trainable, self.max_factor) if self.kind.by_layer else {}
        covered = {p for name, layer in self.layers.items() for p in parameter_names(name, layer)}
        self.others = [name for name in self.trainable if name not in covered]
        self.count = 0  # samples that this worker has read
        self.total = 0  # and all together
        self.gradient: dict[str, Tensor] = {}  # of the summed loss

    def by_layer(self, gradient: bool) -> dict[str, Block]:
        """One or two passes, with statistics of every layer and of the head."""
        on_head = self.kind.on_head(self.loss) if self.include_head else None
        basis = self.kind.basis if self.trainable else None
        head_basis = on_head and on_head.basis
        first: Mapping[str, Block] = {}
        if basis is not None or head_basis is not None:
            first = self._pass(basis, head_basis, {}, gradient=False)
        return self._pass(self.kind, on_head, first, gradient=gradient)

    def dense(self, gradient: bool) -> dict[str, Block]:
        """One matrix on all parameters, from the gradients by sample."""
        size = sum(p.numel() for p in self.params.values())
        if size > DENSE_LIMIT:
            raise ValueError(f"dense curvature is for at most {DENSE_LIMIT:,} parameters; these are {size:,}.")
        total = torch.zeros(size, size, dtype=next(iter(self.params.values())).dtype)
        for rows in self._rows(gradient, needs_outputs=True):
            columns = [rows.others[name].flatten(2) for name in self.trainable]
            if self.include_head:
                columns += [torch.einsum("dno,nk->dnok", rows.output_grads, rows.z).flatten(2), rows.output_grads]
            jacobian = torch.cat(columns, 2).flatten(0, 1)  # a row for each draw and sample
            total += jacobian.T @ jacobian
        shapes = tuple(tuple(p.shape) for p in self.params.values())
        return self._over_workers(
            {"all": Dense(tuple(self.params), shapes, self.loss.is_quadratic, total / self.count)}
        )

    def _pass(
        self,
        on_layers: type[Statistics] | None,
        on_head: type[Statistics] | None,
        first: Mapping[str, Block],
        *,
        gradient: bool,
    ) -> dict[str, Block]:
        """The blocks of one pass; layers, or the head, are left out where the class is None."""
        statistics: dict[str, Statistics] = {}
        others: dict[str, Tensor] = {}
        head: Statistics | None = None
        if on_head is not None:
            block = first.get(self.head_names[0].removesuffix(".weight"))
            head = on_head(self.model.head(self.head), self.head_names, block)
        needs_outputs = on_head is not None or self.kind.reads_outputs or not self.loss.is_quadratic
        for rows in self._rows(gradient, needs_outputs):
            if not statistics and on_layers is not None:  # since the first batch, the layers with rows are known
                for name, layer in self.layers.items():
                    names = tuple(self.prefix + p for p in parameter_names(name, layer))
                    statistics[name] = on_layers(layer, names, first.get(self.prefix + name))
            with torch.autocast(rows.z.device.type, enabled=False):  # sums need full precision
                for name, sums in statistics.items():
                    sums.add(*rows.layers[name])
                if head is not None:
                    head.add([rows.z], [[v] for v in rows.output_grads])
            _add_to(others, {self.prefix + name: self.kind.diagonal_sum(g) for name, g in rows.others.items()})
        blocks: dict[str, Block] = {}
        for name in list(statistics):  # freed one by one: the sums are as large as the blocks
            blocks |= statistics.pop(name).blocks(self.count)
        if head is not None:
            blocks |= head.blocks(self.count)
        blocks |= {name: Diagonal((name,), value / self.count) for name, value in others.items()}
        return self._over_workers(blocks)

    def _over_workers(self, blocks: dict[str, Block]) -> dict[str, Block]:
        """The blocks of all workers' samples: every tensor in a block is a mean over samples."""
        if workers.count() == 1:
            return blocks
        whole = sum(workers.gathered(self.count))
        found = {}
        for name, block in blocks.items():
            means: dict[str, Any] = {key: t * (self.count / whole) for key, t in block.tensors().items()}
            workers.add_up(means.values())
            found[name] = dataclasses.replace(block, **means)
        return found

    def _rows(self, gradient: bool, needs_outputs: bool) -> Iterator[_Rows]:
        """The rows of every batch; counts the samples, and sums the gradient of the loss if asked for.

        Without `needs_outputs`, neither z nor the outputs at ψ are used: the frozen network's will do.
        """
        model, head = self.model, self.model.head(self.head)
        self.count = self.total = 0
        for x, labels in self.batches:
            self.total += len(labels)
            if x is None:  # another worker reads it: draw as many numbers
                unknown = head.weight.new_zeros(len(labels), head.out_features)
                self.kind.output_grads(unknown, self.loss, self.draws, self.generator)
                continue
            if self.count == 0 and self.layers:
                run = model.backbone.value if isinstance(model.backbone, Linearized) else self.network
                for name, why in without_rows(self.network, self.trainable, self.layers, x, run).items():
                    log.info("%s %s: diagonal curvature", name, why)
                    self.others += parameter_names(name, self.layers.pop(name))
            self.count += len(labels)
            recorded = recording(self.network, self.trainable, self.layers)
            with torch.inference_mode(False), torch.set_grad_enabled(bool(self.trainable)), recorded as calls:
                z_frozen, z = self._features(x, needs_outputs or gradient)
                for name, uses in calls.items():
                    if not uses or any(len(a) != len(labels) for a, _ in uses):
                        raise ValueError(
                            f"layer {name!r} ran for an earlier batch, and not, or in another way, for this one."
                        )
                # the weights by which the features of ψ reach the outputs: W, or the fixed W0 of a strict classifier
                directions = model.directions(self.head) if model.strict else head.weight.detach()
                z_head = z_frozen.detach() if model.strict else z
                with torch.no_grad():
                    outputs = head(z_head)
                    if model.strict:
                        outputs = outputs + (z - z_head) @ directions.T
                    vectors = self.kind.output_grads(outputs, self.loss, self.draws, self.generator)
                rows = _Rows({name: ([a for a, _ in uses], []) for name, uses in calls.items()}, z_head, vectors, {})
                for index, vector in enumerate(vectors):
                    last = index == len(vectors) - 1 and not gradient
                    found = backward(z_frozen, calls, vector @ directions, retain=not last)
                    for name, (_, grads) in rows.layers.items():
                        grads.append(found[name])
                if gradient:
                    self._add_gradient(z_frozen, z_head, outputs, directions, labels)
            if self.others:
                cotangents = vectors @ directions
                rows.others = per_sample_gradients(self.network, x, self.others, cotangents, self.output)
            yield rows
        if not self.count:
            raise ValueError("the data set is empty; curvature needs at least one sample.")

    def _features(self, x: Input, needs_outputs: bool) -> tuple[Tensor, Tensor]:
        """The features z of the frozen network, with a graph, and z at ψ, without."""
        backbone = self.model.backbone
        if not isinstance(backbone, Linearized):
            z = self.model.features(x)
            return z, z.detach()
        if not (needs_outputs and any(bool(p.any()) for p in backbone.delta.parameters())):
            value = call(backbone.value, x)
            return value, value.detach()
        value, change = call(backbone.split, x)
        return value, value.detach() + change.detach()

    def _add_gradient(self, z_frozen: Tensor, z: Tensor, outputs: Tensor, directions: Tensor, labels: Tensor) -> None:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            (residual,) = torch.autograd.grad(self.loss.value(leaf, labels) * len(labels), leaf)
        if self.trainable:
            parameters = [self.network.get_parameter(name) for name in self.trainable]
            cotangent = residual @ directions
            found = torch.autograd.grad(z_frozen, parameters, cotangent, allow_unused=True, materialize_grads=True)
            names = [self.prefix + name for name in self.trainable]
            _add_to(self.gradient, dict(zip(names, found, strict=True)))
        weight, bias = self.head_names
        _add_to(self.gradient, {weight: residual.T @ z, bias: residual.sum(0)})


def _add_to(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value


def _finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; mostly their sum tells, in one pass without a copy."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
