"""Closed-form features in bfloat16: other features, and everything else as it was."""

import logging

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.learner import learner as learner_module

X = torch.randn(40, 3, 12, 12, generator=torch.Generator().manual_seed(0))
Y = [i % 4 for i in range(40)]
METHODS = {
    "ridge": {},
    "ranpac": {"random_features": 32},
    "klda": {"random_features": 64},
    "depth": {"depth_features": 120},
}


def network():
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16))


def made(method, **options):
    return Learner(network(), method, device="cpu", **METHODS[method], **options)


def features_of(learner, x):
    with torch.no_grad():
        return learner.model.features(x)


@pytest.mark.parametrize("method", METHODS)
def test_features_are_float32_near_those_in_float32_and_the_same_in_any_batch(method):
    half, full = made(method, bfloat16=True), made(method)
    for learner in (half, full):
        learner.learn((X, Y), progress=False)
    found, expected = features_of(half, X), features_of(full, X)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()
    for size in (1, 7, 16):
        parts = torch.cat([features_of(half, part) for part in X.split(size)])
        assert torch.allclose(parts, found, rtol=0, atol=1e-5 * float(found.abs().max()))
    assert all(t.dtype != torch.bfloat16 for t in half.method.state()[0].values())


@pytest.mark.parametrize("method", METHODS)
def test_task_after_task_is_all_at_once_and_is_saved(method, tmp_path):
    one, two = made(method, bfloat16=True), made(method, bfloat16=True)
    one.learn((X, Y), progress=False)
    two.learn((X[:20], Y[:20]), progress=False)
    two.learn((X[20:], Y[20:]), progress=False)
    outputs = two.outputs(X)
    assert torch.allclose(one.outputs(X), outputs, rtol=0, atol=1e-3 * float(outputs.abs().max()))
    two.save(tmp_path)
    assert torch.equal(Learner.load(tmp_path, network(), device="cpu").outputs(X), outputs)
    plain = two.module(example=X[:3])(X)
    assert torch.allclose(plain, outputs, rtol=0, atol=1e-2 * float(outputs.abs().max()))


def test_moments_are_summed_in_float32():
    """A mean far from zero: the covariance of activations rounded in bfloat16 products would be lost."""
    learner = made("depth", bfloat16=True)
    learner.learn((X, Y), progress=False)
    seen = []
    moments = learner.model.backbone._moments
    learner.model.backbone._moments = lambda *args: seen.append(torch.is_autocast_enabled("cpu")) or moments(*args)
    features_of(learner, X)
    assert seen
    assert not any(seen)


def test_where_it_does_not_apply_it_is_refused():
    with pytest.raises(ValueError, match="not for tangent_features"):
        Learner(network(), "tangent", bfloat16=True)
    with pytest.raises(ValueError, match=r"is for a float32 network; this one has torch\.float64"):
        Learner(network().double(), "ridge", bfloat16=True)
    with pytest.raises(ValueError, match="dlcft has no setting 'bfloat16'"):
        Learner(network(), "dlcft", bfloat16=True)
    one, other = made("ridge", bfloat16=True), made("ridge")
    for learner in (one, other):
        learner.learn((X, Y), progress=False)
    with pytest.raises(ValueError, match="another bfloat16, False in place of True"):
        one.merge(other)


@pytest.mark.parametrize("options", [{"bfloat16": True}, {"amp": True}])
def test_a_processor_without_it_is_told(options, monkeypatch, caplog):
    monkeypatch.setattr(learner_module, "computes_bfloat16", lambda device: False)
    with caplog.at_level(logging.WARNING, "dlcft"):
        made("ridge", **options)
        assert "no instructions for bfloat16" in caplog.text
        caplog.clear()
        made("ridge")
    assert not caplog.text
