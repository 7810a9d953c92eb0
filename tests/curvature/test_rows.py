"""Layers without rows by sample are found, and get diagonal blocks."""

import pytest
import torch
from torch import nn

from dlcft import Classifier, ScaledMSE, estimate
from dlcft.closed_form.features import TangentFeatures
from tests.support.networks import Windows


@pytest.mark.parametrize("name", ["diagonal", "kfac", "exact-tk"])
def test_tokens_folded_into_the_batch_are_not_taken_for_samples(name):
    """Their layer gets the exact per-sample diagonal instead of factors with the wrong counts."""
    torch.manual_seed(0)
    model = Classifier(Windows().double(), 3)
    model.add_head("h", 2)
    torch.nn.init.normal_(model.head("h").weight)
    batches = [(torch.randn(4, 7, 5, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))]
    found = estimate(name, model, batches, ScaledMSE(), "h", draws=None).curvature
    dense = estimate("dense", model, batches, ScaledMSE(), "h", draws=None).curvature
    delta = {n: torch.zeros_like(p) for n, p in model.params("h").items()}
    delta["backbone.inner.weight"][1, 2] = 1.0
    assert float(found.quad(delta)) == pytest.approx(float(dense.quad(delta)), rel=1e-9)


class PadsItself(nn.Conv2d):
    """As layers of other libraries do: a convolution that pads its input first."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


@pytest.mark.parametrize("name", ["diagonal", "kfac", "exact-tk"])
def test_a_layer_with_a_forward_of_its_own_is_not_taken_for_a_plain_one(name):
    torch.manual_seed(0)
    network = nn.Sequential(PadsItself(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten()).double()
    model = Classifier(network, 12)
    model.add_head("h", 2)
    torch.nn.init.normal_(model.head("h").weight)
    batches = [(torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))]
    found = estimate(name, model, batches, ScaledMSE(), "h", draws=None).curvature
    dense = estimate("dense", model, batches, ScaledMSE(), "h", draws=None).curvature
    delta = {n: torch.zeros_like(p) for n, p in model.params("h").items()}
    delta["backbone.0.weight"][1, 0, 2, 2] = 1.0
    assert float(found.quad(delta)) == pytest.approx(float(dense.quad(delta)), rel=1e-9)
    features = TangentFeatures(network.float(), torch.ones(1, 12), features=30)
    assert features(batches[0][0].float()).shape == (4, 12 + features.length)
