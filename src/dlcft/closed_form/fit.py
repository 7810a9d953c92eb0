"""One ridge regression in standardised coordinates: its solutions and scores, for one ridge or for all ridges.

Features are rounded to their dtype, and the same sample gets other last bits in another batch. Where it is forgotten,
or is there twice, an eigenvalue of that rounding's size is left in place of zero. It tells nothing, and the choice of a
ridge must not see it: in place of a count, directions have weights, near 0 below `floor` and near 1 above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PROBES = 32  # random vectors that estimate a trace
_SPARE = 16  # random vectors beyond the rank: what rounding has left must not hide a direction
_NEARLY_NONE = 1e-7  # a ridge so small that it keeps the rank, and large enough for a Cholesky factor in float64
_FLOOR = 128  # in units of ε‖φ‖²/n, see `Problem.floor`; forgetting left eigenvalues of up to 18
_LEAST_RIDGE = 0.25  # of the floor: above any eigenvalue that rounding has made
_LEFT = 1e-3, 0.1  # bounds of the least share of degrees of freedom left, see `least_left`
# A fit without a ridge interpolates if its residual is below this share of the targets' energy: with fewer samples than
# features, where a sample may be there twice with two labels, and with more, where features may depend on each other.
_INTERPOLATED = 0.05, 1e-4
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
    rounding: float  # ε, the relative rounding of the standardised features

    def counted(self, samples: int) -> Counted:
        """What a score counts, for `gcv`: as `RidgePath.counted`, from a Cholesky factor and random vectors."""
        vectors = probes(self.matrix)
        vectors[self.inverse == 0] = 0  # a constant feature is no degree of freedom
        plain, least = Counted(samples, vectors), self.floor(samples)
        # a factor takes seconds: skip it if `through_all` would ignore the result
        factor = self._factor(least) if samples <= _MOST * self.varying else None
        if factor is None:
            return plain
        residual, _ = self._fit(factor, least, vectors)
        vectors = _steeper(_steeper(lambda z: z - least * solve_factored(z, factor)))(vectors)
        freedom = 1 + float(vectors.square().sum()) / _PROBES
        found = through_all(samples, freedom, self.varying, residual, self.energy)
        return Counted(freedom, vectors) if found else plain

    def gcv(self, ridge: float, counted: Counted) -> float:
        """As `RidgePath.gcv`, from a Cholesky factor; random vectors estimate the degrees of freedom."""
        factor = self._factor(ridge) if ridge >= _LEAST_RIDGE * self.floor(counted.samples) else None
        if factor is None:
            return math.inf
        residual, remaining = self._fit(factor, ridge, counted.probes)
        freedom = 1 + float(counted.probes.square().sum()) / _PROBES - remaining
        left = 1 - freedom / counted.samples
        if left < least_left(self.rounding):
            return math.inf
        return 0.5 * self.scale**2 * max(residual, 0.0) / left**2

    @property
    def varying(self) -> int:
        """How many features are not constant."""
        return int((self.inverse > 0).sum())

    def floor(self, samples: float) -> float:
        """The largest eigenvalue that rounding may have made.

        A sample φ that was subtracted with other last bits, φ + δ, leaves `−(φδᵀ + δφᵀ)/n`, of size `‖φ‖‖δ‖/n`. The
        mean of ‖φ‖² is the trace, and ‖δ‖ about ε‖φ‖.
        """
        return max(_NEARLY_NONE, _FLOOR * self.rounding * float(self.matrix.trace()) / samples)

    def _factor(self, ridge: float) -> Tensor | None:
        """The Cholesky factor of the damped matrix; None if it has none."""
        damped = self.matrix.clone()
        damped.diagonal().add_(ridge)
        factor, failed = cholesky_in_place(damped)
        return None if failed else factor

    def _fit(self, factor: Tensor, ridge: float, vectors: Tensor) -> tuple[float, float]:
        """The residual, and `Σ_j w_j ridge/(λ_j + ridge)`: what the ridge leaves of the degrees of freedom."""
        solved = solve_factored(torch.cat([self.right.T, vectors], 1), factor)
        weight, inverse = solved[:, : len(self.right)].T, solved[:, len(self.right) :]
        residual = self.energy - float((weight * self.right).sum())
        residual -= ridge * float(weight.square().sum())
        return residual, ridge * float((vectors * inverse).sum()) / _PROBES

    def path(self, samples: int, rank: int | None = None) -> RidgePath:
        """The solutions for all ridges; given the rank of the matrix, from an eigendecomposition in its range alone."""
        matrix, basis = self.matrix, None
        if rank is not None and rank + _SPARE < len(matrix):
            generator = torch.Generator().manual_seed(0)
            draws = torch.randn(len(matrix), rank + _SPARE, generator=generator, dtype=torch.float64).to(matrix)
            basis = torch.linalg.qr(matrix @ draws)[0]
            matrix = basis.T @ matrix @ basis
        values, vectors = torch.linalg.eigh(matrix)
        # Drop the directions in which the data does not vary: there the right-hand side is rounding.
        kept = values > len(self.matrix) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
        vectors = vectors[:, kept] if basis is None else basis @ vectors[:, kept]
        return RidgePath(self, values[kept], vectors, self.right @ vectors, samples)

    def raw(self, standardised: Tensor) -> tuple[Tensor, Tensor]:
        """V and b for features that are not standardised."""
        weight = self.scale * standardised * self.inverse
        if self.start is not None:
            weight += self.start
        return weight, self.scale * self.prior - weight @ self.mean


@dataclass(frozen=True, eq=False)
class Counted:
    """What a score counts."""

    samples: float  # n; those that differ, where a fit can go through all of them
    probes: Tensor  # random vectors z with E[z zᵀ] = diag(w) in the eigenvectors' coordinates: w counts directions


@dataclass(frozen=True, eq=False)
class RidgePath:
    """The solutions for all ridges, see `RidgeSums.path`."""

    problem: Problem
    values: Tensor  # eigenvalues of the problem's matrix, those of float64's rounding left out
    vectors: Tensor  # their eigenvectors
    projected: Tensor  # `problem.right` in these coordinates
    samples: int

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """As `RidgeSums.solve`."""
        check_ridges([ridge])
        return self.problem.raw(self.projected / (self.values + ridge) @ self.vectors.T)

    def counted(self) -> tuple[float, Tensor]:
        """The number of samples n, and the weight w of each direction.

        A repeated sample counts twice but takes one degree of freedom. With more features than samples, the score
        would then fall to zero with the ridge. So where there are enough features to tell, n is the number of
        different samples: that of directions, without those that rounding has made. Else every direction counts.
        """
        least = self.problem.floor(self.samples)
        weights = noise_weights(self.values, least)
        freedom, residual = 1 + float(weights.sum()), float(self._residual(self.values.new_tensor([least])))
        if through_all(self.samples, freedom, self.problem.varying, residual, self.problem.energy):
            return freedom, weights
        return self.samples, torch.ones_like(weights)

    def gcv(self, ridges: Sequence[float]) -> Tensor:
        """Generalised cross-validation, `loss / (1 − df/n)²`: an estimate of the mean loss on unseen data.

        `df = 1 + Σ_j w_j λ_j/(λ_j + ridge)` are the degrees of freedom, intercept included, with eigenvalues λ; n and w
        are `counted`. With weights of samples, or equal classes, the loss is the weighted one. The score is infinite
        where the features' rounding would decide it: for a ridge far below `Problem.floor`, and where df is nearly n.

        Raises:
            ValueError: when a ridge is not positive.
        """
        check_ridges(ridges, positive=True)
        damping = self.values.new_tensor(ridges)
        samples, weights = self.counted()
        freedom = 1 + (weights * self.values / (self.values + damping[:, None])).sum(1)
        left = 1 - freedom / samples
        score = 0.5 * self.problem.scale**2 * self._residual(damping).clamp(min=0) / left.square()
        told = (left >= least_left(self.problem.rounding)) & (damping >= _LEAST_RIDGE * self.problem.floor(samples))
        return score.where(told, torch.full_like(score, math.inf))

    def _residual(self, ridges: Tensor) -> Tensor:
        """The mean squared error of each ridge's fit, for α = 1."""
        damped = self.values + ridges[:, None]
        energy = self.projected.square().sum(0)
        return self.problem.energy - (energy * (2 - self.values / damped) / damped).sum(1)


def noise_weights(values: Tensor, floor: float) -> Tensor:
    """How much a direction with eigenvalue λ counts: `s(s(b))²` with `b = λ/(λ + floor)` and `s(b) = b²(3 − 2b)`.

    It is smooth, so that no rounding moves a direction across a threshold: 3e-6 at a tenth of the floor, 0.25 at the
    floor, 0.997 at ten times it. And it is a polynomial in b, so that solutions of linear equations give it too.
    """
    share = values / (values + floor)
    return _steeper(_steeper(lambda z: share * z))(torch.ones_like(values)).square()


def _steeper(b: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`z ↦ b²(3 − 2b) z` for a linear map b with eigenvalues in [0, 1]: nearer to 0 or to 1."""

    def applied(z: Tensor) -> Tensor:
        once = b(b(z))
        return 3 * once - 2 * b(once)

    return applied


def least_left(rounding: float) -> float:
    """The least share of degrees of freedom `1 − df/n` with which a score tells anything.

    Where a fit nearly goes through all samples, its loss is about `(1 − df/n)²` of the targets' energy. Rounding
    changes that loss by up to about 100 ε of the energy; it must stay a hundredth of the loss.
    """
    return min(max(_LEFT[0], math.sqrt(1e4 * rounding)), _LEFT[1])


def through_all(samples: int, freedom: float, varying: int, residual: float, energy: float) -> bool:
    """Whether a fit without a ridge goes through all samples, so that its degrees of freedom tell how many differ.

    `freedom` (intercept included) and `residual` are those of that fit, `energy` is that of the targets. A fit that
    uses all `varying` features, those that are not constant, says nothing about the samples. One that uses fewer, with
    more samples than features, may do so because features depend on each other.
    """
    most = _INTERPOLATED[samples > varying] * energy
    return samples <= _MOST * varying and freedom < varying + 0.5 and residual < most


def probes(matrix: Tensor) -> Tensor:
    """Fixed random signs, one column each: the mean of `uᵀ M u` over columns u estimates the trace of M."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (len(matrix), _PROBES), generator=generator).to(matrix) * 2 - 1


def cholesky_in_place(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.cholesky_ex`, in the matrix's own memory: with many features a copy takes gigabytes.

    The factor lies column by column, as LAPACK wants it; torch copies any other.
    """
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    return torch.linalg.cholesky_ex(matrix.mT, out=(matrix.mT, info))  # type: ignore[no-any-return]


def solve_factored(right: Tensor, factor: Tensor) -> Tensor:
    """As `torch.cholesky_solve`, which copies the factor."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved


def check_ridges(ridges: Sequence[float], *, positive: bool = False) -> None:
    """Reject negative and infinite ridges, and zero where they must be positive."""
    for ridge in ridges:
        if not 0 <= ridge < math.inf or (positive and ridge == 0):
            raise ValueError(f"ridge is {ridge}; it must be finite and {'positive' if positive else 'not negative'}.")
