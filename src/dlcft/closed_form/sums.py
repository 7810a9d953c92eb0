"""Ridge regression from running sums: learning in any order, merging and forgetting are additions.

With features φ, labels c and sample weights w, the sums `n_c = Σ w`, `s_c = Σ w φ` (of each class) and `G = Σ w φφᵀ`
determine the solution of a ridge regression on `y = α·onehot(c)` for every strength of the ridge and every α. Hence
data that comes in parts gives the same solution as all data at once, up to rounding.

References:
    Hoerl and Kennard, Ridge regression: biased estimation for nonorthogonal problems, Technometrics 1970.
    Golub, Heath and Wahba, Generalized cross-validation as a method for choosing a good ridge parameter, 1979.
    McDonnell et al., RanPAC: random projections and pre-trained models for continual learning, arXiv 2307.02251.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlcft.closed_form.fit import Problem, RidgePath, check_ridges, cholesky_in_place, solve_factored
from dlcft.closed_form.triangles import mirror
from dlcft.network import workers

Tensors = dict[str, Tensor]
Part = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]

# Half decades around the values that were best for accuracy (0.03 to 0.3) and for squared error (ten times these).
RIDGES = tuple(10 ** (k / 2) for k in range(-10, 5))

_ALIKE = 1e-4  # scores count as equal if they differ by a smaller share
_BLOCK = 512  # columns of the Gram matrix at a time: only blocks on and above the diagonal are multiplied
_CONSTANT = 1e-12  # a feature counts as constant if its variance is below this share of its mean square
EIGEN_LIMIT = 1500  # with more features, an eigendecomposition takes too long
_COARSE = 800  # about how many features give the first guess of a ridge then
_REMOVED = 4  # as many times the weight that is left may be subtracted without a trace in `rounding`
_TRACE = 64  # roundings of a feature's sum of squares: what subtracted samples may leave of it
_DROWNED = 1e-3  # of the median variance of a feature: more is no trace of what was subtracted
_DROWNED_SHARE = 0.01  # of the features
_NEGATIVE = 1e-4  # a negative variance beyond this share of a sample's ‖φ‖² is an error, not rounding
_ROUNDING = 1e-9  # a difference of sums, relative to the sum before, below which it is zero


@dataclass(frozen=True, eq=False)
class RidgeSums:
    """The sums `n_c`, `s_c` and `G` of all data seen. They never change; every operation returns new ones.

    They are computed in their own dtype (float64 by default) and on their own device, whatever the dtype of the
    features: float32 took half the time, but left errors of 7e-8 in G and 1e-6 in solutions.

    Attributes:
        counts: `n_c`, the total weight of each class.
        class_sums: `s_c`, classes × features.
        gram: `G`, features × features; symmetric to the last bit, so that its triangle is all that is stored.
        samples: how many samples were added, whatever their weights; generalised cross-validation needs it.
        epsilon: the rounding of the features' dtype: by about so much a sample's features differ from batch to batch.
        removed: the total weight of samples that were subtracted, each of which has left its rounding.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1])
        >>> joint = RidgeSums.empty(1).add(x, y)
        >>> apart = RidgeSums.empty(1).add(x[2:], y[2:]).add(x[:2], y[:2])
        >>> weight, bias = apart.solve(0.1, scale=1.0)
        >>> torch.allclose(weight, joint.solve(0.1, scale=1.0)[0])
        True
    """

    counts: Tensor
    class_sums: Tensor
    gram: Tensor
    samples: int
    epsilon: float = 0.0
    removed: float = 0.0

    @classmethod
    def empty(
        cls, features: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> RidgeSums:
        """The sums of no data, over no classes.

        Raises:
            ValueError: when `features` is not positive or the dtype not floating-point.
        """
        if features < 1 or not dtype.is_floating_point:
            raise ValueError(f"got {features} features in {dtype}; at least 1 in a floating-point dtype is needed.")
        zeros = torch.zeros(features, features, dtype=dtype, device=device)
        return cls(zeros.new_zeros(0), zeros.new_zeros(0, features), zeros, 0)

    @property
    def features(self) -> int:
        """The length of a feature vector."""
        return len(self.gram)

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return len(self.counts)

    @property
    def weight(self) -> float:
        """`n`, the total weight of the data: the number of samples when all weigh 1."""
        return float(self.counts.sum())

    @property
    def rounding(self) -> float:
        """ε, how large rounding is relative to the features: larger where far more was subtracted than is left."""
        most = _REMOVED * self.weight
        return self.epsilon * math.sqrt(max(1.0, self.removed / most if most > 0 else 1.0))

    def add(self, features: Tensor, labels: Tensor, weights: Tensor | None = None) -> RidgeSums:
        """The sums with these samples added; a label beyond the known classes adds classes.

        Args:
            features: φ, samples × features.
            labels: class indices.
            weights: w of each sample, not negative; 1 by default.

        Raises:
            ValueError: when shapes do not fit, a label or weight is negative, or a value is not finite.
        """
        return self.extend([(features, labels, weights)])

    @torch.no_grad()
    def extend(self, parts: Iterable[Part]) -> RidgeSums:
        """As `add` for each (features, labels) or (features, labels, weights), with one copy of the sums."""
        sums = self.to(self.gram, copy=True)
        for features, labels, *rest in parts:
            x, y, w = self._checked(features, labels, rest[0] if rest else None)
            if len(y) and int(y.max()) >= sums.classes:
                sums = sums.grow(int(y.max()) + 1)
            weighted = x * w[:, None]
            sums.counts.index_add_(0, y, w)
            sums.class_sums.index_add_(0, y, weighted)
            for start in range(0, self.features, _BLOCK):
                block = slice(start, start + _BLOCK)
                sums.gram[block, start:].addmm_(weighted[:, block].T, x[:, start:])
            sums = replace(sums, samples=sums.samples + len(y), epsilon=max(sums.epsilon, _epsilon(features.dtype)))
        mirror(sums.gram)
        return sums

    def over_workers(self, classes: int) -> RidgeSums:
        """The sums of the data of all workers, on each of them; `classes` is how many all of them know."""
        sums = self.grow(max(classes, self.classes))
        if workers.count() == 1:
            return sums
        sums = sums.to(self.gram, copy=True)
        workers.add_up([sums.counts, sums.class_sums])
        for start in range(0, self.features, _BLOCK):  # of a symmetric matrix one half is enough
            rows = slice(start, start + _BLOCK), slice(start, None)
            block = sums.gram[rows].contiguous()
            workers.add_up([block])
            sums.gram[rows] = block
        mirror(sums.gram)
        facts = workers.gathered((self.samples, self.epsilon, self.removed))
        samples, epsilons, removed = zip(*facts, strict=True)
        return replace(sums, samples=sum(samples), epsilon=max(epsilons), removed=sum(removed))

    def merge(self, other: RidgeSums) -> RidgeSums:
        """The sums of the data of both."""
        return self._combined(other, 1)

    def minus(self, other: RidgeSums) -> RidgeSums:
        """The inverse of `merge`.

        The result is checked as far as sums allow: no count may be negative, and the scatter within classes,
        `G − Σ_c s_c s_cᵀ/n_c`, must be positive semi-definite. With more samples than features, samples that were
        never added may pass.

        Raises:
            ValueError: when the numbers of features differ, or the other's data cannot have been part of these sums.
        """
        left = self._combined(other, -1)
        only = "only what was added before, with the same weights, features and labels, can be subtracted"
        before = self.grow(left.classes).counts
        low = int((left.counts + _ROUNDING * before).argmin()) if left.classes else 0
        if left.samples < 0 or (left.classes and left.counts[low] < -_ROUNDING * before[low]):
            raise ValueError(
                f"subtracting would leave {left.samples} samples, and class {low} with a weight of "
                f"{float(left.counts[low]):.6g}; {only}."
            )
        gone = left.counts <= _ROUNDING * before
        if left.samples == 0 and not gone.all():
            weight = float(left.counts.sum())
            raise ValueError(f"subtracting would leave a weight of {weight:.6g} without a sample; {only}.")
        size = self.gram.diagonal()
        strange = left.class_sums[gone].square() > _ROUNDING * before[gone, None] * size
        kept = left.class_sums[~gone]
        scatter = left.gram.addmm(kept.T / left.counts[~gone], kept, alpha=-1)
        # a sample never added leaves −‖φ‖² in some direction; an added one, rounded to float32, a millionth of it
        scatter.diagonal().add_(_NEGATIVE * size.sum() / self.counts.sum() + torch.finfo(size.dtype).tiny)
        if strange.any() or torch.linalg.cholesky_ex(scatter)[1]:
            raise ValueError(f"subtracting would leave a negative variance; {only}.")
        if gone.all():
            return RidgeSums.empty(self.features, dtype=size.dtype, device=size.device).grow(left.classes)
        counts, class_sums = left.counts.masked_fill(gone, 0), left.class_sums.masked_fill(gone[:, None], 0)
        return replace(left, counts=counts, class_sums=class_sums)._without_traces(size, other)

    def _without_traces(self, before: Tensor, gone: RidgeSums) -> RidgeSums:
        """The sums with features that vary by rounding alone made constant: only what was subtracted had varied there.

        Otherwise such a feature would be standardised like others, and count among those whose median σ is the least.

        Raises:
            ValueError: when many features that do vary cannot be told from that rounding.
        """
        each = gone.gram.diagonal().to(before) / math.sqrt(max(1, gone.samples))  # roundings differ in sign
        rounding = torch.maximum(_TRACE * self.epsilon * each, _ROUNDING * before)
        total, size = self.class_sums.sum(0), self.gram.diagonal()
        spread = size - total.square() / self.weight
        still = spread <= rounding
        if not still.any():
            return self
        drowned = int((still & (spread > _DROWNED * spread.median())).sum())
        if drowned > _DROWNED_SHARE * self.features:
            raise ValueError(
                f"{drowned} of {self.features} features vary less, over the samples that stay, than the rounding of "
                "those to forget, which are far larger; they would be lost: learn the samples that stay anew."
            )
        value = torch.where(size > rounding, total / self.weight, 0)[still]
        class_sums, gram = self.class_sums.clone(), self.gram.clone()
        class_sums[:, still] = torch.outer(self.counts, value)
        rows = torch.outer(value, class_sums.sum(0))
        gram[still], gram[:, still] = rows, rows.T
        return replace(self, class_sums=class_sums, gram=gram)

    def grow(self, classes: int) -> RidgeSums:
        """The sums for `classes` classes; unseen ones have zero targets, and so zero weights.

        Raises:
            ValueError: when there are more already.
        """
        more = classes - self.classes
        if more < 0:
            raise ValueError(f"cannot grow to {classes} classes; there are {self.classes} already.")
        counts = torch.cat([self.counts, self.counts.new_zeros(more)])
        class_sums = torch.cat([self.class_sums, self.gram.new_zeros(more, self.features)])
        return replace(self, counts=counts, class_sums=class_sums)

    def rearranged(self, places: Sequence[int]) -> RidgeSums:
        """The sums with class i moved to position `places[i]`; positions in between are empty classes."""
        order = torch.tensor(list(places), dtype=torch.long, device=self.counts.device)
        if len(order) != self.classes or len(set(places)) != len(order) or min(places, default=0) < 0:
            raise ValueError(
                f"places are {list(places)}; {self.classes} different ones are needed, one for each class."
            )
        classes = 1 + max(places, default=-1)
        counts, class_sums = self.counts.new_zeros(classes), self.class_sums.new_zeros(classes, self.features)
        counts[order], class_sums[order] = self.counts, self.class_sums
        return replace(self, counts=counts, class_sums=class_sums)

    @torch.no_grad()
    def solve(
        self, ridge: float, *, equal_classes: bool = False, scale: float = 15.0, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The minimiser V, b of `Σ w ½‖α·onehot(c) − Vφ − b‖² / Σ w + (ridge/2) ‖(V − V0) diag(σ)‖²`.

        The intercept b is not penalised. σ is the standard deviation of each feature, but at least the median one
        divided by √samples: otherwise a feature that has hardly varied so far could get a weight of any size. A
        constant feature gets zero weight. Where the solution without a ridge is not unique, it is the one of least
        ‖V diag(σ)‖.

        With `equal_classes` every class counts the same. Weighting the samples of a class would need its own second
        moment (classes × features² numbers), which is not stored. Instead all classes *share the pooled covariance
        within classes*, `Σ_W = (G − Σ_c s_c s_cᵀ/n_c)/n`, as in linear discriminant analysis, and keep their own means.
        This equals weighting the samples if the classes have the same covariance, and changes nothing if they have
        the same weight already. To weight samples exactly, give `weights` to `add`.

        Args:
            ridge: its strength; one value suits features of any scale.
            equal_classes: see above.
            scale: α.
            start: V0, towards which the ridge pulls; zero by default.

        Returns:
            V (classes × features) and b (classes), in the sums' dtype.

        Raises:
            ValueError: when there is no data, or `ridge` is negative.
        """
        check_ridges([ridge])
        problem = self._problem(equal_classes, scale, start)
        diagonal = problem.matrix.diagonal()
        diagonal += ridge
        diagonal += problem.inverse == 0  # a constant feature gets an equation of its own: 1·v = 0
        smallest = self.features * torch.finfo(diagonal.dtype).eps * float(diagonal.max())
        factor, failed = cholesky_in_place(problem.matrix)
        if failed or factor.diagonal().min() ** 2 <= smallest:
            return self.path(equal_classes=equal_classes, scale=scale, start=start).solve(ridge)
        return problem.raw(solve_factored(problem.right.T, factor).T)

    @torch.no_grad()
    def path(self, *, equal_classes: bool = False, scale: float = 15.0, start: Tensor | None = None) -> RidgePath:
        """One eigendecomposition that gives the solutions and scores of all ridges."""
        return self._problem(equal_classes, scale, start).path(self.samples)

    @torch.no_grad()
    def choose_ridge(
        self,
        ridges: Sequence[float] = RIDGES,
        *,
        equal_classes: bool = False,
        scale: float = 15.0,
        start: Tensor | None = None,
    ) -> float:
        """The ridge of the least `RidgePath.gcv`, best for the squared error; accuracy is often best at a smaller one.

        Among ridges whose scores differ only by rounding, it is the largest.

        With many features an eigendecomposition would take minutes. With few samples one in their span does as well.
        With many samples too, that of every n-th feature gives a first guess, and a search from there computes one
        Cholesky factor for each ridge it tries, with the trace estimated from fixed random vectors.

        Raises:
            ValueError: when a ridge is not positive.
        """
        check_ridges(ridges, positive=True)
        ridges = sorted(ridges)
        many = min(self.features, self.samples) > EIGEN_LIMIT
        step = -(-self.features // _COARSE) if many else 1
        part = None if start is None else start[:, ::step]
        few = replace(self, class_sums=self.class_sums[:, ::step], gram=self.gram[::step, ::step])
        rank = None if many or self.features <= EIGEN_LIMIT else self.samples
        near = few._problem(equal_classes, scale, part).path(self.samples, rank).gcv(ridges)
        best = int(near.argmin())
        score: Callable[[int], float] = near.tolist().__getitem__
        if step > 1:
            problem = self._problem(equal_classes, scale, start)
            counted = problem.counted(self.samples)
            score = functools.cache(lambda index: problem.gcv(ridges[index], counted))
            # the score of too small a ridge is infinite
            while best + 1 < len(ridges) and (score(best) == math.inf or score(best + 1) < score(best)):
                best += 1
            while best > 0 and score(best - 1) < score(best):
                best -= 1
        least = score(best)
        while best + 1 < len(ridges) and score(best + 1) <= (1 + _ALIKE) * least:
            best += 1
        return float(ridges[best])

    @functools.cached_property
    def usual_ridge(self) -> float:
        """`choose_ridge` for a regression from zero in which samples weigh the same; found once."""
        return self.choose_ridge()

    @torch.no_grad()
    def loss(self, weight: Tensor, bias: Tensor, scale: float = 15.0) -> float:
        """The mean of `½‖α·onehot(c) − Vφ − b‖²` over all data seen, exactly; unseen outputs have zero targets.

        Raises:
            ValueError: when there is no data, or the shapes do not fit.
        """
        self._check_not_empty()
        if weight.dim() != 2 or weight.shape[1] != self.features or bias.shape != weight.shape[:1]:
            raise ValueError(
                f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit; for {self.features} features "
                "they are (outputs × features) and (outputs)."
            )
        if len(weight) < self.classes:
            raise ValueError(f"the weight has {len(weight)} rows; {self.classes} classes were seen.")
        v, b, sums = weight.to(self.gram), bias.to(self.gram), self.grow(len(weight))
        products = v @ sums.gram + 2 * torch.outer(b, sums.class_sums.sum(0)) - 2 * scale * sums.class_sums
        rest = sums.weight * (b.square().sum() + scale**2) - 2 * scale * (b * sums.counts).sum()
        return max(0.0, float(0.5 * ((products * v).sum() + rest) / sums.weight))

    def to(self, *args: Any, **kwargs: Any) -> RidgeSums:
        """On another device or in another dtype, as `Tensor.to`."""
        counts, class_sums, gram = (t.to(*args, **kwargs) for t in (self.counts, self.class_sums, self.gram))
        return replace(self, counts=counts, class_sums=class_sums, gram=gram)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, and a header that JSON can hold."""
        tensors = {"counts": self.counts, "class_sums": self.class_sums, "gram": self.gram}
        return tensors, {"samples": self.samples, "epsilon": self.epsilon, "removed": self.removed}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> RidgeSums:
        """The inverse of `state`; earlier states do not say how coarse their features were: float32, mostly."""
        epsilon = header.get("epsilon", _epsilon(torch.float32))
        counts, class_sums, gram = tensors["counts"], tensors["class_sums"], tensors["gram"]
        classes, features = len(counts), len(gram)
        wanted = {"counts": (classes,), "class_sums": (classes, features), "gram": (features, features)}
        for name, shape in wanted.items():
            tensor = tensors[name]
            if tensor.shape != shape or tensor.dtype != torch.float64 or not tensor.isfinite().all():
                got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise ValueError(f"the sums hold {name} as {got}; finite float64 of shape {shape} is needed.")
        return cls(counts, class_sums, gram, header["samples"], epsilon, header.get("removed", 0.0))

    def _checked(self, features: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The samples in the sums' dtype and on their device."""
        if features.dim() != 2 or features.shape[1] != self.features:
            raise ValueError(f"features have shape {tuple(features.shape)}; (samples × {self.features}) is needed.")
        if labels.shape != features.shape[:1] or labels.is_floating_point():
            got = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise ValueError(f"labels are {got}; {len(features)} integer class indices are needed.")
        if len(labels) and int(labels.min()) < 0:
            raise ValueError(f"a label is {int(labels.min())}; class indices start at 0.")
        x, y = features.detach().to(self.gram), labels.to(self.gram.device, torch.int64)
        if not x.reshape(-1).dot(x.reshape(-1)).isfinite():
            raise ValueError(f"features with values up to {float(x.abs().max())}; finite numbers are needed.")
        if weights is None:
            return x, y, x.new_ones(len(x))
        w = weights.detach().to(self.gram)
        if w.shape != y.shape or not (w.isfinite() & (w >= 0)).all():
            got = f"weights have shape {tuple(w.shape)} and values {w.flatten()[:3].tolist()} …"
            raise ValueError(f"{got}; {len(y)} finite numbers, none negative, are needed.")
        return x, y, w

    def _combined(self, other: RidgeSums, sign: int) -> RidgeSums:
        if other.features != self.features:
            raise ValueError(f"the other sums are over {other.features} features; these over {self.features}.")
        classes = max(self.classes, other.classes)
        a, b = self.grow(classes), other.grow(classes).to(self.gram)
        counts, class_sums = a.counts + sign * b.counts, a.class_sums + sign * b.class_sums
        gram, samples = torch.add(a.gram, b.gram, alpha=sign), a.samples + sign * b.samples
        removed = a.removed + b.removed + (b.weight if sign < 0 else 0.0)
        return RidgeSums(counts, class_sums, gram, samples, max(a.epsilon, b.epsilon), removed)

    def _check_not_empty(self) -> None:
        if not self.weight > 0:
            raise ValueError("the sums hold no data; add samples of positive weight first.")

    def _problem(self, equal_classes: bool = False, scale: float = 15.0, start: Tensor | None = None) -> Problem:
        """The regression in standardised coordinates: the features' covariance, and that with the targets.

        With `start`, of the targets minus the outputs of that head.
        """
        self._check_not_empty()
        share = self.counts / self.weight
        seen = share > 0
        means = self.class_sums / self.counts.where(seen, torch.ones_like(share))[:, None]
        prior = seen.to(share) / seen.sum() if equal_classes else share
        mean = prior @ means
        matrix = self.gram / self.weight
        if equal_classes:  # equal weights for the class means; the pooled covariance within classes stays
            matrix.addmm_(means.T * (prior - share), means)
        size = matrix.diagonal().clone()
        matrix.addr_(mean, mean, alpha=-1)
        variance = matrix.diagonal().clamp(min=0)
        varies = (variance > _CONSTANT * size) & (variance > 0)
        if varies.any():
            variance = variance.clamp(min=float(variance[varies].median()) / self.samples)
        inverse = variance.rsqrt().where(varies, torch.zeros_like(variance))
        right = prior[:, None] * (means - mean) * inverse
        matrix.mul_(inverse).mul_(inverse[:, None])
        energy = float((prior * (1 - prior)).sum())
        # features are rounded relative to their size, and standardised by their deviation
        trace = float(matrix.trace())
        rounding = self.rounding * math.sqrt(float((size * inverse.square()).sum()) / trace) if trace > 0 else 0.0
        if start is None:
            return Problem(matrix, right, inverse, mean, prior, energy, scale, None, rounding)
        if start.shape != right.shape:
            raise ValueError(f"start has shape {tuple(start.shape)}; {tuple(right.shape)} is needed.")
        start = start.to(matrix)
        from_there = start / scale / inverse.where(varies, torch.ones_like(inverse)) * varies
        explained = from_there @ matrix
        energy += float(((explained - 2 * right) * from_there).sum())
        right = right - explained
        return Problem(matrix, right, inverse, mean, prior, energy, scale, start * varies, rounding)


def _epsilon(dtype: torch.dtype) -> float:
    """The relative rounding of features; half precision is summed in float32 and hides most of the differences."""
    coarsest = torch.finfo(torch.float32).eps
    return min(coarsest, torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
