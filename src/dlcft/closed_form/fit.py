"""One ridge regression in standardised coordinates: its solutions and scores, for one ridge or for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PROBES = 32  # random vectors that estimate a trace
_NEARLY_NONE = 1e-7  # a ridge that leaves the rank of a matrix in float64, and that a Cholesky factor bears
_LEFT = 1e-3  # the least share of degrees of freedom left over: with less a score is rounding divided by rounding
_INTERPOLATED = 0.05  # the share of the targets' energy below which a fit without a ridge goes through the samples
_MOST = 4  # samples for each feature: with more, a rank below the number of features tells of these, not of repetitions


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

    def gcv(self, ridge: float, samples: float) -> float:
        """As `RidgePath.gcv`, by a Cholesky factor; the degrees of freedom by `_PROBES` random vectors."""
        found = self._fit(ridge)
        if found is None:
            return math.inf
        residual, freedom = found
        left = 1 - freedom / samples
        return 0.5 * self.scale**2 * max(residual, 0.0) / left**2 if left >= _LEFT else math.inf

    def distinct(self, samples: int) -> float:
        """As `RidgePath.distinct`, by the degrees of freedom of a ridge that is nearly none."""
        # a factor takes seconds: not where it would tell nothing
        found = self._fit(_NEARLY_NONE) if samples <= _MOST * self.varying else None
        if found is None:
            return samples
        residual, freedom = found
        return different(samples, freedom, self.varying, residual, self.energy)

    @property
    def varying(self) -> int:
        """How many features are not constant."""
        return int((self.inverse > 0).sum())

    def _fit(self, ridge: float) -> tuple[float, float] | None:
        """The residual and the degrees of freedom, intercept included; None where there is no factor."""
        damped = self.matrix.clone()
        damped.diagonal().add_(ridge)
        factor, failed = cholesky_in_place(damped)
        if failed:
            return None
        generator = torch.Generator().manual_seed(0)
        probes = torch.randint(0, 2, (len(factor), _PROBES), generator=generator).to(factor) * 2 - 1
        solved = torch.cholesky_solve(torch.cat([self.right.T, probes], 1), factor)
        weight, inverse = solved[:, : len(self.right)].T, solved[:, len(self.right) :]
        # a constant feature adds 1/ridge to the trace, and no freedom
        trace = float((probes * inverse).sum() / _PROBES) - (len(factor) - self.varying) / ridge
        residual = self.energy - float((weight * self.right).sum())
        residual -= ridge * float(weight.square().sum())
        return residual, 1 + self.varying - ridge * trace

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

    @property
    def distinct(self) -> float:
        """The number of samples, or less: how many different ones, where the features are enough to tell.

        A sample that is there twice takes one degree of freedom and would count as two: with more features than
        samples the score would then fall to zero with the ridge.
        """
        residual = self.problem.energy - float((self.projected.square() / self.values).sum())
        freedom = 1 + len(self.values)
        return different(self.samples, freedom, self.problem.varying, residual, self.problem.energy)

    def gcv(self, ridges: Sequence[float]) -> Tensor:
        """Generalised cross-validation, `loss / (1 − df/n)²`: an estimate of the mean loss on unseen data.

        The degrees of freedom, intercept included, are `df = 1 + Σ_j λ_j/(λ_j + ridge)`, λ the eigenvalues; n is the
        number of samples, see `distinct`. With weights or balance the loss is the weighted one. Infinite where df is n.

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
    """How many samples differ, as far as a fit without a ridge shows: where it goes through all of them.

    Args:
        samples: how many there are.
        freedom: degrees of freedom of that fit, intercept included.
        varying: how many features are not constant; a fit that uses all of them shows nothing.
        residual: what it leaves of the targets' energy.
        energy: of the targets.
    """
    through_all = samples <= _MOST * varying and freedom < varying + 0.5 and residual < _INTERPOLATED * energy
    return freedom if through_all else samples  # where it is estimated, its error is that of the fits it is divided by


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
