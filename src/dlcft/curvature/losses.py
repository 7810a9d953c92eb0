"""Losses: a value, and the output gradients from which curvature is made.

`output_grads` returns vectors v with `Σ_draws E[v vᵀ] = ∂²ℓ/∂f²`, the Hessian of the loss in the network's outputs.
Propagated back through the network they give the Gauss-Newton matrix: the true Fisher, not that of the labels.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


class Loss(abc.ABC):
    """The cost of a network's outputs."""

    is_quadratic: ClassVar[bool] = False
    """Whether the output Hessian is the identity for all outputs."""

    @abc.abstractmethod
    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch."""

    @abc.abstractmethod
    def output_grads(self, outputs: Tensor, draws: int | None, generator: torch.Generator | None) -> Tensor:
        """Vectors (draws × batch × outputs) whose summed outer products are, or estimate, the output Hessian.

        Args:
            outputs: the network's outputs, batch × outputs.
            draws: how many to sample; None for an exact set, one per output.
            generator: the source of the draws.
        """


def _check_draws(draws: int | None) -> None:
    if draws is not None and draws < 1:
        raise ValueError(f"draws is {draws}; it must be at least 1, or None for the exact curvature.")


@dataclass(frozen=True)
class ScaledMSE(Loss):
    """`½‖α·onehot(y) − f(x)‖²`, summed over outputs, with α the `scale`; α = 15 in the paper.

    Example:
        >>> ScaledMSE(2.0).value(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
        tensor(0.5000)
    """

    scale: float = 15.0
    is_quadratic: ClassVar[bool] = True

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        targets = self.scale * F.one_hot(labels, outputs.shape[1]).to(outputs.dtype)
        return 0.5 * (targets - outputs).square().sum() / len(outputs)

    def output_grads(self, outputs: Tensor, draws: int | None, generator: torch.Generator | None) -> Tensor:
        """`v ~ N(0, I)`; exactly, the unit vectors."""
        _check_draws(draws)
        if draws is None:
            identity = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
            return identity[:, None, :].expand(-1, len(outputs), -1)
        shape = (draws, *outputs.shape)
        noise: Tensor = torch.randn(shape, generator=generator, dtype=torch.float32).to(outputs)
        return noise / float(draws**0.5)


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels)

    def output_grads(self, outputs: Tensor, draws: int | None, generator: torch.Generator | None) -> Tensor:
        """`v = p − onehot(ŷ)` with `ŷ ~ p` drawn from the model; exactly, `√p_c (p − e_c)` for every output c."""
        _check_draws(draws)
        p = outputs.softmax(1)
        identity = torch.eye(outputs.shape[1], dtype=p.dtype, device=p.device)
        if draws is None:
            return p.T[:, :, None].sqrt() * (p - identity[:, None, :])
        sampled = torch.multinomial(p.float().cpu(), draws, replacement=True, generator=generator).to(p.device)
        grads: Tensor = (p - identity[sampled.T]) / draws**0.5
        return grads


LOSSES: dict[str, type[Loss]] = {"mse": ScaledMSE, "cross-entropy": CrossEntropy}
