"""Blocks: the ways to store a positive semi-definite matrix H on the parameters of a layer.

A layer's parameters form a matrix D (groups × outputs × inputs, the bias as its last column). A block
knows nothing of networks or data.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlcft.network.products import times_transposed

Tensors = dict[str, Tensor]
B = TypeVar("B", bound="Block")
F = TypeVar("F", bound="Factored")


@dataclass(frozen=True, eq=False)
class Block(abc.ABC):
    """A positive semi-definite matrix H on the parameters `names`.

    A kind of block is a frozen dataclass: its fields are tensors, or values that JSON can hold (tuples in place of
    lists). A kind of your own, at the top of a module that is imported before loading, is saved and loaded like these.
    """

    names: tuple[str, ...]

    @abc.abstractmethod
    def matvec(self, delta: Mapping[str, Tensor]) -> Tensors:
        """`H d`, by parameter name."""

    @abc.abstractmethod
    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """`(H + damping·I)⁻¹ d`, by parameter name."""

    @abc.abstractmethod
    def trace(self, outputs: int) -> float:
        """The trace of H, for a layer with this number of outputs."""

    def merge(self: B, other: B, share: float) -> B:
        """The block of the pooled data: `(1 − share)·self + share·other`, tensor by tensor."""
        if type(self) is not type(other) or self.names != other.names:
            raise ValueError(
                f"cannot merge a {type(other).__name__} block on {other.names} into a {type(self).__name__} block on "
                f"{self.names}."
            )
        theirs = other.tensors()
        for name, tensor in self.tensors().items():
            if tensor.shape != theirs[name].shape:
                raise ValueError(
                    f"cannot merge blocks of different sizes on {self.names}: {name} is {tuple(tensor.shape)} and "
                    f"{tuple(theirs[name].shape)}."
                )
        merged: dict[str, Any] = {n: torch.lerp(t, theirs[n].to(t), share) for n, t in self.tensors().items()}
        return dataclasses.replace(self, **merged)

    def grow(self: B, names: tuple[str, ...], outputs: int) -> B:
        """The block after a layer has got new outputs, as if they had been there with zero weights.

        Args:
            names: the layer's parameters; at least one is this block's.
            outputs: how many the layer has now.
        """
        raise ValueError(f"{type(self).__name__} blocks cannot grow: {', '.join(self.names)}.")

    def head_moment(self) -> Tensor | None:
        """`Z` where H is `Z ⊗ I`, with one group; None for all other blocks."""
        return None

    def tensors(self) -> Tensors:
        """The stored tensors by field name."""
        return {name: value for name, value in self._fields().items() if isinstance(value, Tensor)}

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """The tensors, and a header that JSON can hold: the other fields."""
        return self.tensors(), {name: v for name, v in self._fields().items() if not isinstance(v, Tensor)}

    @classmethod
    def from_state(cls: type[B], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> B:
        """The inverse of `state`; lists, which JSON makes of tuples, become tuples again."""
        fields: dict[str, Any] = {name: _tuples(value) for name, value in header.items()} | dict(tensors)
        return cls(**fields)

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, eq=False)
class Diagonal(Block):
    """`Σ h∘d∘d`: one non-negative number per entry of one parameter."""

    values: Tensor

    def matvec(self, delta: Mapping[str, Tensor]) -> Tensors:
        (name,) = self.names
        return {name: self.values * delta[name]}

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        (name,) = self.names
        return {name: delta[name] / (self.values + damping)}

    def trace(self, outputs: int) -> float:
        return float(self.values.sum(dtype=torch.float64))

    def grow(self, names: tuple[str, ...], outputs: int) -> Diagonal:
        return dataclasses.replace(self, values=pad(self.values, 0, outputs))


@dataclass(frozen=True, eq=False)
class LayerBlock(Block):
    """A block on one layer's matrix D; `names` are its weight and, if it has one, its bias."""

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

    def matvec(self, delta: Mapping[str, Tensor]) -> Tensors:
        return self.split(self.times(self.matrix(delta)), delta)

    @abc.abstractmethod
    def times(self, matrix: Tensor) -> Tensor:
        """`H d` in matrix form."""


@dataclass(frozen=True, eq=False)
class Factored(LayerBlock):
    """`factor·⟨D, L D R⟩` with two symmetric factors and one number per group."""

    left: Tensor  # groups × outputs × outputs
    right: Tensor  # groups × inputs × inputs

    @property
    @abc.abstractmethod
    def factor(self) -> Tensor:
        """One number per group."""

    def times(self, matrix: Tensor) -> Tensor:
        left = self.left * self.factor[:, None, None]
        return times_transposed(left, times_transposed(matrix, self.right).mT)  # both factors are symmetric

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """Exact, through the factors' eigenvectors."""
        (left_values, left), (right_values, right) = self.eigen
        values = left_values[:, :, None] * right_values[:, None, :] * self.factor[:, None, None]
        rotated = left.mT @ self.matrix(delta) @ right
        return self.split(left @ (rotated / (values + damping)) @ right.mT, delta)

    @cached_property
    def eigen(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Eigenvalues (clipped at zero) and eigenvectors of `left` and of `right`."""
        return _eigen(self.left), _eigen(self.right)

    def trace(self, outputs: int) -> float:
        return float((_traces(self.left) * _traces(self.right) * self.factor.double()).sum())

    def grow(self: F, names: tuple[str, ...], outputs: int) -> F:
        """Zeros in `left`: the curvature of the new outputs is not known."""
        return dataclasses.replace(self, left=pad(pad(self.left, 1, outputs), 2, outputs))


@dataclass(frozen=True, eq=False)
class Kronecker(Factored):
    """`⟨D, L D R⟩/divisor`: K-FAC (L = G, R = A, divisor 1) and exact TK (L = Ψ, R = Φ, divisor δ)."""

    divisor: Tensor  # one number per group

    @cached_property
    def factor(self) -> Tensor:
        return _inverse(self.divisor)


@dataclass(frozen=True, eq=False)
class TraceKronecker(Factored):
    """`⟨D, G D A⟩·δ/(tr A · tr G)`: K-FAC scaled to the exact trace δ of the block. All three merge as averages."""

    exact: Tensor  # δ, one number per group

    @cached_property
    def factor(self) -> Tensor:
        return (self.exact.double() * _inverse(_traces(self.left) * _traces(self.right))).to(self.exact)


@dataclass(frozen=True, eq=False)
class EigenKronecker(LayerBlock):
    """`Σ S∘(Uᵀ D V)∘(Uᵀ D V)`: EK-FAC, exact second moments in a Kronecker-factored eigenbasis.

    The factors are kept for `merge`, which needs the eigenbasis of the merged factors.

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
        left, right = self.left_vectors, self.right_vectors
        rotated = times_transposed(left.mT.contiguous(), times_transposed(matrix, right.mT).mT)
        return times_transposed(times_transposed(left, (self.values * rotated).mT), right)

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        rotated = self.left_vectors.mT @ self.matrix(delta) @ self.right_vectors
        solved = self.left_vectors @ (rotated / (self.values + damping)) @ self.right_vectors.mT
        return self.split(solved, delta)

    def trace(self, outputs: int) -> float:
        return float(self.values.sum(dtype=torch.float64))

    def merge(self, other: EigenKronecker, share: float) -> EigenKronecker:
        """Both sets of eigenvalues, moved to the basis of the merged factors by `(U_newᵀ U_old)∘2` on each side."""
        merged = super().merge(other, share)  # of which the factors are used
        _, left_vectors = _eigen(merged.left)
        _, right_vectors = _eigen(merged.right)

        def moved(old: EigenKronecker) -> Tensor:
            on_left = (left_vectors.mT @ old.left_vectors.to(left_vectors)).square()
            on_right = (right_vectors.mT @ old.right_vectors.to(left_vectors)).square()
            return on_left @ old.values.to(left_vectors) @ on_right.mT

        values = torch.lerp(moved(self), moved(other), share)
        return dataclasses.replace(merged, left_vectors=left_vectors, right_vectors=right_vectors, values=values)

    def grow(self, names: tuple[str, ...], outputs: int) -> EigenKronecker:
        """Every new output becomes an eigenvector with eigenvalue zero."""
        vectors = pad(pad(self.left_vectors, 1, outputs), 2, outputs)
        for new in range(self.left_vectors.shape[1], outputs):
            vectors[:, new, new] = 1
        left = pad(pad(self.left, 1, outputs), 2, outputs)
        return dataclasses.replace(self, left=left, left_vectors=vectors, values=pad(self.values, 1, outputs))


@dataclass(frozen=True, eq=False)
class InputGram(LayerBlock):
    """`⟨D, D Z⟩` with `Z = E[z zᵀ]`: a last layer under squared loss, `E[zzᵀ] ⊗ I`.

    It is exact, and new outputs of the layer do not change Z.
    """

    gram: Tensor

    def times(self, matrix: Tensor) -> Tensor:
        return matrix @ self.gram

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        values, vectors = _eigen(self.gram)
        return self.split((self.matrix(delta) @ vectors / (values[:, None, :] + damping)) @ vectors.mT, delta)

    def trace(self, outputs: int) -> float:
        return outputs / self.groups * float(_traces(self.gram).sum())

    def grow(self, names: tuple[str, ...], outputs: int) -> InputGram:
        return self  # the identity is implied

    def head_moment(self) -> Tensor | None:
        return self.gram[0] if self.groups == 1 else None


@dataclass(frozen=True, eq=False)
class Dense(Block):
    """The whole matrix H, on parameters flattened and joined in the order of `names`. For small networks."""

    shapes: tuple[tuple[int, ...], ...]
    repeats: bool  # whether a new output of a grown layer gets the curvature of the first one (squared loss) or none
    values: Tensor

    def flat(self, delta: Mapping[str, Tensor]) -> Tensor:
        """All parameters as one vector."""
        return torch.cat([delta[name].reshape(-1) for name in self.names])

    def _unflat(self, vector: Tensor, delta: Mapping[str, Tensor]) -> Tensors:
        parts = vector.split([delta[name].numel() for name in self.names])
        return {name: part.view(delta[name].shape) for name, part in zip(self.names, parts, strict=True)}

    def matvec(self, delta: Mapping[str, Tensor]) -> Tensors:
        return self._unflat(self.values @ self.flat(delta), delta)

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        identity = torch.eye(len(self.values), dtype=self.values.dtype, device=self.values.device)
        return self._unflat(torch.linalg.solve(self.values + damping * identity, self.flat(delta)), delta)

    def trace(self, outputs: int) -> float:
        return float(self.values.diagonal().sum(dtype=torch.float64))

    def grow(self, names: tuple[str, ...], outputs: int) -> Dense:
        """New rows and columns: those of output 0 where `repeats`, else zeros."""
        before = dict(zip(self.names, self.shapes, strict=True))
        shapes = {n: (outputs, *s[1:]) if n in names else s for n, s in before.items()}
        known = next(before[name][0] for name in names if name in before)
        owners = [
            torch.arange(outputs).repeat_interleave(prod(s[1:])) if n in names else torch.full((prod(s),), -1)
            for n, s in shapes.items()
        ]
        owner = torch.cat(owners)  # of each entry of the new vector: the output that it belongs to; -1 in other layers
        (kept,) = torch.where(owner < known)
        values = self.values.new_zeros(len(owner), len(owner))
        values[kept[:, None], kept] = self.values
        if self.repeats:
            (first,) = torch.where(owner == 0)
            for output in range(known, outputs):
                (new,) = torch.where(owner == output)
                values[new[:, None], new] = values[first[:, None], first]
        return dataclasses.replace(self, shapes=tuple(shapes.values()), values=values)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clipped at zero, and eigenvectors of symmetric matrices, computed in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    # contiguous, as they are after loading: then products round alike before and after
    return values.clamp_min(0).to(matrix.dtype), vectors.to(matrix.dtype).contiguous()


def _traces(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)


def _inverse(number: Tensor) -> Tensor:
    """1/x, and 0 where x is 0: a layer that no gradient has reached has no curvature."""
    return torch.where(number > 0, 1 / number.clamp_min(torch.finfo(number.dtype).tiny), 0)


def pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Append zeros along a dimension until it has `size` entries."""
    shape = list(tensor.shape)
    if size < shape[dim]:
        raise ValueError(f"cannot shrink from {shape[dim]} to {size} outputs.")
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


BLOCKS: dict[str, type[Block]] = {
    kind.__name__: kind for kind in (Diagonal, Kronecker, TraceKronecker, EigenKronecker, InputGram, Dense)
}
