"""Figures of merit against their definitions."""

import math

import pytest
import torch

from dlcft.metrics import average_accuracy, backward_transfer, forgetting, nearest_neighbours, recovered

MATRIX = torch.tensor([[0.9, math.nan, math.nan], [0.5, 0.8, math.nan], [0.6, 0.7, 0.4]], dtype=torch.float64)


def test_definitions():
    assert average_accuracy(MATRIX) == pytest.approx((0.6 + 0.7 + 0.4) / 3)
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.7 - 0.8)) / 2)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.7)) / 2)
    assert recovered(0.8, 0.6, 1.0) == pytest.approx(0.5)
    assert math.isnan(recovered(0.8, 0.6, 0.6))


def test_one_task():
    one = torch.tensor([[0.7]])
    assert (average_accuracy(one), backward_transfer(one), forgetting(one)) == (pytest.approx(0.7), 0, 0)


@pytest.mark.parametrize("matrix", [torch.zeros(2, 3), torch.zeros(3), torch.zeros(0, 0)])
def test_other_shapes_are_refused(matrix):
    with pytest.raises(ValueError, match="tasks × tasks"):
        average_accuracy(matrix)


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
