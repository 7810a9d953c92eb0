"""What is summed over the data for one layer, and the block it becomes: one class an estimator.

References:
    Kirkpatrick et al., "Overcoming catastrophic forgetting" (EWC, 2017), https://arxiv.org/abs/1612.00796
    Grosse, Martens, "A Kronecker-factored Approximate Fisher Matrix for Convolution Layers" (2016),
        https://arxiv.org/abs/1602.01407
    Gao et al., "A Trace-restricted Kronecker-Factored Approximation" (TK-FAC, 2020), https://arxiv.org/abs/2011.10741
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dlcft.curvature import grams
from dlcft.curvature.blocks import Block, Diagonal, EigenKronecker, InputGram, Kronecker
from dlcft.curvature.grams import Layer

Uses = Sequence[Tensor]


class Statistics(abc.ABC):
    """Sums over samples for one layer.

    Args:
        layer: the layer, for its geometry.
        names: the full names of its trainable parameters, weight first.
        first: the block that the first pass has found, where `basis` asks for one.
    """

    basis: ClassVar[type[Statistics] | None] = None
    """The statistics of a first pass that this one needs, or None."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        self.layer = layer
        self.names = names
        self.sums: dict[str, Tensor] = {}

    @abc.abstractmethod
    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """One batch: the layer's inputs, and for each draw the gradients at its outputs."""

    @abc.abstractmethod
    def blocks(self, count: int) -> dict[str, Block]:
        """The blocks by name, of the mean over `count` samples."""

    def _sum(self, key: str, value: Tensor) -> None:
        if key in self.sums:
            self.sums[key] += value
        else:
            self.sums[key] = value

    @property
    def _name(self) -> str:
        return self.names[0].removesuffix(".weight")

    @property
    def _groups(self) -> int:
        return 1 if isinstance(self.layer, torch.nn.Linear) else self.layer.groups


class DiagonalStatistics(Statistics):
    """`E[D_n ∘ D_n]`: EWC, from per-sample gradients."""

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        for gs in grads:
            self._sum("squares", grams.squared_gradient(self.layer, inputs, gs))

    def blocks(self, count: int) -> dict[str, Block]:
        """One block a parameter."""
        values = self.sums["squares"] / count
        return diagonal_blocks(self.layer, self.names, values)


class MasStatistics(Statistics):
    """`E[|∂‖f‖²/∂θ|]`, the absolute value taken per sample.

    References:
        Aljundi et al., "Memory Aware Synapses" (2018), https://arxiv.org/abs/1711.09601
    """

    _chunk = 16  # samples whose gradients are held at once

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        for gs in grads:
            for start in range(0, len(inputs[0]), self._chunk):
                part = slice(start, start + self._chunk)
                each = grams.per_sample_gradients(self.layer, [x[part] for x in inputs], [g[part] for g in gs])
                self._sum("absolute", each.abs().sum(0))

    def blocks(self, count: int) -> dict[str, Block]:
        """One block a parameter."""
        return diagonal_blocks(self.layer, self.names, self.sums["absolute"] / count)


class KfacStatistics(Statistics):
    """`A = E[Σ_s a aᵀ]`, `G = E[(1/S) Σ_s g gᵀ]`."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        super().__init__(layer, names)
        self.right = grams.InputGram(layer)

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        self.right.add(inputs)
        for gs in grads:
            self._sum("left", grams.output_gram(self.layer, gs))

    def blocks(self, count: int) -> dict[str, Block]:
        """One Kronecker block."""
        left, right = self.sums["left"] / count, self.right.result().div_(count)
        ones = left.new_ones(self._groups)
        return {self._name: Kronecker(self.names, self._groups, left, right, ones)}


class TkfacStatistics(KfacStatistics):
    """`Φ = E[tr(Γ)Λ]`, `Ψ = E[tr(Λ)Γ]`, `δ = E[tr Λ · tr Γ]`, with `Λ = Σ_s aaᵀ`, `Γ = (1/S)Σ_s ggᵀ` per sample.

    The convolutional form is our reading of the TK-FAC paper. It keeps the true trace where S = 1 only.
    """

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        input_traces = grams.input_traces(self.layer, inputs)
        output_traces = torch.stack([grams.output_traces(self.layer, gs) for gs in grads])
        self.right.add(inputs, output_traces.sum(0))
        for gs in grads:
            self._sum("left", grams.output_gram(self.layer, gs, input_traces))
        self._sum("divisor", (input_traces * output_traces.sum(0)).sum(0))

    def blocks(self, count: int) -> dict[str, Block]:
        """One Kronecker block."""
        left, right, divisor = self.sums["left"] / count, self.right.result().div_(count), self.sums["divisor"] / count
        return {self._name: Kronecker(self.names, self._groups, left, right, divisor)}


class ExactTkStatistics(Statistics):
    """`Φ = E[D_nᵀ D_n]`, `Ψ = E[D_n D_nᵀ]`, `δ = E‖D_n‖²`: the partial traces and the trace of the true block."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        super().__init__(layer, names)
        self.moments = grams.GradientGrams(layer)

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        for gs in grads:
            self.moments.add(inputs, gs)

    def blocks(self, count: int) -> dict[str, Block]:
        """One Kronecker block."""
        right, left, divisor = (moment.div_(count) for moment in self.moments.result())
        return {self._name: Kronecker(self.names, self._groups, left, right, divisor)}


class EkfacStatistics(Statistics):
    """`E[(Uᵀ D_n V)²]` in the eigenbasis of K-FAC's factors, which a first pass has found."""

    basis: ClassVar[type[Statistics] | None] = KfacStatistics

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        super().__init__(layer, names)
        assert isinstance(first, Kronecker)
        self.factors = first
        (_, self.left), (_, self.right) = first.eigen

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        for gs in grads:
            self._sum("values", grams.rotated_squares(self.layer, inputs, gs, self.left, self.right))

    def blocks(self, count: int) -> dict[str, Block]:
        """One block in the eigenbasis."""
        f = self.factors
        values = self.sums["values"] / count
        return {self._name: EigenKronecker(self.names, f.groups, f.left, f.right, self.left, self.right, values)}


class ExactEkfacStatistics(EkfacStatistics):
    """The same in the eigenbasis of the exact partial traces."""

    basis: ClassVar[type[Statistics] | None] = ExactTkStatistics


class InputGramStatistics(Statistics):
    """`Z = E[z zᵀ]`: a head under squared loss, exactly."""

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """See `Statistics`."""
        (z,) = inputs
        gram = grams.input_gram(self.layer, [z.double()])
        self._sum("gram", gram.to(torch.promote_types(z.dtype, torch.float32)))

    def blocks(self, count: int) -> dict[str, Block]:
        """One block."""
        return {self._name: InputGram(self.names, 1, self.sums["gram"] / count)}


class InputSquaresStatistics(InputGramStatistics):
    """Its diagonal alone: a head under squared loss for a diagonal estimator. It grows for free too."""

    def blocks(self, count: int) -> dict[str, Block]:
        """One block."""
        diagonal = self.sums["gram"].diagonal(dim1=1, dim2=2) / count
        return {self._name: InputGram(self.names, 1, torch.diag_embed(diagonal))}


def diagonal_blocks(layer: Layer, names: tuple[str, ...], values: Tensor) -> dict[str, Block]:
    """Blocks of the weight and the bias from one number per entry of the layer's matrix."""
    weight = values[..., :-1] if len(names) == 2 else values
    blocks: dict[str, Block] = {names[0]: Diagonal((names[0],), weight.reshape(layer.weight.shape).contiguous())}
    if len(names) == 2:
        blocks[names[1]] = Diagonal((names[1],), values[..., -1].reshape(-1))
    return blocks
