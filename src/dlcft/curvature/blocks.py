"""Blocks: the ways to store a positive semi-definite matrix on the parameters of a layer.

A layer's parameters form a matrix D (groups × outputs × inputs, the bias as its last column). A block
knows nothing of networks or data.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
B = TypeVar("B", bound="Block")


@dataclass(frozen=True, eq=False)
class Block(abc.ABC):
    """A positive semi-definite matrix on the parameters `names`. One class a kind: abstract or final."""

    names: tuple[str, ...]

    @abc.abstractmethod
    def product(self, delta: Mapping[str, Tensor]) -> Tensors:
        """H·d."""

    @abc.abstractmethod
    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """(H + damping·I)⁻¹·d."""

    @abc.abstractmethod
    def trace(self, outputs: int) -> float:
        """The trace; `outputs` is the number of rows where the block itself does not know it."""

    def merge(self: B, other: B, share: float) -> B:
        """`(1 − share)·self + share·other` of the statistics, which is that of the pooled data."""
        return self.zip(other, lambda a, b: torch.lerp(a, b.to(a), share))

    def grow(self: B, outputs: int) -> B:
        """The same block after the layer has got new outputs, as if they had been there with zero weights."""
        raise ValueError(f"{type(self).__name__} blocks cannot grow: {', '.join(self.names)}.")

    def tensors(self) -> Tensors:
        """The stored tensors by field name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(self: B, function: Callable[[Tensor], Tensor]) -> B:
        """A block with every stored tensor changed."""
        changed: dict[str, Any] = {name: function(t) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **changed)

    def zip(self: B, other: B, function: Callable[[Tensor, Tensor], Tensor]) -> B:
        """A block with every stored tensor combined with the other's."""
        _check_same_kind(self, other)
        theirs = other.tensors()
        changed: dict[str, Any] = {name: function(t, theirs[name]) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **changed)


def _check_same_kind(one: Block, other: Block) -> None:
    if type(one) is not type(other) or one.names != other.names:
        raise ValueError(
            f"cannot merge a {type(other).__name__} block on {other.names} into a {type(one).__name__} block on "
            f"{one.names}."
        )
    for name, tensor in one.tensors().items():
        if tensor.shape != other.tensors()[name].shape:
            raise ValueError(
                f"cannot merge blocks of different sizes on {one.names}: {name} is {tuple(tensor.shape)} and "
                f"{tuple(other.tensors()[name].shape)}."
            )


@dataclass(frozen=True, eq=False)
class Diagonal(Block):
    """`Σ h∘d∘d`: one non-negative number per entry of one parameter."""

    values: Tensor

    def product(self, delta: Mapping[str, Tensor]) -> Tensors:
        """See `Block`."""
        (name,) = self.names
        return {name: self.values * delta[name]}

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """See `Block`."""
        (name,) = self.names
        return {name: delta[name] / (self.values + damping)}

    def trace(self, outputs: int) -> float:
        """See `Block`."""
        return float(self.values.sum(dtype=torch.float64))

    def grow(self, outputs: int) -> Diagonal:
        """Zeros: the new outputs had no importance."""
        return dataclasses.replace(self, values=_pad(self.values, 0, outputs))


@dataclass(frozen=True, eq=False)
class Layer(Block):
    """A block on one layer's matrix D: `names` is its weight and, where it has one, its bias."""

    groups: int

    def matrix(self, delta: Mapping[str, Tensor]) -> Tensor:
        """D: groups × outputs × inputs, the bias as last column."""
        weight = delta[self.names[0]]
        matrix = weight.reshape(self.groups, weight.shape[0] // self.groups, -1)
        if len(self.names) == 1:
            return matrix
        return torch.cat([matrix, delta[self.names[1]].reshape(self.groups, -1, 1)], 2)

    def split(self, matrix: Tensor, delta: Mapping[str, Tensor]) -> Tensors:
        """The inverse of `matrix`, in the shapes of `delta`."""
        weight = delta[self.names[0]]
        if len(self.names) == 1:
            return {self.names[0]: matrix.reshape(weight.shape)}
        parts = {self.names[0]: matrix[..., :-1].reshape(weight.shape)}
        return parts | {self.names[1]: matrix[..., -1].reshape(delta[self.names[1]].shape)}

    def product(self, delta: Mapping[str, Tensor]) -> Tensors:
        """See `Block`."""
        return self.split(self.times(self.matrix(delta)), delta)

    @abc.abstractmethod
    def times(self, matrix: Tensor) -> Tensor:
        """The product in matrix form."""


@dataclass(frozen=True, eq=False)
class Kronecker(Layer):
    """`⟨D, L D R⟩/divisor`: K-FAC (L = G, R = A, divisor 1) and TK-FAC (L = Ψ, R = Φ, divisor δ = tr).

    Attributes:
        left: groups × outputs × outputs.
        right: groups × inputs × inputs.
        divisor: one number a group.
    """

    left: Tensor
    right: Tensor
    divisor: Tensor

    def times(self, matrix: Tensor) -> Tensor:
        """See `Layer`."""
        # Transposed, with both factors symmetric: `matrix @ right` takes a quarter longer where K = 9·512 + 1.
        return (self.right @ (matrix.mT @ (self.left * self._factor))).mT.contiguous()

    @cached_property
    def _factor(self) -> Tensor:
        return _inverse(self.divisor)[:, None, None]

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """Exact, through the factors' eigenvectors."""
        (left_values, left), (right_values, right) = self.eigen
        values = left_values[:, :, None] * right_values[:, None, :] * self._factor
        rotated = left.mT @ self.matrix(delta) @ right
        return self.split(left @ (rotated / (values + damping)) @ right.mT, delta)

    @cached_property
    def eigen(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Eigenvalues (clipped at zero) and eigenvectors of `left` and of `right`."""
        return _eigen(self.left), _eigen(self.right)

    def trace(self, outputs: int) -> float:
        """See `Block`."""
        return float((_traces(self.left) * _traces(self.right) * _inverse(self.divisor.double())).sum())

    def grow(self, outputs: int) -> Kronecker:
        """Zeros in `left`: there is no better rule where the new outputs' curvature is not known."""
        return dataclasses.replace(self, left=_pad(_pad(self.left, 1, outputs), 2, outputs))


@dataclass(frozen=True, eq=False)
class EigenKronecker(Layer):
    """`Σ S∘(Uᵀ D V)∘(Uᵀ D V)`: EK-FAC, exact second moments in a Kronecker-factored eigenbasis.

    The factors are kept, because the basis of a merge is that of the merged factors.

    References:
        George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis" (2018),
        https://arxiv.org/abs/1806.03884
    """

    left: Tensor
    right: Tensor
    left_vectors: Tensor
    right_vectors: Tensor
    values: Tensor

    def times(self, matrix: Tensor) -> Tensor:
        """See `Layer`."""
        rotated = self.right_vectors.mT @ (matrix.mT @ self.left_vectors)  # transposed: as in `Kronecker`
        return (self.right_vectors @ ((self.values.mT * rotated) @ self.left_vectors.mT)).mT.contiguous()

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """See `Block`."""
        rotated = self.left_vectors.mT @ self.matrix(delta) @ self.right_vectors
        solved = self.left_vectors @ (rotated / (self.values + damping)) @ self.right_vectors.mT
        return self.split(solved, delta)

    def trace(self, outputs: int) -> float:
        """See `Block`."""
        return float(self.values.sum(dtype=torch.float64))

    def merge(self, other: EigenKronecker, share: float) -> EigenKronecker:
        """Move both sets of eigenvalues to the merged factors' basis: `(U_newᵀ U_old)∘2` on each side."""
        _check_same_kind(self, other)
        left = torch.lerp(self.left, other.left.to(self.left), share)
        right = torch.lerp(self.right, other.right.to(self.right), share)
        _, left_vectors = _eigen(left)
        _, right_vectors = _eigen(right)

        def moved(old: EigenKronecker) -> Tensor:
            on_left = (left_vectors.mT @ old.left_vectors.to(left)).square()
            on_right = (right_vectors.mT @ old.right_vectors.to(left)).square()
            return on_left @ old.values.to(left) @ on_right.mT

        values = torch.lerp(moved(self), moved(other), share)
        return EigenKronecker(self.names, self.groups, left, right, left_vectors, right_vectors, values)

    def grow(self, outputs: int) -> EigenKronecker:
        """Zeros: the new outputs are directions of their own without curvature."""
        vectors = _pad(_pad(self.left_vectors, 1, outputs), 2, outputs)
        for new in range(self.left_vectors.shape[1], outputs):
            vectors[:, new, new] = 1
        left = _pad(_pad(self.left, 1, outputs), 2, outputs)
        return dataclasses.replace(self, left=left, left_vectors=vectors, values=_pad(self.values, 1, outputs))


@dataclass(frozen=True, eq=False)
class InputGram(Layer):
    """`⟨D, D Z⟩` with `Z = E[z zᵀ]`: a last layer under squared loss, `E[zzᵀ] ⊗ I`.

    It is exact, and growing the layer by new outputs changes nothing in Z.
    """

    gram: Tensor

    def times(self, matrix: Tensor) -> Tensor:
        """See `Layer`."""
        return matrix @ self.gram

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """See `Block`."""
        values, vectors = _eigen(self.gram)
        return self.split((self.matrix(delta) @ vectors / (values[:, None, :] + damping)) @ vectors.mT, delta)

    def trace(self, outputs: int) -> float:
        """See `Block`."""
        return outputs / self.groups * float(_traces(self.gram).sum())

    def grow(self, outputs: int) -> InputGram:
        """Nothing to do: the identity is implied."""
        return self


@dataclass(frozen=True, eq=False)
class Dense(Block):
    """The whole matrix on several parameters, flattened and joined in the order of `names`. For small networks.

    Attributes:
        shapes: of the parameters.
        repeats: whether a new output of a grown layer has the self-curvature of the first one (squared
            loss) or none.
    """

    shapes: tuple[tuple[int, ...], ...]
    repeats: bool
    values: Tensor

    def flat(self, delta: Mapping[str, Tensor]) -> Tensor:
        """All parameters as one vector."""
        return torch.cat([delta[name].reshape(-1) for name in self.names])

    def _unflat(self, vector: Tensor, delta: Mapping[str, Tensor]) -> Tensors:
        parts = vector.split([delta[name].numel() for name in self.names])
        return {name: part.view(delta[name].shape) for name, part in zip(self.names, parts, strict=True)}

    def product(self, delta: Mapping[str, Tensor]) -> Tensors:
        """See `Block`."""
        return self._unflat(self.values @ self.flat(delta), delta)

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """See `Block`."""
        identity = torch.eye(len(self.values), dtype=self.values.dtype, device=self.values.device)
        return self._unflat(torch.linalg.solve(self.values + damping * identity, self.flat(delta)), delta)

    def trace(self, outputs: int) -> float:
        """See `Block`."""
        return float(self.values.diagonal().sum(dtype=torch.float64))

    def grow_rows(self, grown: tuple[str, ...], outputs: int) -> Dense:
        """The block after the parameters `grown` (a layer's weight and bias) have got new rows."""
        before = dict(zip(self.names, self.shapes, strict=True))
        shapes = tuple((outputs, *s[1:]) if n in grown else s for n, s in before.items())
        size = sum(torch.Size(s).numel() for s in shapes)
        old, first, added = [], [], []  # positions in the new vector: what was there; output 0; the new outputs
        start = 0
        for name, shape in zip(self.names, shapes, strict=True):
            positions = torch.arange(start, start + torch.Size(shape).numel()).view(shape)
            start += positions.numel()
            old.append(positions[: before[name][0]].reshape(-1) if before[name] else positions.reshape(-1))
            if name in grown:
                first.append(positions[0].reshape(-1))
                added.append(positions[before[name][0] :].reshape(outputs - before[name][0], -1))
        values = self.values.new_zeros(size, size)
        kept = torch.cat(old)
        values[kept[:, None], kept] = self.values
        if self.repeats:
            row = torch.cat(first)
            for new in torch.cat(added, 1):
                values[new[:, None], new] = values[row[:, None], row]
        return Dense(self.names, shapes, self.repeats, values)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, not below zero, and eigenvectors of symmetric matrices; in float64, where rounding is no matter."""
    values, vectors = torch.linalg.eigh(matrix.double())
    # contiguous, so that products round alike before and after the vectors were saved and loaded
    return values.clamp_min(0).to(matrix.dtype), vectors.to(matrix.dtype).contiguous()


def _traces(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)


def _inverse(number: Tensor) -> Tensor:
    """1/x, and 0 where there was nothing: a layer that no gradient has reached has no curvature."""
    return torch.where(number > 0, 1 / number.clamp_min(torch.finfo(number.dtype).tiny), 0)


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Zeros appended along a dimension until it has `size` entries."""
    shape = list(tensor.shape)
    if size < shape[dim]:
        raise ValueError(f"cannot shrink from {shape[dim]} to {size} outputs.")
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


BLOCKS: dict[str, type[Block]] = {
    kind.__name__: kind for kind in (Diagonal, Kronecker, EigenKronecker, InputGram, Dense)
}
