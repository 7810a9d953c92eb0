"""Figures of merit against their definitions."""

import math

import pytest
import torch

from dlcft.bench.metrics import backward_transfer, forgetting, largest_eigenvalue, nearest_neighbours
from dlcft.curvature.estimate import estimate
from dlcft.curvature.losses import CrossEntropy, ScaledMSE
from dlcft.network.classifier import Classifier
from dlcft.network.linearize import Linearized
from tests.support.networks import build

MATRIX = torch.tensor([[0.9, math.nan, math.nan], [0.5, 0.8, math.nan], [0.6, 0.7, 0.4]], dtype=torch.float64)


def test_definitions():
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.7 - 0.8)) / 2)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.7)) / 2)


def test_one_task():
    one = torch.tensor([[0.7]])
    assert (backward_transfer(one), forgetting(one)) == (0, 0)


def test_nearest_neighbours_against_brute_force():
    torch.manual_seed(0)
    features, labels = torch.randn(50, 6, dtype=torch.float64), torch.randint(0, 4, (50,))
    queries = torch.randn(23, 6, dtype=torch.float64)
    found = nearest_neighbours(features, labels, queries, k=7, chunk=10)
    for query, label in zip(queries, found, strict=True):
        near = torch.cosine_similarity(query[None], features).topk(7)
        votes = torch.bincount(labels[near.indices], minlength=4)
        winners = (votes == votes.max()).nonzero()[:, 0]
        assert label in winners
        if len(winners) > 1:
            nearness = [float(near.values[labels[near.indices] == winner].sum()) for winner in winners]
            assert label == winners[int(torch.tensor(nearness).argmax())]
    assert torch.equal(nearest_neighbours(features, labels, features, k=1), labels)
    with pytest.raises(ValueError, match="k is 51"):
        nearest_neighbours(features, labels, queries, k=51)


def classifier(name, linear):
    """A classifier with 3 outputs on a network of the tests, its parameters away from zero, and batches for it."""
    network, x = build(name)
    backbone = Linearized(network) if linear else network
    model = Classifier(backbone, network(x).shape[1])
    model.add_head("main", 3)
    generator = torch.Generator().manual_seed(3)
    for p in [*model.params("main").values()] if linear else model.head("main").parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    y = torch.arange(len(x)) % 3
    return model.eval(), [(x[:2], y[:2]), (x[2:], y[2:])]


def dense(model, batches, loss):
    (block,) = estimate("dense", model, batches, loss, "main", draws=None).curvature.blocks.values()
    return block.names, next(iter(block.tensors().values()))


@pytest.mark.parametrize("loss", [ScaledMSE(15.0), CrossEntropy()])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", ["mlp", "vgg", "vit"])
def test_power_iteration_is_that_with_the_dense_matrix(name, linear, loss):
    model, batches = classifier(name, linear)
    names, matrix = dense(model, batches, loss)
    generator = torch.Generator().manual_seed(0)
    start = {key: torch.randn(p.shape, generator=generator).double() for key, p in model.params("main").items()}
    vector = torch.cat([start[key].flatten() for key in names])
    for _ in range(4):
        direction = vector / vector.norm()
        vector = matrix @ direction
    generator.manual_seed(0)
    found = largest_eigenvalue(model, iter(batches), loss, "main", iterations=4, generator=generator)
    assert found == pytest.approx(float(direction @ vector), rel=1e-9)
    assert 0 < found <= float(torch.linalg.eigvalsh(matrix)[-1])


def test_largest_eigenvalue():
    model, batches = classifier("mlp", linear=True)
    expected = float(torch.linalg.eigvalsh(dense(model, batches, CrossEntropy())[1])[-1])
    generator = torch.Generator().manual_seed(0)
    found = largest_eigenvalue(model, batches, CrossEntropy(), "main", iterations=60, generator=generator)
    assert found == pytest.approx(expected, rel=1e-9)


def test_largest_eigenvalue_leaves_the_model_as_it_was():
    model, batches = classifier("vgg", linear=False)
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        largest_eigenvalue(model, batches, CrossEntropy(), "main", iterations=2, generator=torch.Generator())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
