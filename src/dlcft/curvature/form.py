"""Curvature: a quadratic form on named parameters, a sum of blocks. It knows nothing of networks or data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dlcft.curvature.blocks import BLOCKS, Block, Dense, Tensors


class Curvature:
    """A sum of named blocks, each on parameters of its own.

    Args:
        blocks: by name; a layer's block has the layer's name.
    """

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self.blocks = dict(blocks)
        names = [name for block in self.blocks.values() for name in block.names]
        if len(set(names)) != len(names):
            raise ValueError(f"a parameter stands in two blocks: {sorted({n for n in names if names.count(n) > 1})}.")
        self.names = tuple(names)

    def quad(self, delta: Mapping[str, Tensor]) -> Tensor:
        """`dᵀ H d`, differentiable in d; value and gradient share one product a layer."""
        self._check(delta)
        value: Tensor = _Quad.apply(self, *(delta[name] for name in self.names))[0]
        return value

    def matvec(self, delta: Mapping[str, Tensor]) -> Tensors:
        """`H d`."""
        self._check(delta)
        return {name: p for block in self.blocks.values() for name, p in block.product(delta).items()}

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """`(H + λI)⁻¹ d` with λ = `damping` times the mean eigenvalue of H.

        Raises:
            ValueError: when `damping` is not positive.
        """
        self._check(delta)
        if not damping > 0:
            raise ValueError(f"damping is {damping}; it must be positive.")
        absolute = damping * self.trace(delta) / sum(delta[name].numel() for name in self.names)
        return {name: p for block in self.blocks.values() for name, p in block.solve(delta, absolute).items()}

    def trace(self, params: Mapping[str, Tensor]) -> float:
        """The sum of the eigenvalues on parameters of these shapes."""
        self._check(params)
        return sum(block.trace(len(params[block.names[0]])) for block in self.blocks.values())

    def merge(self, other: Curvature, weight: float, other_weight: float) -> Curvature:
        """The curvature of the pooled data: statistics averaged by `weight : other_weight`.

        The one place where this choice is made. The paper's text has "(t−1):t"; averages of old and new need
        (t−1)/t and 1/t.

        Raises:
            ValueError: when the blocks differ or a weight is not positive.
        """
        if not (weight > 0 and other_weight > 0):
            raise ValueError(f"weights are {weight} and {other_weight}; both must be positive.")
        if self.blocks.keys() != other.blocks.keys():
            odd = sorted(self.blocks.keys() ^ other.blocks.keys())
            raise ValueError(f"cannot merge curvatures of different layers; only one of them has {odd}.")
        share = other_weight / (weight + other_weight)
        return Curvature({name: block.merge(other.blocks[name], share) for name, block in self.blocks.items()})

    def grow(self, names: tuple[str, ...], outputs: int) -> Curvature:
        """The curvature after the layer with parameters `names` has got rows for new outputs."""

        def grown(block: Block) -> Block:
            if isinstance(block, Dense) and set(names) & set(block.names):
                return block.grow_rows(names, outputs)
            return block.grow(outputs) if set(names) & set(block.names) else block

        return Curvature({name: grown(block) for name, block in self.blocks.items()})

    def to(self, *args: Any, **kwargs: Any) -> Curvature:
        """On another device or in another dtype, as `Tensor.to`."""
        return Curvature({name: block.map(lambda t: t.to(*args, **kwargs)) for name, block in self.blocks.items()})

    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(t.nbytes for block in self.blocks.values() for t in block.tensors().values())

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, and a header that JSON can hold."""
        tensors: Tensors = {}
        header: dict[str, Any] = {}
        for name, block in self.blocks.items():
            fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block)}
            header[name] = {"kind": type(block).__name__} | {
                key: value for key, value in fields.items() if not isinstance(value, Tensor)
            }
            tensors |= {f"{name}|{key}": tensor for key, tensor in block.tensors().items()}
        return tensors, header

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Curvature:
        """The inverse of `state`.

        Raises:
            ValueError: when a kind of block is unknown.
        """
        blocks = {}
        for name, fields in header.items():
            fields = dict(fields)
            kind = fields.pop("kind")
            if kind not in BLOCKS:
                raise ValueError(f"unknown kind of block {kind!r}; known: {', '.join(BLOCKS)}.")
            fields["names"] = tuple(fields["names"])
            if "shapes" in fields:
                fields["shapes"] = tuple(tuple(shape) for shape in fields["shapes"])
            stored: dict[str, Any] = {
                key.rpartition("|")[2]: t for key, t in tensors.items() if key.rpartition("|")[0] == name
            }
            blocks[name] = BLOCKS[kind](**fields, **stored)
        return cls(blocks)

    def dense(self, params: Mapping[str, Tensor]) -> Tensor:
        """The whole matrix on parameters of these shapes, in the order of `names`: an oracle for small networks."""
        sizes = [params[name].numel() for name in self.names]
        identity = torch.eye(sum(sizes), dtype=params[self.names[0]].dtype)
        columns = []
        for unit in identity:
            parts = zip(self.names, unit.split(sizes), strict=True)
            product = self.matvec({name: part.view(params[name].shape) for name, part in parts})
            columns.append(torch.cat([product[name].reshape(-1) for name in self.names]))
        return torch.stack(columns, 1)

    def _check(self, delta: Mapping[str, Tensor]) -> None:
        missing = [name for name in self.names if name not in delta]
        if missing:
            raise ValueError(f"the curvature covers {missing[0]!r}, which was not given (given: {list(delta)[:5]} …).")


class _Quad(torch.autograd.Function):
    """(dᵀHd, Hd): the value, and the product that is also half its gradient."""

    @staticmethod
    def forward(ctx: Any, curvature: Curvature, *delta: Tensor) -> tuple[Tensor, ...]:
        products = curvature.matvec(dict(zip(curvature.names, delta, strict=True)))
        ordered = [products[name] for name in curvature.names]
        ctx.curvature = curvature
        ctx.save_for_backward(*ordered)
        ctx.set_materialize_grads(False)
        value = sum((p * d).sum() for p, d in zip(ordered, delta, strict=True))
        return (torch.as_tensor(value), *ordered)

    @staticmethod
    def backward(ctx: Any, of_value: Tensor | None, *of_products: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(of_products)
        if of_value is not None:
            gradients = [2 * of_value * p for p in ctx.saved_tensors]
        if any(g is not None for g in of_products):  # a second derivative: H is symmetric
            filled = [
                torch.zeros_like(p) if g is None else g for g, p in zip(of_products, ctx.saved_tensors, strict=True)
            ]
            second = _Quad.apply(ctx.curvature, *filled)[1:]
            gradients = [s if g is None else g + s for g, s in zip(gradients, second, strict=True)]
        return (None, *gradients)
