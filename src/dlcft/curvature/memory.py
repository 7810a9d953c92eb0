"""The memory of past data: where the parameters were, and how their loss rises around that point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlcft.curvature.form import Curvature

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Memory:
    """`L_old(θ) ≈ L_old(θ̄) + ḡᵀd + ½ dᵀHd` with `d = θ − θ̄`: a constant-size stand-in for all data seen so far.

    Attributes:
        anchor: θ̄, the parameters after the last task (the paper's θ_{t−1}).
        curvature: H, of the mean loss of everything remembered.
        weight: how much is remembered: tasks (the paper's t−1) or samples.
        gradient: ḡ, of the mean loss at the anchor; None where it is taken to be zero, as the paper does. Training that
            stops early does not reach a minimum, so it matters.
    """

    anchor: Tensors
    curvature: Curvature
    weight: float
    gradient: Tensors | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a memory."""
        if not self.weight > 0:
            raise ValueError(f"weight is {self.weight}; it must be positive.")
        missing = set(self.curvature.names) - self.anchor.keys()
        if missing:
            raise ValueError(f"the anchor lacks {sorted(missing)[0]!r}, which the curvature covers.")

    def penalty(self, params: Mapping[str, Tensor], *, first_order: bool = True) -> Tensor:
        """`ḡᵀd + ½ dᵀHd`, differentiable in the parameters.

        Without a stored gradient, or with `first_order=False`, it is the second term alone.
        """
        delta = self._delta(params)
        value = 0.5 * self.curvature.quad(delta)
        if self.gradient is not None and first_order:
            value = value + sum((self.gradient[name] * d).sum() for name, d in delta.items())
        return value

    @torch.no_grad()
    def predicted_increase(self, params: Mapping[str, Tensor]) -> float:
        """How much worse the mean loss on all remembered data is at `params` than at the anchor, without that data."""
        return float(self.penalty(params))

    @torch.no_grad()
    def absorb(
        self,
        params: Mapping[str, Tensor],
        curvature: Curvature,
        weight: float,
        gradient: Mapping[str, Tensor] | None = None,
    ) -> Memory:
        """The memory after one more task: `ḡ ← (w̄(ḡ + Hd) + w ∇L)/(w̄ + w)`, H merged, the anchor moved to `params`.

        Args:
            params: where training has ended.
            curvature: of the new task's mean loss there.
            weight: of the new task.
            gradient: of the new task's mean loss there; None leaves the first-order term out.
        """
        merged = self.curvature.merge(curvature, self.weight, weight)
        carried = None
        if gradient is not None and self.gradient is not None:
            share = weight / (self.weight + weight)
            moved = self.curvature.matvec(self._delta(params))
            carried = {n: torch.lerp(self.gradient[n] + moved[n], gradient[n], share) for n in self.curvature.names}
        return Memory(_copied(params, merged), merged, self.weight + weight, carried)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        params: Mapping[str, Tensor],
        curvature: Curvature,
        weight: float,
        gradient: Mapping[str, Tensor] | None = None,
    ) -> Memory:
        """The memory of a first task."""
        kept = None if gradient is None else {name: gradient[name].detach().clone() for name in curvature.names}
        return cls(_copied(params, curvature), curvature, weight, kept)

    def grow(self, names: tuple[str, ...], outputs: int) -> Memory:
        """The memory after the layer with parameters `names` has got new outputs with zero weights."""

        def padded(tensors: Tensors | None) -> Tensors | None:
            if tensors is None:
                return None
            return {
                n: torch.cat([t, t.new_zeros(outputs - len(t), *t.shape[1:])]) if n in names else t
                for n, t in tensors.items()
            }

        anchor = padded(self.anchor)
        assert anchor is not None
        return replace(
            self, anchor=anchor, curvature=self.curvature.grow(names, outputs), gradient=padded(self.gradient)
        )

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """On another device or in another dtype, as `Tensor.to`."""

        def moved(tensors: Tensors) -> Tensors:
            return {name: t.to(*args, **kwargs) for name, t in tensors.items()}

        gradient = None if self.gradient is None else moved(self.gradient)
        return Memory(moved(self.anchor), self.curvature.to(*args, **kwargs), self.weight, gradient)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, and a header that JSON can hold."""
        tensors, blocks = self.curvature.state()
        stored = {f"curvature|{name}": t for name, t in tensors.items()}
        stored |= {f"anchor|{name}": t for name, t in self.anchor.items()}
        stored |= {f"gradient|{name}": t for name, t in (self.gradient or {}).items()}
        return stored, {"weight": self.weight, "first_order": self.gradient is not None, "blocks": blocks}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Memory:
        """The inverse of `state`."""

        def part(prefix: str) -> Tensors:
            return {n.removeprefix(f"{prefix}|"): t for n, t in tensors.items() if n.startswith(f"{prefix}|")}

        curvature = Curvature.from_state(part("curvature"), header["blocks"])
        return cls(part("anchor"), curvature, header["weight"], part("gradient") if header["first_order"] else None)

    def _delta(self, params: Mapping[str, Tensor]) -> Tensors:
        missing = [name for name in self.curvature.names if name not in params]
        if missing:
            raise ValueError(f"the memory covers {missing[0]!r}, which was not given.")
        for name in self.curvature.names:
            if params[name].shape != self.anchor[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(params[name].shape)}; in the memory it has "
                    f"{tuple(self.anchor[name].shape)}."
                )
        return {name: params[name] - self.anchor[name] for name in self.curvature.names}


def _copied(params: Mapping[str, Tensor], curvature: Curvature) -> Tensors:
    return {name: params[name].detach().clone() for name in curvature.names}
