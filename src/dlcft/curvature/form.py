"""Curvature: a quadratic form on named parameters, as a sum of blocks. It knows nothing of networks or data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dlcft.curvature.blocks import BLOCKS, Block, Tensors
from dlcft.network.names import find_class, is_imported, qualified


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
        """`dᵀ H d`, differentiable in d; value and gradient share one product per layer."""
        self.check(delta)
        value: Tensor = _Quad.apply(self, *(delta[name] for name in self.names))[0]
        return value

    def matvec(self, delta: Mapping[str, Tensor]) -> Tensors:
        """`H d`."""
        self.check(delta)
        return {name: p for block in self.blocks.values() for name, p in block.matvec(delta).items()}

    def solve(self, delta: Mapping[str, Tensor], damping: float) -> Tensors:
        """`(H + λI)⁻¹ d` with λ = `damping` times the mean eigenvalue of H.

        Raises:
            ValueError: when `damping` is not positive.
        """
        self.check(delta)
        if not damping > 0:
            raise ValueError(f"damping is {damping}; it must be positive.")
        absolute = damping * self.trace(delta) / sum(delta[name].numel() for name in self.names)
        return {name: p for block in self.blocks.values() for name, p in block.solve(delta, absolute).items()}

    def trace(self, params: Mapping[str, Tensor]) -> float:
        """The sum of the eigenvalues on parameters of these shapes."""
        self.check(params)
        return sum(block.trace(len(params[block.names[0]])) for block in self.blocks.values())

    def merge(self, other: Curvature, weight: float, other_weight: float) -> Curvature:
        """The curvature of the pooled data: statistics averaged by `weight : other_weight`.

        The paper's text says (t−1):t, a slip: the mean over t tasks weighs the old one by (t−1)/t, the new by 1/t.

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
        grown = {name: block.grow(names, outputs) for name, block in self.blocks.items() if set(names) & {*block.names}}
        return Curvature(self.blocks | grown)

    def head_moment(self, weight: str) -> Tensor | None:
        """`Z = E[zzᵀ]` of the layer whose weight is called `weight`, if its block is `Z ⊗ I`; else None."""
        return next((block.head_moment() for block in self.blocks.values() if weight in block.names), None)

    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(t.nbytes for block in self.blocks.values() for t in block.tensors().values())

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, and a header that JSON can hold."""
        tensors: Tensors = {}
        header: dict[str, Any] = {}
        for name, block in self.blocks.items():
            kind = type(block)
            stored, fields = block.state()
            if "kind" in fields:
                raise ValueError(f"{kind.__name__} has a field 'kind', a name that is taken; rename it.")
            header[name] = {"kind": kind.__name__ if kind in BLOCKS.values() else qualified(kind), **fields}
            tensors |= {f"{name}|{key}": tensor for key, tensor in stored.items()}
        return tensors, header

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Curvature:
        """The inverse of `state`. It imports no module: a file must not decide which code runs.

        Raises:
            ValueError: when a kind of block is unknown, or its module is not imported.
        """
        blocks = {}
        for name, saved in header.items():
            kind = saved["kind"]
            if ":" in kind and not is_imported(kind):
                module = kind.partition(":")[0]
                raise ValueError(f"the curvature was saved with the block {kind!r} of your own; import {module} first.")
            fields = {key: value for key, value in saved.items() if key != "kind"}
            stored = {key.rpartition("|")[2]: t for key, t in tensors.items() if key.rpartition("|")[0] == name}
            blocks[name] = find_class("kind of block", kind, BLOCKS, Block).from_state(stored, fields)
        return cls(blocks)

    def check(self, delta: Mapping[str, Tensor]) -> None:
        """Refuse parameters of which one is missing."""
        missing = [name for name in self.names if name not in delta]
        if missing:
            raise ValueError(f"the curvature covers {missing[0]!r}, which was not given (given: {list(delta)[:5]} …).")


class _Quad(torch.autograd.Function):
    """(dᵀHd, Hd): the value, and half its gradient."""

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
        if any(g is not None for g in of_products):  # a second derivative, with H symmetric
            filled = [
                torch.zeros_like(p) if g is None else g for g, p in zip(of_products, ctx.saved_tensors, strict=True)
            ]
            second = _Quad.apply(ctx.curvature, *filled)[1:]
            gradients = [s if g is None else g + s for g, s in zip(gradients, second, strict=True)]
        return (None, *gradients)
