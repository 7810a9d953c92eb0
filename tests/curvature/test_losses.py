"""Losses: values by definition, output gradients against the Hessian."""

import pytest
import torch

from dlcft.curvature.losses import LOSSES, CrossEntropy, ScaledMSE

OUTPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([1, 0, 3])


def hessian(loss, n):
    return torch.func.hessian(lambda f: loss.value(f[None], LABELS[n : n + 1]))(OUTPUTS[n])


@pytest.mark.parametrize("name", LOSSES)
def test_exact_output_grads_give_the_hessian(name):
    loss = LOSSES[name]()
    vectors = loss.output_grads(OUTPUTS, None, None)
    for n in range(3):
        assert torch.allclose(vectors[:, n].T @ vectors[:, n], hessian(loss, n), atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_sampled_output_grads_are_unbiased_and_reproducible(name):
    loss = LOSSES[name]()
    vectors = loss.output_grads(OUTPUTS, 40_000, torch.Generator().manual_seed(1))
    for n in range(3):
        assert torch.allclose(vectors[:, n].T @ vectors[:, n], hessian(loss, n), atol=0.03)
    again = loss.output_grads(OUTPUTS, 40_000, torch.Generator().manual_seed(1))
    assert torch.equal(vectors, again)


def test_values():
    targets = 15 * torch.nn.functional.one_hot(LABELS, 4)
    assert torch.isclose(ScaledMSE().value(OUTPUTS, LABELS), 0.5 * (targets - OUTPUTS).square().sum(1).mean())
    assert torch.isclose(CrossEntropy().value(OUTPUTS, LABELS), torch.nn.functional.cross_entropy(OUTPUTS, LABELS))
    assert ScaledMSE().is_quadratic
    assert not CrossEntropy().is_quadratic


def test_draws_must_be_positive():
    with pytest.raises(ValueError, match="draws is 0; it must be at least 1, or None"):
        ScaledMSE().output_grads(OUTPUTS, 0, None)
