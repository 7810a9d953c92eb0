"""Estimators: from a classifier, data and a loss to the curvature of the mean loss, and its gradient.

The matrix is the generalised Gauss-Newton matrix, block by block: exact where a block can hold it, otherwise the
approximation that the estimator's name says. Every average is over samples; nothing depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dlcft.curvature.blocks import Block, Dense, Diagonal
from dlcft.curvature.form import Curvature
from dlcft.curvature.losses import Loss
from dlcft.curvature.rows import Rows, Tape, per_sample_gradients
from dlcft.curvature.statistics import (
    DiagonalStatistics,
    EkfacStatistics,
    ExactEkfacStatistics,
    ExactTkStatistics,
    InputGramStatistics,
    InputSquaresStatistics,
    KfacStatistics,
    MasStatistics,
    Statistics,
    TkfacStatistics,
)
from dlcft.network.classifier import Classifier, evaluating
from dlcft.network.inputs import Input

__all__ = ["ESTIMATORS", "Estimate", "Statistics", "estimate"]

Batches = Iterable[tuple[Input, Tensor]]

ESTIMATORS: dict[str, type[Statistics] | None] = {
    "diagonal": DiagonalStatistics,
    "mas": MasStatistics,
    "kfac": KfacStatistics,
    "tkfac": TkfacStatistics,
    "exact-tk": ExactTkStatistics,
    "ekfac": EkfacStatistics,
    "exact-ekfac": ExactEkfacStatistics,
    "dense": None,  # not layer by layer: one matrix on everything
}

PASS_SAMPLES = 64  # whose activations and gradients are held at once
DENSE_LIMIT = 20_000


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a pass over a task's data has found.

    Attributes:
        curvature: of the mean loss.
        samples: how many samples it is the mean of.
        gradient: of the mean loss, where it was asked for.
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
    gradient: bool = False,
    max_factor: int = 8192,
) -> Estimate:
    """The curvature of the mean loss at the classifier's parameters.

    Args:
        estimator: a name in `ESTIMATORS`, or a `Statistics` class.
        model: the classifier; it is left as it was.
        batches: pairs of input and label indices. Estimators with a first pass go over them twice.
        loss: of the outputs of `head`.
        head: a head's name.
        draws: output gradients sampled per sample; None for the exact sum, one backward pass per output.
        generator: where the draws come from.
        samples: how many samples are looked at; None for all of them. They are drawn by the generator out of `total`.
        total: how many there are; if unknown, the first ones are looked at.
        include_head: whether the head's parameters are covered; in task-incremental learning they are not.
        gradient: whether to find the gradient of the mean loss too.
        max_factor: wider layers get a diagonal block.

    Raises:
        ValueError: when the estimator is unknown, there is no data, or something is not finite.
    """
    kind = _resolve(estimator)
    if samples is not None and samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1, or None for all.")
    tape = Tape(model, head, max_factor)
    limited = _Limited(batches, _looked_at(samples, total, generator))
    with evaluating(model):
        if kind is None:
            return _dense(tape, limited, loss, draws, generator, include_head, gradient)
        first: Mapping[str, Block] = {}
        if kind.basis is not None:
            sampled = include_head and not loss.is_quadratic  # else the head's block is exact, and needs no basis
            first, _, _ = _one_pass(kind.basis, {}, tape, limited, loss, draws, generator, sampled, False)
        blocks, count, summed = _one_pass(kind, first, tape, limited, loss, draws, generator, include_head, gradient)
    return Estimate(_finished(blocks, tape), count, _mean(summed, count, include_head, tape) if gradient else None)


def _resolve(estimator: str | type[Statistics]) -> type[Statistics] | None:
    if not isinstance(estimator, str):
        return estimator
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown curvature {estimator!r}; known: {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[estimator]


def _looked_at(samples: int | None, total: int | None, generator: torch.Generator | None) -> Tensor | None:
    """The places of the samples that are looked at, in order; None for all. Data may be sorted by class."""
    if samples is None:
        return None
    if total is None or samples >= total:
        return torch.arange(samples)
    return torch.randperm(total, generator=generator)[:samples].sort().values


class _Limited:
    """Batches of the samples at some places, as often as asked for, in parts of `PASS_SAMPLES` at the most."""

    def __init__(self, batches: Batches, places: Tensor | None) -> None:
        if isinstance(batches, Iterator):
            batches = list(batches)  # a second pass may be needed
        self.batches = batches
        self.places = places

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        before = 0
        for x, labels in self.batches:
            if self.places is not None and before > int(self.places[-1]):
                return
            inside = torch.arange(len(labels))
            if self.places is not None:
                inside = self.places[(self.places >= before) & (self.places < before + len(labels))] - before
            before += len(labels)
            whole = len(inside) == len(labels)
            for start in range(0, len(inside), PASS_SAMPLES):
                stop = min(start + PASS_SAMPLES, len(inside))
                part = slice(start, stop) if whole else inside[start:stop].to(labels.device)
                yield _part(x, part), labels[part]


def _part(x: Input, part: slice | Tensor) -> Input:
    if isinstance(x, Mapping):
        return {key: value[part] for key, value in x.items()}
    return tuple(value[part] for value in x) if isinstance(x, tuple) else x[part]


def _one_pass(
    kind: type[Statistics],
    first: Mapping[str, Block],
    tape: Tape,
    batches: Batches,
    loss: Loss,
    draws: int | None,
    generator: torch.Generator | None,
    include_head: bool,
    gradient: bool,
) -> tuple[dict[str, Block], int, dict[str, Tensor]]:
    importance = issubclass(kind, MasStatistics)
    statistics: dict[str, Statistics] = {}
    others: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    count = 0
    passes = tape.passes(
        batches,
        loss,
        draws=draws,
        generator=generator,
        gradient=gradient,
        needs_outputs=include_head or importance or not loss.is_quadratic,
        output_grads=(lambda outputs: 2 * outputs[None]) if importance else None,
    )
    for rows in passes:
        if not statistics:
            statistics = _statistics(kind, first, tape, loss, include_head)
        count += rows.count
        with torch.autocast(rows.z.device.type, enabled=False):  # sums are not for half precision
            for name, layer_rows in rows.layers.items():
                statistics[name].add(layer_rows.inputs, layer_rows.grads)
            if include_head:
                statistics[""].add([rows.z], [[v] for v in rows.output_grads])
        for name, grads in rows.others.items():
            value = grads.abs().sum((0, 1)) if importance else grads.square().sum((0, 1))
            others[name] = others[name] + value if name in others else value
        _add(summed, rows.gradient)
    blocks: dict[str, Block] = {}
    for name in list(statistics):  # let go one by one: the sums are as large as what they become
        blocks |= statistics.pop(name).blocks(count)
    for name, value in others.items():
        blocks[tape.prefix + name] = Diagonal((tape.prefix + name,), value / count)
    return blocks, count, summed


def _statistics(
    kind: type[Statistics], first: Mapping[str, Block], tape: Tape, loss: Loss, include_head: bool
) -> dict[str, Statistics]:
    """One for each layer, and under the empty name one for the head."""
    statistics = {
        name: kind(tape.geometry(name), tuple(tape.prefix + n for n in names), first.get(tape.prefix + name))
        for name, names in tape.names().items()
    }
    if include_head:
        head, names = tape.model.head(tape.head), tape.model.head_names(tape.head)
        on_head = kind
        if loss.is_quadratic and kind is not MasStatistics:
            on_head = InputSquaresStatistics if kind is DiagonalStatistics else InputGramStatistics
        statistics[""] = on_head(head, names, first.get(names[0].removesuffix(".weight")))
    return statistics


def _dense(
    tape: Tape,
    batches: Batches,
    loss: Loss,
    draws: int | None,
    generator: torch.Generator | None,
    include_head: bool,
    gradient: bool,
) -> Estimate:
    params = tape.model.params(tape.head if include_head else None)
    size = sum(p.numel() for p in params.values())
    if size > DENSE_LIMIT:
        raise ValueError(f"dense curvature is for at most {DENSE_LIMIT:,} parameters; these are {size:,}.")
    total = torch.zeros(size, size, dtype=next(iter(params.values())).dtype)
    summed: dict[str, Tensor] = {}
    count = 0
    inputs: list[Input] = []

    def noted() -> Iterator[tuple[Input, Tensor]]:
        for x, labels in batches:
            inputs[:] = [x]
            yield x, labels

    for rows in tape.passes(noted(), loss, draws=draws, generator=generator, gradient=gradient):
        jacobian = _jacobian(tape, inputs[0], rows, include_head)
        total += jacobian.T @ jacobian
        count += rows.count
        _add(summed, rows.gradient)
    shapes = tuple(tuple(p.shape) for p in params.values())
    block = Dense(tuple(params), shapes, loss.is_quadratic, total / count)
    curvature = _finished({"all": block}, tape)
    return Estimate(curvature, count, _mean(summed, count, include_head, tape) if gradient else None)


def _jacobian(tape: Tape, x: Input, rows: Rows, include_head: bool) -> Tensor:
    """One row for each draw and sample: the gradient of that output combination with respect to all parameters."""
    cotangents = rows.output_grads @ tape.directions()
    found = per_sample_gradients(tape.network, x, tape.trainable, cotangents, tape.output)
    columns = [found[name].flatten(2) for name in tape.trainable]
    if include_head:
        columns += [torch.einsum("dno,nk->dnok", rows.output_grads, rows.z).flatten(2), rows.output_grads]
    return torch.cat(columns, 2).flatten(0, 1)


def _add(total: dict[str, Tensor], part: Mapping[str, Tensor]) -> None:
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value


def _mean(summed: Mapping[str, Tensor], count: int, include_head: bool, tape: Tape) -> dict[str, Tensor]:
    names = tape.model.params(tape.head if include_head else None)
    return {name: value / count for name, value in summed.items() if name in names}


def _finished(blocks: Mapping[str, Block], tape: Tape) -> Curvature:
    for name, block in blocks.items():
        if not all(bool(torch.isfinite(t).all()) for t in block.tensors().values()):
            raise ValueError(
                f"the curvature of {name!r} is not finite: its inputs or gradients are not (or overflow "
                f"{next(iter(block.tensors().values())).dtype})."
            )
    curvature = Curvature(blocks)
    left_out = set(tape.model.params()) - set(curvature.names)
    if left_out:
        raise ValueError(f"no curvature was found for the trainable parameter {sorted(left_out)[0]!r}.")
    return curvature
