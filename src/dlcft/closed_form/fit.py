"""One ridge regression in standardised coordinates: its solutions and scores, for one ridge or for all ridges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PROBES = 32  # random vectors that estimate a trace
_NEARLY_NONE = 1e-7  # a ridge so small that it keeps the rank, and large enough for a Cholesky factor in float64
_LEFT = 1e-3  # the least share of degrees of freedom left: with less, a score is rounding divided by rounding
_INTERPOLATED = 0.05  # a fit without a ridge interpolates if its residual is below this share of the targets' energy
_MOST = 4  # with more samples per feature, a low rank is due to the features and not to repeated samples


@dataclass(frozen=True, eq=False)
class Problem:
    """`(matrix + ridge·I) V'ᵀ = rightᵀ` for standardised features and α = 1."""

    matrix: Tensor  # the covariance of the standardised features
    right: Tensor  # their covariance with the targets, classes × features
    inverse: Tensor  # 1/σ; 0 for constant features
    mean: Tensor  # μ of the features
    prior: Tensor  # π, the weight of each class
    energy: float  # the mean squared target, centred
    scale: float  # α
    start: Tensor | None  # V0, or None for zero

    def gcv(self, ridge: float, samples: float) -> float:
        """As `RidgePath.gcv`, from a Cholesky factor; random vectors estimate the degrees of freedom."""
        residual, freedom = self._fit(ridge) or (math.inf, samples)
        left = 1 - freedom / samples
        return 0.5 * self.scale**2 * max(residual, 0.0) / left**2 if left >= _LEFT else math.inf

    def distinct(self, samples: int) -> float:
        """As `RidgePath.distinct`, from the degrees of freedom of a tiny ridge."""
        # a factor takes seconds: skip it if `different` would ignore the result
        found = self._fit(_NEARLY_NONE) if samples <= _MOST * self.varying else None
        residual, freedom = found or (math.inf, samples)
        return different(samples, freedom, self.varying, residual, self.energy)

    @property
    def varying(self) -> int:
        """How many features are not constant."""
        return int((self.inverse > 0).sum())

    def _fit(self, ridge: float) -> tuple[float, float] | None:
        """The residual, and the degrees of freedom with the intercept; None if the matrix has no Cholesky factor."""
        damped = self.matrix.clone()
        damped.diagonal().add_(ridge)
        factor, failed = cholesky_in_place(damped)
        if failed:
            return None
        vectors = probes(factor)
        solved = torch.cholesky_solve(torch.cat([self.right.T, vectors], 1), factor)
        weight, inverse = solved[:, : len(self.right)].T, solved[:, len(self.right) :]
        # a constant feature adds 1/ridge to the trace and no degree of freedom
        trace = float((vectors * inverse).sum() / _PROBES) - (len(factor) - self.varying) / ridge
        residual = self.energy - float((weight * self.right).sum())
        residual -= ridge * float(weight.square().sum())
        return residual, 1 + self.varying - ridge * trace

    def raw(self, standardised: Tensor) -> tuple[Tensor, Tensor]:
        """V and b for features that are not standardised."""
        weight = self.scale * standardised * self.inverse
        if self.start is not None:
            weight += self.start
        return weight, self.scale * self.prior - weight @ self.mean


@dataclass(frozen=True, eq=False)
class RidgePath:
    """The solutions for all ridges, see `RidgeSums.path`."""

    problem: Problem
    values: Tensor  # eigenvalues of the problem's matrix, those of rounding size left out
    vectors: Tensor  # their eigenvectors
    projected: Tensor  # `problem.right` in these coordinates
    samples: int

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """As `RidgeSums.solve`."""
        check_ridges([ridge])
        return self.problem.raw(self.projected / (self.values + ridge) @ self.vectors.T)

    @property
    def distinct(self) -> float:
        """The number of different samples, if there are enough features to find it; else the number of samples.

        A repeated sample counts twice but takes one degree of freedom. With more features than samples, the score
        would then fall to zero with the ridge.
        """
        residual = self.problem.energy - float((self.projected.square() / self.values).sum())
        freedom = 1 + len(self.values)
        return different(self.samples, freedom, self.problem.varying, residual, self.problem.energy)

    def gcv(self, ridges: Sequence[float]) -> Tensor:
        """Generalised cross-validation, `loss / (1 − df/n)²`: an estimate of the mean loss on unseen data.

        `df = 1 + Σ_j λ_j/(λ_j + ridge)` are the degrees of freedom, intercept included, with eigenvalues λ; n is
        `distinct`. With weights, or equal classes, the loss is the weighted one. Where df is n, the score is infinite.

        Raises:
            ValueError: when a ridge is not positive.
        """
        check_ridges(ridges, positive=True)
        damped = self.values + self.values.new_tensor(ridges)[:, None]
        energy = self.projected.square().sum(0)
        explained = (energy * (2 - self.values / damped) / damped).sum(1)
        residual = self.problem.energy - explained
        freedom = 1 + (self.values / damped).sum(1)
        left = 1 - freedom / self.distinct
        score = 0.5 * self.problem.scale**2 * residual.clamp(min=0) / left.square()
        return score.where(left >= _LEFT, torch.full_like(score, math.inf))


def different(samples: int, freedom: float, varying: int, residual: float, energy: float) -> float:
    """The number of different samples, if a fit without a ridge goes through all of them; else `samples`.

    `freedom` (intercept included) and `residual` are those of that fit, `energy` is that of the targets. A fit that
    uses all `varying` features, those that are not constant, says nothing about the samples.
    """
    through_all = samples <= _MOST * varying and freedom < varying + 0.5 and residual < _INTERPOLATED * energy
    return freedom if through_all else samples


def probes(matrix: Tensor) -> Tensor:
    """Fixed random signs, one column each: the mean of `uᵀ M u` over columns u estimates the trace of M."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (len(matrix), _PROBES), generator=generator).to(matrix) * 2 - 1


def cholesky_in_place(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.cholesky_ex`, in the matrix's own memory: with many features a copy takes gigabytes."""
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    return torch.linalg.cholesky_ex(matrix, out=(matrix, info))  # type: ignore[no-any-return]


def check_ridges(ridges: Sequence[float], *, positive: bool = False) -> None:
    """Reject negative and infinite ridges, and zero where they must be positive."""
    for ridge in ridges:
        if not 0 <= ridge < math.inf or (positive and ridge == 0):
            raise ValueError(f"ridge is {ridge}; it must be finite and {'positive' if positive else 'not negative'}.")
