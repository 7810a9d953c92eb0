"""Nearest mean and discriminant analysis from sums: brute force and scikit-learn agree, small classes are kept."""

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid

from dlcft.closed_form import discriminant as module
from dlcft.closed_form.discriminant import (
    fitting_temperature,
    known_shares,
    linear_discriminant,
    nearest_mean,
    on_targets,
)
from dlcft.closed_form.sums import RidgeSums
from tests.closed_form.test_sums import assert_close, data, sums

COUNTS = [60, 60, 12, 4]


def gaussians(counts, features=30, apart=1.0, seed=0, shift=0):
    """Classes of one covariance that is not spherical; `shift` draws other samples of the same classes."""
    generator = torch.Generator().manual_seed(seed)
    means = apart * torch.randn(len(counts), features, generator=generator, dtype=torch.float64)
    mix = torch.randn(features, features, generator=generator, dtype=torch.float64) / features**0.5
    generator.manual_seed(seed + 1000 * (1 + shift))
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(2, len(y), features, generator=generator, dtype=torch.float64)
    return means[y] + noise[0] + 2 * noise[1] @ mix, y


def brute(x, y, ridge, shrunken=False):
    """Scores of the same samples, class by class and sample by sample."""
    classes = range(int(y.max()) + 1)
    means = torch.stack([x[y == c].mean(0) for c in classes])
    within = sum(torch.outer(a - means[c], a - means[c]) for a, c in zip(x, y, strict=True)) / len(x)
    variance = x.var(0, correction=0)
    metric = torch.linalg.inv(within + ridge * torch.diag(variance))
    if shrunken:
        middle = means.mean(0)
        freedom = float((metric @ within).trace())
        distances = torch.stack([(m - middle) @ metric @ (m - middle) for m in means])
        known = known_shares(torch.bincount(y).double(), distances, freedom)
        means = middle + known[:, None] * (means - middle)
    scores = torch.stack([torch.stack([-0.5 * (a - m) @ metric @ (a - m) for m in means]) for a in x])
    return scores - scores.mean(1, keepdim=True)


def centred(x, fit):
    scores = x @ fit[0].T + fit[1]
    return scores - scores.mean(1, keepdim=True)


def test_nearest_mean_equals_brute_force_and_scikit_learn():
    x, y = data()
    means = torch.stack([x[y == c].mean(0) for c in range(4)])
    scores = -0.5 * torch.cdist(x, means).square()
    assert_close([centred(x, nearest_mean(sums(x, y)))], [scores - scores.mean(1, keepdim=True)])
    theirs = NearestCentroid().fit(x.numpy(), y.numpy()).predict(x.numpy())
    assert centred(x, nearest_mean(sums(x, y))).argmax(1).tolist() == theirs.tolist()


@pytest.mark.parametrize("shrunken", [False, True])
@pytest.mark.parametrize("limit", [0, 1500])
def test_discriminants_equal_brute_force(shrunken, limit, monkeypatch):
    x, y = gaussians(COUNTS, features=6)
    monkeypatch.setattr(module, "_MANY", limit)
    monkeypatch.setattr("dlcft.closed_form.fit._PROBES", 20_000)
    found = centred(x, linear_discriminant(sums(x, y), 0.3, shrunken=shrunken))
    # with many features random vectors estimate one number
    assert_close([found], [brute(x, y, 0.3, shrunken)], 1e-9 if limit or not shrunken else 3e-3)


@pytest.mark.parametrize("shrinkage", [1e-4, 0.3])
def test_lda_equals_scikit_learn(shrinkage):
    x, y = gaussians(COUNTS, features=8)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x.numpy(), y.numpy())
    within = sum((x[y == c] - x[y == c].mean(0)).square().sum() for c in range(4)) / x.numel()
    ridge = float(shrinkage / (1 - shrinkage) * within)
    log_prior = (torch.bincount(y) / len(y)).double().log()
    weight, bias = linear_discriminant(sums(x, y), ridge, equal_classes=False)
    # theirs is (1 − shrinkage)·S; the priors are the same
    scores = (x @ weight.T + bias - log_prior) / (1 - shrinkage) + log_prior
    expected = torch.from_numpy(theirs.decision_function(x.numpy()))
    assert_close([scores - scores.mean(1, keepdim=True)], [expected - expected.mean(1, keepdim=True)], 1e-8)


def test_what_is_known_of_a_mean_is_what_leaving_out_a_sample_tells():
    x, y = gaussians([40, 40, 40, 8, 8], features=150)
    ridge, scale = 0.3, x.std(0, correction=0)
    z = (x - x.mean(0)) / scale

    def fit(kept):
        means = torch.stack([z[kept][y[kept] == c].mean(0) for c in range(5)])
        rest = z[kept] - means[y[kept]]
        return means, torch.linalg.inv(rest.T @ rest / len(z) + ridge * torch.eye(150).double()), rest

    everything = torch.ones(len(z), dtype=torch.bool)
    means, metric, rest = fit(everything)
    middle = means.mean(0)
    distances = torch.einsum("ci,ij,cj->c", means - middle, metric, means - middle)
    left_out = torch.zeros(5).double()
    for index in range(len(z)):
        kept = everything.clone()
        kept[index] = False
        own, inverse, _ = fit(kept)
        c = int(y[index])
        left_out[c] += (z[index] - middle) @ inverse @ (own[c] - middle) / int((y == c).sum())
    freedom = float((metric @ (rest.T @ rest / len(z))).trace())
    counts = torch.bincount(y).double()
    known = known_shares(counts, distances, freedom)
    share = counts / counts.sum()
    apart = float((share * left_out).sum())
    assert float((known * distances * share).sum()) == pytest.approx(apart, rel=0.25)
    assert known[0] > known[3] + 0.1, "a mean of 40 samples is known better than one of 8"
    assert float(left_out[3:].mean() / distances[3:].mean()) == pytest.approx(float(known[3:].mean()), abs=0.15)


@pytest.mark.parametrize(("features", "apart"), [(30, 0.9), (300, 0.4)])
def test_small_classes_are_not_given_away(features, apart):
    counts = [100] * 6 + [10] * 6
    x, y = gaussians(counts, features, apart)
    test, wanted = gaussians([100] * 12, features, apart, shift=1)
    total, right = sums(x, y), {}
    ridge = 0.3 * total.choose_ridge()
    for name, (weight, bias) in {
        "ridge": total.solve(ridge),
        "equal": total.solve(ridge, equal_classes=True),
        "shrunken": linear_discriminant(total, ridge, shrunken=True),
    }.items():
        hit = ((test @ weight.T + bias).argmax(1) == wanted).double()
        right[name] = float(hit.mean()), float(hit[wanted > 5].mean()), float(hit[wanted < 6].mean())
    overall, small, large = right["shrunken"]
    assert small > right["ridge"][1] + 0.3
    assert small > 0.6 * large
    assert overall > right["ridge"][0] + 0.1
    assert overall > right["equal"][0] - 0.02


def test_where_classes_are_balanced_it_is_no_worse_than_ridge():
    right = {"ridge": 0.0, "shrunken": 0.0}
    for seed in range(4):
        x, y = gaussians([20] * 10, 200, 0.6, seed)
        test, wanted = gaussians([50] * 10, 200, 0.6, seed, shift=1)
        total = sums(x, y)
        ridge = 0.3 * total.choose_ridge()
        found = {"ridge": total.solve(ridge), "shrunken": linear_discriminant(total, ridge, shrunken=True)}
        for name, (weight, bias) in found.items():
            right[name] += float(((test @ weight.T + bias).argmax(1) == wanted).double().mean()) / 4
    assert right["shrunken"] > right["ridge"] - 0.01


def fits(total):
    return [
        nearest_mean(total),
        linear_discriminant(total, 0.1),
        linear_discriminant(total, 0.1, equal_classes=False),
        linear_discriminant(total, 0.1, shrunken=True),
    ]


def test_on_the_scale_of_targets():
    x, y = gaussians(COUNTS, features=6)
    total = sums(x, y).grow(6)
    for fit in fits(total):
        weight, bias = on_targets(total, *fit, 15.0)
        outputs = x @ weight.T + bias
        assert torch.equal(outputs[:, :4].argmax(1), (x @ fit[0].T + fit[1])[:, :4].argmax(1))
        assert torch.allclose(outputs.sum(1), torch.full((len(x),), 15.0).double())
        assert not outputs[:, 4:].any()
        assert int(outputs.argmax(1).max()) < 4, "a class without a sample is never the largest"
        middle = torch.tensor([15 / 4] * 4 + [0, 0]).double()
        losses = [total.loss(g * weight, middle + g * (bias - middle)) for g in (0.99, 1.0, 1.01)]
        assert losses[1] < min(losses[0], losses[2]), "no factor is nearer to the targets"
        assert 0 < fitting_temperature(total, weight, bias, 15.0) < 15


def test_the_scale_of_weights_does_not_matter():
    x, y = gaussians(COUNTS, features=6)
    light = sums(x, y, torch.full((len(x),), 0.01).double())
    for one, other in zip(fits(sums(x, y)), fits(light), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x[:1], y[:1]),
        lambda x, y: (x[y == 1], y[y == 1]),
        lambda x, y: (x[[0, 60, 120, 132]], y[[0, 60, 120, 132]]),
        lambda x, y: (x[::12], y[::12]),
        lambda x, y: (x[::12].repeat(3, 1), y[::12].repeat(3)),
        lambda x, y: (torch.cat([x, torch.ones(len(x), 2).double()], 1), y),
        lambda x, y: (torch.zeros_like(x), y),
        lambda x, y: (torch.cat([x, y[:, None].double()], 1), y),
    ],
)
@pytest.mark.parametrize("ridge", [0.0, 1e-4, 1.0])
def test_little_or_strange_data(make, ridge):
    x, y = make(*gaussians(COUNTS, features=40))
    total = sums(x, y)
    for shrunken in (False, True):
        weight, bias = on_targets(total, *linear_discriminant(total, ridge, shrunken=shrunken), 15.0)
        assert weight.isfinite().all()
        assert bias.isfinite().all()
        seen = set((x @ weight.T + bias).argmax(1).tolist())
        assert seen <= set(y.tolist())


def test_there_must_be_data():
    for make in (nearest_mean, lambda empty: linear_discriminant(empty, 0.1)):
        with pytest.raises(ValueError, match="hold no data"):
            make(RidgeSums.empty(3).grow(2))
    with pytest.raises(ValueError, match="ridge is -1"):
        linear_discriminant(sums(*data()), -1.0)
