"""The memory of past data: an anchor, and a quadratic model of the old loss around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlcft.curvature.blocks import Tensors, pad
from dlcft.curvature.form import Curvature


@dataclass(frozen=True, eq=False)
class Memory:
    """`L_old(θ) ≈ L_old(θ̄) + ḡᵀd + ½ dᵀHd` with `d = θ − θ̄`: a constant-size stand-in for all data seen so far.

    Attributes:
        anchor: θ̄, the parameters after the last task (the paper's θ_{t−1}).
        curvature: H, of the mean loss over all remembered data.
        weight: the number of remembered tasks (the paper's t−1), or of samples.
        gradient: ḡ, of the mean loss at the anchor; None to take it as zero, as the paper does. It is not zero where
            training has stopped before the minimum.
    """

    anchor: Tensors
    curvature: Curvature
    weight: float
    gradient: Tensors | None = None

    def __post_init__(self) -> None:
        """Check the weight and the anchor."""
        if not self.weight > 0:
            raise ValueError(f"weight is {self.weight}; it must be positive.")
        missing = set(self.curvature.names) - self.anchor.keys()
        if missing:
            raise ValueError(f"the anchor lacks {sorted(missing)[0]!r}, which the curvature covers.")

    def penalty(self, params: Mapping[str, Tensor], *, first_order: bool = True) -> Tensor:
        """`ḡᵀd + ½ dᵀHd`, differentiable in the parameters.

        Without a stored gradient, or with `first_order=False`, the first term is left out.
        """
        delta = self._delta(params)
        value = 0.5 * self.curvature.quad(delta)
        if self.gradient is not None and first_order:
            value = value + sum((self.gradient[name] * d).sum() for name, d in delta.items())
        return value

    @torch.no_grad()
    def predicted_increase(self, params: Mapping[str, Tensor]) -> float:
        """By how much the mean loss on all remembered data is higher at `params` than at the anchor."""
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
            params: the parameters after training.
            curvature: of the new task's mean loss there.
            weight: of the new task.
            gradient: of the new task's mean loss there; None to drop the first-order term.
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

        def padded(tensors: Tensors) -> Tensors:
            return tensors | {n: pad(t, 0, outputs) for n, t in tensors.items() if n in names}

        gradient = None if self.gradient is None else padded(self.gradient)
        return Memory(padded(self.anchor), self.curvature.grow(names, outputs), self.weight, gradient)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, and a header that JSON can hold."""
        tensors, blocks = self.curvature.state()
        stored = {f"curvature|{name}": t for name, t in tensors.items()}
        stored |= {f"anchor|{name}": t for name, t in self.anchor.items()}
        stored |= {f"gradient|{name}": t for name, t in (self.gradient or {}).items()}
        return stored, {"weight": self.weight, "first_order": self.gradient is not None, "blocks": blocks}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Memory:
        """The inverse of `state`.

        Raises:
            ValueError: when a tensor holds no real numbers.
        """
        wrong = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
        if wrong:
            raise ValueError(f"the memory holds {wrong[0]} as {tensors[wrong[0]].dtype}; real numbers are needed.")

        def part(prefix: str) -> Tensors:
            return {n.removeprefix(f"{prefix}|"): t for n, t in tensors.items() if n.startswith(f"{prefix}|")}

        curvature = Curvature.from_state(part("curvature"), header["blocks"])
        return cls(part("anchor"), curvature, header["weight"], part("gradient") if header["first_order"] else None)

    def _delta(self, params: Mapping[str, Tensor]) -> Tensors:
        self.curvature.check(params)
        for name in self.curvature.names:
            if params[name].shape != self.anchor[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(params[name].shape)}; in the memory it has "
                    f"{tuple(self.anchor[name].shape)}."
                )
        return {name: params[name] - self.anchor[name] for name in self.curvature.names}


def _copied(params: Mapping[str, Tensor], curvature: Curvature) -> Tensors:
    return {name: params[name].detach().clone() for name in curvature.names}
