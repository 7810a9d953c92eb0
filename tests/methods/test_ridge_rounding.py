"""Forgetting and merging in float32, where a sample's features have other last bits in other batches.

The same ridge is chosen, and the same answers are given, as by a learner that never saw what was forgotten.
"""

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.closed_form import sums as module
from dlcft.methods import ridge

METHODS = {
    "ridge": {},
    "ranpac": {"random_features": 300},
    "tangent": {"tangent_features": 200},
    "dlcft-exact": {"depth_features": 300},
}


class Draws:
    """Random choices of one case."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def among(self, *options):
        return options[self.number(0, len(options) - 1)]

    def number(self, least, most):
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def images(self, n):
        return torch.randn(n, 3, 12, 12, generator=self.generator)

    def order(self, n):
        return torch.randperm(n, generator=self.generator)


def network(width):
    torch.manual_seed(width)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(4 * width, width),
    ).eval()


def samples(draws, kept, gone):
    """Noise, or patterns in noise, or smooth patterns; some samples twice, some of them forgotten once."""
    n, classes = kept + gone, draws.number(2, 10)
    y = torch.randint(classes, (n,), generator=draws.generator)
    x, kind = draws.images(n), draws.among("noise", "patterns", "smooth")
    if kind != "noise":
        patterns = draws.images(classes)
        if kind == "smooth":
            patterns, x = (
                nn.functional.interpolate(t[:, :, :s, :s], 12, mode="bilinear") for t, s in ((patterns, 3), (x, 6))
            )
        x = patterns[y] + draws.among(0.1, 0.5, 2.0) * x
    twice = draws.among(0, 0, 1, draws.number(1, kept // 2))
    x[kept - twice : kept], y[kept - twice : kept] = x[:twice].clone(), y[:twice].clone()
    if draws.among(True, False):
        x[kept], y[kept] = x[0], y[0]
    return x, y.tolist()


def part(data, indices):
    return data[0][indices], [data[1][i] for i in indices.tolist()]


def assert_as_if_never_seen(seed):
    draws = Draws(seed)
    backbone, name = network(draws.among(16, 32, 64)), draws.among(*METHODS)
    kept = draws.among(draws.number(4, 30), draws.number(10, 80), draws.number(50, 300))
    gone = draws.among(1, 3, draws.number(1, kept), draws.number(1, 100))
    data, how = samples(draws, kept, gone), draws.among("forget", "merge", "merge and forget")

    def learned(indices):
        size = draws.among(1, 4, 7, 32, 64)
        learner = Learner(backbone, name, device="cpu", batch_size=size, **METHODS[name])
        learner.learn(part(data, indices), progress=False)
        return learner

    never = learned(torch.arange(kept))
    order = draws.order(kept if how == "merge" else kept + gone)
    cut = draws.number(1, len(order) - 1)
    learner = learned(order[:cut])
    if how == "forget":
        learner.learn(part(data, order[cut:]), progress=False)
    else:
        other = learned(order[cut:])
        other.recipe = learner.recipe  # all settings must be the same, the size of batches too
        learner.merge(other)
    if how != "merge":
        for indices in (kept + draws.order(gone)).split(draws.number(1, gone)):
            learner.forget(part(data, indices))
    chosen, expected = (one.method.sums.choose_ridge(scale=one.method.scale) for one in (learner, never))
    assert chosen == expected, (seed, name, how, kept, gone)
    test = torch.cat([data[0][:20], draws.images(30)])
    places = [learner.labels().index(label) for label in never.labels()]
    outputs, wanted = learner.outputs(test)[:, places], never.outputs(test)
    assert float((outputs - wanted).abs().max()) < 0.15, (seed, "of 15")
    clear = wanted.topk(2)[0].diff().abs()[:, 0] > 0.01  # two outputs may be equal
    assert torch.equal(outputs.argmax(1)[clear], wanted.argmax(1)[clear]), (seed, name, how, kept, gone)


@pytest.fixture(params=["eigenvalues", "cholesky"])
def way(request, monkeypatch):
    """Both ways to choose a ridge, and batches as they come."""
    monkeypatch.setattr(ridge, "filled", lambda x, samples: x)
    if request.param == "cholesky":
        monkeypatch.setattr(module, "EIGEN_LIMIT", 100)
        monkeypatch.setattr(module, "_COARSE", 60)


def test_as_if_never_seen(way):
    for seed in range(25):
        assert_as_if_never_seen(seed)


@pytest.mark.slow
def test_as_if_never_seen_in_200_cases(way):
    for seed in range(1000, 1200):
        assert_as_if_never_seen(seed)


def test_a_sample_keeps_its_features_in_any_batch():
    """The same last bits on this machine's kernels; on any, what forgetting leaves is smaller."""
    draws = Draws(0)
    data = draws.images(40), [0, 1] * 20
    found = {}
    for size in (1, 7, 40):
        learner = Learner(network(32), "dlcft-exact", device="cpu", batch_size=size, **METHODS["dlcft-exact"])
        learner.learn(data, progress=False)
        found[size] = learner.method.sums.gram
    for gram in found.values():
        assert (gram - found[40]).abs().max() < 1e-6 * found[40].abs().max()
