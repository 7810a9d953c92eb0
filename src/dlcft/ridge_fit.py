"""One ridge regression in standardised coordinates: its solutions and scores, for one ridge or for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PROBES = 32  # random vectors that estimate a trace


@dataclass(frozen=True, eq=False)
class Problem:
    """`(matrix + ridge·I) V'ᵀ = rightᵀ` for standardised features and α = 1.

    `inverse` is 1/σ, 0 where constant; `energy` the mean squared target, centred; `scale` α; `start` V0.
    """

    matrix: Tensor
    right: Tensor
    inverse: Tensor
    mean: Tensor
    prior: Tensor
    energy: float
    scale: float
    start: Tensor | None

    def gcv(self, ridge: float, samples: int) -> float:
        """As `RidgePath.gcv`, by a Cholesky factor; the trace of the inverse by `_PROBES` random vectors."""
        damped = self.matrix.clone()
        damped.diagonal().add_(ridge)
        factor, failed = cholesky_in_place(damped)
        if failed:
            return math.inf
        generator = torch.Generator().manual_seed(0)
        probes = torch.randint(0, 2, (len(factor), _PROBES), generator=generator).to(factor) * 2 - 1
        solved = torch.cholesky_solve(torch.cat([self.right.T, probes], 1), factor)
        weight, inverse = solved[:, : len(self.right)].T, solved[:, len(self.right) :]
        varying = int((self.inverse > 0).sum())  # a constant feature adds 1/ridge to the trace, and no freedom
        trace = float((probes * inverse).sum() / _PROBES) - (len(factor) - varying) / ridge
        residual = self.energy - float((weight * self.right).sum())
        residual -= ridge * float(weight.square().sum())
        left = 1 - (1 + varying - ridge * trace) / samples
        return 0.5 * self.scale**2 * max(residual, 0.0) / left**2 if left > 0 else math.inf

    def raw(self, standardised: Tensor) -> tuple[Tensor, Tensor]:
        """V and b for the features as they come."""
        weight = self.scale * standardised * self.inverse
        if self.start is not None:
            weight += self.start
        return weight, self.scale * self.prior - weight @ self.mean


@dataclass(frozen=True, eq=False)
class RidgePath:
    """The solutions for all ridges: see `RidgeSums.path`."""

    problem: Problem
    values: Tensor
    vectors: Tensor
    projected: Tensor
    samples: int

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """As `RidgeSums.solve`."""
        check_ridges([ridge])
        return self.problem.raw(self.projected / (self.values + ridge) @ self.vectors.T)

    def gcv(self, ridges: Sequence[float]) -> Tensor:
        """Generalised cross-validation, `loss / (1 − df/n)²`: an estimate of the mean loss on unseen data.

        The degrees of freedom, intercept included, are `df = 1 + Σ_j λ_j/(λ_j + ridge)`, λ the eigenvalues; n is the
        number of samples. With weights or balance the loss is the weighted one.

        Raises:
            ValueError: when a ridge is not positive.
        """
        check_ridges(ridges, positive=True)
        damped = self.values + self.values.new_tensor(ridges)[:, None]
        energy = self.projected.square().sum(0)
        explained = (energy * (2 - self.values / damped) / damped).sum(1)
        residual = self.problem.energy - explained
        freedom = 1 + (self.values / damped).sum(1)
        left = (1 - freedom / self.samples).clamp(min=0)
        score: Tensor = 0.5 * self.problem.scale**2 * residual.clamp(min=0) / left.square()
        return score.nan_to_num(nan=math.inf)  # 0/0: as many degrees of freedom as samples


def cholesky_in_place(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.cholesky_ex`, in the matrix's own memory: with many features a copy is gigabytes."""
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix, out=(matrix, info))
    return factor, failed


def check_ridges(ridges: Sequence[float], *, positive: bool = False) -> None:
    """Refuse ridges that have no meaning.

    Raises:
        ValueError: when one is negative, not finite, or zero where it must be positive.
    """
    for ridge in ridges:
        if not 0 <= ridge < math.inf or (positive and ridge == 0):
            raise ValueError(f"ridge is {ridge}; it must be finite and {'positive' if positive else 'not negative'}.")
