"""Statistics: the sums over the data for one layer, and the block made of them. One class per estimator.

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
from dlcft.curvature.blocks import Block, Diagonal, EigenKronecker, InputGram, Kronecker, TraceKronecker
from dlcft.curvature.grams import Layer
from dlcft.curvature.losses import Loss
from dlcft.network.names import find_class

Uses = Sequence[Tensor]


class Statistics(abc.ABC):
    """Sums over samples for one layer, and the blocks made of them.

    Args:
        layer: the layer, for its geometry.
        names: the full names of its trainable parameters, weight first.
        first: the layer's block from the first pass, if `basis` asks for one.
    """

    basis: ClassVar[type[Statistics] | None] = None
    """The statistics of a first pass over the data, if this one needs its blocks."""

    by_layer: ClassVar[bool] = True
    """False for `DenseStatistics` alone."""

    reads_outputs: ClassVar[bool] = False
    """Whether `output_grads` depends on the outputs under a squared loss too."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        self.layer = layer
        self.names = names
        self.sums: dict[str, Tensor] = {}

    @abc.abstractmethod
    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        """Add one batch.

        Args:
            inputs: the layer's inputs, one tensor per use of the layer.
            grads: for each draw, the gradients at the layer's outputs, one tensor per use.
        """

    @abc.abstractmethod
    def blocks(self, count: int) -> dict[str, Block]:
        """The blocks by name, of the mean over `count` samples."""

    @classmethod
    def on_head(cls, loss: Loss) -> type[Statistics]:
        """The statistics for the head: exact and without draws under a squared loss, otherwise this class."""
        return InputGramStatistics if loss.is_quadratic else cls

    @classmethod
    def output_grads(cls, outputs: Tensor, loss: Loss, draws: int | None, generator: torch.Generator | None) -> Tensor:
        """The vectors (draws × samples × outputs) that are propagated back; those of the loss by default."""
        return loss.output_grads(outputs, draws, generator)

    @classmethod
    def diagonal_sum(cls, gradients: Tensor) -> Tensor:
        """The diagonal of a parameter outside of the known layers, summed over a batch.

        Args:
            gradients: draws × samples × shape of the parameter.
        """
        return gradients.square().sum((0, 1))

    def add_to(self, key: str, value: Tensor) -> None:
        """Add a value to the sum of that name."""
        if key in self.sums:
            self.sums[key] += value
        else:
            self.sums[key] = value

    @property
    def name(self) -> str:
        """The layer's name, which its block gets too."""
        return self.names[0].removesuffix(".weight")

    @property
    def groups(self) -> int:
        """The groups of a convolution; 1 for a linear layer."""
        return 1 if isinstance(self.layer, torch.nn.Linear) else self.layer.groups


class DiagonalStatistics(Statistics):
    """`E[D_n ∘ D_n]`: EWC, from per-sample gradients."""

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        for gs in grads:
            self.add_to("sums", grams.squared_gradient(self.layer, inputs, gs))

    def blocks(self, count: int) -> dict[str, Block]:
        return diagonal_blocks(self.layer, self.names, self.sums["sums"] / count)

    @classmethod
    def on_head(cls, loss: Loss) -> type[Statistics]:
        """The diagonal of the input Gram under a squared loss, otherwise this class."""
        return InputSquaresStatistics if loss.is_quadratic else cls


class MasStatistics(DiagonalStatistics):
    """`E[|∂‖f‖²/∂θ|]`, the absolute value taken per sample.

    References:
        Aljundi et al., "Memory Aware Synapses" (2018), https://arxiv.org/abs/1711.09601
    """

    reads_outputs: ClassVar[bool] = True
    _chunk = 16  # samples whose gradients are held at once

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        for gs in grads:
            for start in range(0, len(inputs[0]), self._chunk):
                part = slice(start, start + self._chunk)
                each = grams.per_sample_gradients(self.layer, [x[part] for x in inputs], [g[part] for g in gs])
                self.add_to("sums", each.abs().sum(0))

    @classmethod
    def on_head(cls, loss: Loss) -> type[Statistics]:
        """This class, whatever the loss: the importance is that of ‖f‖²."""
        return cls

    @classmethod
    def output_grads(cls, outputs: Tensor, loss: Loss, draws: int | None, generator: torch.Generator | None) -> Tensor:
        return 2 * outputs[None]

    @classmethod
    def diagonal_sum(cls, gradients: Tensor) -> Tensor:
        return gradients.abs().sum((0, 1))


class KfacStatistics(Statistics):
    """`A = E[Σ_s a aᵀ]`, `G = E[(1/S) Σ_s g gᵀ]`."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        super().__init__(layer, names)
        self.right = grams.InputGram(layer)

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        self.right.add(inputs)
        for gs in grads:
            self.add_to("left", grams.output_gram(self.layer, gs))

    def blocks(self, count: int) -> dict[str, Block]:
        left, right = self.sums["left"] / count, self.right.result().div_(count)
        divisor = self.sums["divisor"] / count if "divisor" in self.sums else left.new_ones(self.groups)
        return {self.name: Kronecker(self.names, self.groups, left, right, divisor)}


class PerSampleTkfacStatistics(KfacStatistics):
    """`Φ = E[tr(Γ)Λ]`, `Ψ = E[tr(Λ)Γ]`, `δ = E[tr Λ · tr Γ]`, with `Λ = Σ_s aaᵀ`, `Γ = (1/S)Σ_s ggᵀ` per sample.

    A convolution's positions are taken as independent, a reading of the TK-FAC paper (arXiv 2011.10741): it keeps the
    true trace only where S = 1.
    """

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        input_traces = grams.input_traces(self.layer, inputs)
        output_traces = torch.stack([grams.output_traces(self.layer, gs) for gs in grads])
        self.right.add(inputs, output_traces.sum(0))
        for gs in grads:
            self.add_to("left", grams.output_gram(self.layer, gs, input_traces))
        self.add_to("divisor", (input_traces * output_traces.sum(0)).sum(0))


class TkfacStatistics(KfacStatistics):
    """K-FAC's `A` and `G`, and `δ = E‖D_n‖²`, the exact trace: TK-FAC as the code of DLCFT's authors has it."""

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        super().add(inputs, grads)
        for gs in grads:
            self.add_to("trace", grams.gradient_norms(self.layer, inputs, gs).sum(0))

    def blocks(self, count: int) -> dict[str, Block]:
        left, right = self.sums["left"] / count, self.right.result().div_(count)
        return {self.name: TraceKronecker(self.names, self.groups, left, right, self.sums["trace"] / count)}


class ExactTkStatistics(Statistics):
    """`Φ = E[D_nᵀ D_n]`, `Ψ = E[D_n D_nᵀ]`, `δ = E‖D_n‖²`: the partial traces and the trace of the true block."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        super().__init__(layer, names)
        self.moments = grams.GradientGrams(layer)

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        for gs in grads:
            self.moments.add(inputs, gs)

    def blocks(self, count: int) -> dict[str, Block]:
        right, left, divisor = (moment.div_(count) for moment in self.moments.result())
        return {self.name: Kronecker(self.names, self.groups, left, right, divisor)}


class EkfacStatistics(Statistics):
    """`E[(Uᵀ D_n V)²]` in the eigenbasis of K-FAC's factors, from a first pass."""

    basis: ClassVar[type[Statistics] | None] = KfacStatistics

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        super().__init__(layer, names)
        assert isinstance(first, Kronecker)
        self.factors = first
        # In the factors' own precision, which is faster than float64: of a basis, only orthogonality matters here.
        self.left, self.right = (
            torch.linalg.eigh(factor).eigenvectors.contiguous() for factor in (first.left, first.right)
        )

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        for gs in grads:
            self.add_to("values", grams.rotated_squares(self.layer, inputs, gs, self.left, self.right))

    def blocks(self, count: int) -> dict[str, Block]:
        f = self.factors
        values = self.sums["values"] / count
        return {self.name: EigenKronecker(self.names, f.groups, f.left, f.right, self.left, self.right, values)}


class ExactEkfacStatistics(EkfacStatistics):
    """The same in the eigenbasis of the exact partial traces."""

    basis: ClassVar[type[Statistics] | None] = ExactTkStatistics


class InputGramStatistics(Statistics):
    """`Z = E[z zᵀ]`: a head under squared loss, exactly."""

    def add(self, inputs: Uses, grads: Sequence[Uses]) -> None:
        (z,) = inputs
        gram = grams.InputGram(self.layer)
        gram.add([z.double()])
        self.add_to("gram", gram.result().to(torch.promote_types(z.dtype, torch.float32)))

    def blocks(self, count: int) -> dict[str, Block]:
        return {self.name: InputGram(self.names, 1, self.sums["gram"] / count)}


class InputSquaresStatistics(InputGramStatistics):
    """The diagonal of `Z` alone: a head under squared loss for a diagonal estimator. Growing is free here too."""

    def blocks(self, count: int) -> dict[str, Block]:
        diagonal = self.sums["gram"].diagonal(dim1=1, dim2=2) / count
        return {self.name: InputGram(self.names, 1, torch.diag_embed(diagonal))}


class DenseStatistics(Statistics):
    """A marker for `estimate`: one `Dense` block on all parameters, from gradients by sample instead of rows."""

    by_layer: ClassVar[bool] = False

    @classmethod
    def on_head(cls, loss: Loss) -> type[Statistics]:
        """This class: the block covers the head too."""
        return cls


ESTIMATORS: dict[str, type[Statistics]] = {
    "diagonal": DiagonalStatistics,
    "mas": MasStatistics,
    "kfac": KfacStatistics,
    "tkfac": TkfacStatistics,
    "tkfac-per-sample": PerSampleTkfacStatistics,
    "exact-tk": ExactTkStatistics,
    "ekfac": EkfacStatistics,
    "exact-ekfac": ExactEkfacStatistics,
    "dense": DenseStatistics,  # type: ignore[type-abstract]
}


def find_statistics(estimator: str | type[Statistics]) -> type[Statistics]:
    """The class of an estimator: a name in `ESTIMATORS`, "module:Name", or the class itself."""
    if isinstance(estimator, str):
        return find_class("curvature", estimator, ESTIMATORS, Statistics)
    if not (isinstance(estimator, type) and issubclass(estimator, Statistics)):
        raise ValueError(f"curvature is {estimator!r}; it must be a name or a subclass of Statistics.")
    return estimator


def diagonal_blocks(layer: Layer, names: tuple[str, ...], values: Tensor) -> dict[str, Block]:
    """Diagonal blocks of the weight and the bias, from one number per entry of the layer's matrix D."""
    weight = values[..., :-1] if len(names) == 2 else values
    blocks: dict[str, Block] = {names[0]: Diagonal((names[0],), weight.reshape(layer.weight.shape).contiguous())}
    if len(names) == 2:
        blocks[names[1]] = Diagonal((names[1],), values[..., -1].reshape(-1))
    return blocks
