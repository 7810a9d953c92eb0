"""Other classifiers from the same sums: the nearest class mean, and linear discriminant analysis.

The sums hold the counts n_c and means μ_c of classes and their pooled covariance Σ_W. So these classifiers are exact
for any order and split of the data, as ridge regression is. All are linear in φ: a weight V and a bias b.

References:
    Hayes and Kanan, Lifelong machine learning with deep streaming linear discriminant analysis (Deep SLDA, 2020),
        https://arxiv.org/abs/1909.01520
    Tibshirani et al., Diagnosis of multiple cancer types by shrunken centroids of gene expression, PNAS 2002.
    Efron and Morris, Stein's estimation rule and its competitors: an empirical Bayes approach, 1973.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlcft.closed_form.fit import Problem, check_ridges, cholesky_in_place, probes, solve_factored
from dlcft.closed_form.sums import RidgeSums

_ABOVE = 6.0  # how far the own output stands above the average, in temperatures
_ALIKE = 1e-3  # the least correlation of outputs and targets
_MANY = 1500  # with more features a trace is estimated
_NEARLY_NONE = 1e-7  # a ridge that leaves an inverse in float64
_LEFT = 0.05  # the least share of degrees of freedom left, as less is rounding
_SIGNAL = 0.05  # the least share of the means' spread that is taken for true: with none, no class would be told apart


@torch.no_grad()
def nearest_mean(sums: RidgeSums) -> tuple[Tensor, Tensor]:
    """V and b whose outputs are `−½‖φ − μ_c‖²` up to a term that all classes share.

    A class without a sample has zeros.

    Raises:
        ValueError: when there is no data.
    """
    means, _ = class_means(sums)
    return means, -0.5 * means.square().sum(1)


@torch.no_grad()
def linear_discriminant(
    sums: RidgeSums, ridge: float, *, equal_classes: bool = True, shrunken: bool = False
) -> tuple[Tensor, Tensor]:
    """V and b whose outputs are `log π_c − ½ (φ − μ_c)ᵀ S⁻¹ (φ − μ_c)` up to a term that all classes share.

    `S = Σ_W + ridge·diag(σ²)`, with σ as in `RidgeSums.solve`: the best classifier for Gaussian classes of one
    covariance. A class without a sample has zeros.

    With `shrunken` the means are shrunk towards their own mean m, each by how well it is known: `m + ρ_c (μ_c − m)`,
    see `known_shares`. The mean of a few samples in many dimensions is far out by chance alone: a new sample of its
    class is not as far out, and is taken for a sample of a larger class.

    Args:
        sums: with data.
        ridge: its strength; one value suits features of any scale.
        equal_classes: whether the priors π_c are equal; otherwise they are the classes' shares of the data.
        shrunken: see above.

    Raises:
        ValueError: when there is no data, or `ridge` is negative.
    """
    check_ridges([ridge])
    means, seen = class_means(sums)
    problem, factor, strength = _factored(sums, means[seen], ridge)
    means = (means - problem.mean) * problem.inverse
    middle = means[seen].mean(0)
    spread = (means - middle) * seen[:, None]
    weight = solve_factored(spread.T, factor).T
    distances = (weight * spread).sum(1)
    if shrunken:
        counts = sums.counts * (sums.samples / sums.weight)
        known = known_shares(counts[seen], distances[seen], _freedom(factor, strength, problem.inverse > 0))
        weight[seen] *= known[:, None]
        distances[seen] *= known.square()
    bias = -0.5 * distances - weight @ middle
    if not equal_classes:
        bias[seen] += problem.prior[seen].log()
    weight *= problem.inverse
    return weight, bias - weight @ problem.mean


def known_shares(counts: Tensor, distances: Tensor, freedom: float) -> Tensor:
    """ρ_c of each class: the share of a class mean's distance to the middle that is no chance (empirical Bayes).

    The mean of n_c samples is off by `t/n_c`, measured as `distances`: squared, and by S. t is `freedom`,
    `tr(S⁻¹ Σ_W)`, made larger because S knows the same samples: the correction of generalised cross-validation, which
    is that of leaving out one sample at a time. Beyond that the distances tell how far true means lie apart, ψ, on
    average over all samples; then `ρ_c = ψ/(ψ + t/n_c)`.

    Args:
        counts: n_c, samples of each class; none is 0.
        distances: `(μ_c − m)ᵀ S⁻¹ (μ_c − m)`.
        freedom: `tr(S⁻¹ Σ_W)`.
    """
    samples = float(counts.sum())
    each = freedom / max(1 - len(counts) / samples, _LEFT)  # Σ_W is divided by n, and has n − C degrees of freedom
    noise = each / max(1 - each / samples, _LEFT) / counts
    share = counts / samples
    apart = (share * (distances - noise)).sum().clamp(min=_SIGNAL * (share * distances).sum())
    return apart / (apart + noise).clamp(min=torch.finfo(noise.dtype).tiny)


@torch.no_grad()
def on_targets(sums: RidgeSums, weight: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same decisions with outputs as near to `α·onehot(c)` as one factor makes them, in the sums' mean square.

    Outputs sum to α, as those of a ridge regression do. So one of them lies above zero, the output of a class without a
    sample: that is never the largest. The losses of all closed forms are on one scale.

    Args:
        sums: with data.
        weight: V, of all classes of the sums.
        bias: b.
        scale: α.
    """
    seen = sums.counts > 0
    few = 1 / int(seen.sum())
    weight = (weight - few * weight[seen].sum(0)) * seen[:, None]
    bias = (bias - few * bias[seen].sum()) * seen
    square = 2 * sums.loss(weight, bias, scale=0.0)  # the mean of ‖Vφ + b‖²
    # decisions stay, even those that are no good
    own = max(own_output(sums, weight, bias), _ALIKE * math.sqrt(square))
    gain = scale * own / square if square > 0 else 0.0
    return gain * weight, gain * bias + scale * few * seen


@torch.no_grad()
def own_output(sums: RidgeSums, weight: Tensor, bias: Tensor) -> float:
    """The mean output of a sample's own class."""
    return float((weight * sums.class_sums).sum() + bias @ sums.counts) / sums.weight


def fitting_temperature(sums: RidgeSums, weight: Tensor, bias: Tensor, scale: float) -> float:
    """The temperature that suits outputs of `on_targets` where no held-out data tells one.

    Measured with 3, 10 and 50 classes: where the own output stands 6 above the average one, the mean confidence is that
    of the accuracy, within a tenth or two (docs/experiment-log.md).
    """
    above = own_output(sums, weight, bias) - scale / int((sums.counts > 0).sum())
    return above / _ABOVE if above > 0 else scale


def class_means(sums: RidgeSums) -> tuple[Tensor, Tensor]:
    """μ_c, zeros for classes without a sample, and which classes have any.

    Raises:
        ValueError: when there is no data.
    """
    if not sums.weight > 0:
        raise ValueError("the sums hold no data; add samples of positive weight first.")
    seen = sums.counts > 0
    return sums.class_sums / sums.counts.where(seen, torch.ones_like(sums.counts))[:, None], seen


def _factored(sums: RidgeSums, means: Tensor, ridge: float) -> tuple[Problem, Tensor, float]:
    """Standardised coordinates, the Cholesky factor of `Σ_W + ridge·I` there, and the ridge.

    Where a ridge leaves no inverse, a tiny one is taken: a direction in which no class varies decides almost alone.
    """
    for strength in (ridge, max(ridge, _NEARLY_NONE)):
        problem = sums._problem()
        standardised = (means - problem.mean) * problem.inverse
        damped = problem.matrix  # in its own memory: with many features a copy takes gigabytes
        damped.addmm_(standardised.T * problem.prior[problem.prior > 0], standardised, alpha=-1)
        # a constant feature gets an equation of its own
        damped.diagonal().add_(strength).add_(problem.inverse == 0)
        smallest = len(damped) * torch.finfo(damped.dtype).eps * float(damped.diagonal().max())
        factor, failed = cholesky_in_place(damped)
        if not failed and factor.diagonal().min() ** 2 > smallest:
            break
    return problem, factor, strength


def _freedom(factor: Tensor, ridge: float, varying: Tensor) -> float:
    """`tr(S⁻¹ Σ_W) = features − ridge·tr(S⁻¹)` over features that vary; with many, random vectors estimate it."""
    vectors = probes(factor) if len(factor) > _MANY else torch.eye(len(factor)).to(factor)
    vectors = vectors * varying[:, None]
    trace = float((solve_factored(vectors, factor) * vectors).sum())
    if len(factor) > _MANY:
        trace /= vectors.shape[1]
    return int(varying.sum()) - ridge * trace
