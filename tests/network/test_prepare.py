"""Folded BatchNorms keep the outputs; activations are replaced."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlcft import fold_batchnorm, relu_to_leaky
from dlcft.network.classifier import evaluating
from dlcft.network.prepare import FrozenAffine
from tests.support.networks import MLP, CachedBias, SqueezeExcite, build, images, randomize_norms, vectors


class Untraceable(nn.Module):
    """Control flow on a value stops the tracer; the blocks inside can still be folded."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.late = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.block(x)
        return self.late(y).mean((2, 3)) if y.sum() > -1e9 else y


class Reused(nn.Module):
    """A convolution with a BatchNorm that is called twice, once without it: it must not be folded."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)) + self.conv(torch.tanh(x))


FOLDED = {
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2, groups=1), nn.BatchNorm2d(4)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False), nn.BatchNorm1d(4)),
    "grouped": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3, bias=False), nn.BatchNorm2d(6, affine=False)),
    "untraceable": Untraceable,
    "reused": Reused,
    "alone": lambda: nn.BatchNorm2d(3),
}


def check_folded(network, x):
    folded = fold_batchnorm(network)
    expected = network(x)
    assert (folded(x) - expected).abs().max() <= 1e-10 * max(1, expected.abs().max())
    assert not any(isinstance(m, _BatchNorm) for m in folded.modules())
    return folded


@pytest.mark.parametrize("name", ["resnet18-imagenet-stem", "resnet18-small-stem", "vgg", "mobilenet"])
def test_folding_keeps_outputs_and_merges_everything(name):
    network, x = build(name)
    before = copy.deepcopy(network.state_dict())
    folded = check_folded(network, x)
    assert not any(isinstance(m, FrozenAffine) for m in folded.modules())
    assert all(torch.equal(network.state_dict()[n], before[n]) for n in before)
    assert {n for n, _ in folded.named_parameters() if n.endswith("weight")} <= set(before)


@pytest.mark.parametrize(
    ("name", "affine"),
    [("transposed", 0), ("linear", 0), ("grouped", 0), ("untraceable", 1), ("reused", 1), ("alone", 1)],
)
def test_folding_special_cases(name, affine):
    torch.manual_seed(0)
    network = randomize_norms(FOLDED[name]()).double().eval()
    folded = check_folded(network, images())
    assert sum(isinstance(m, FrozenAffine) for m in folded.modules()) == affine


def test_folded_layers_are_trainable_if_they_were():
    """A bias that folding creates learns like the layer that it belongs to."""
    network, _ = build("resnet18-small-stem")
    assert all(p.requires_grad for p in fold_batchnorm(network).parameters())
    assert not any(p.requires_grad for p in fold_batchnorm(network.requires_grad_(False)).parameters())


def test_a_norm_without_a_convolution_becomes_a_frozen_affine_map():
    network, x = build("pre-activation")
    folded = check_folded(network, x)
    assert [n for n, m in folded.named_modules() if isinstance(m, FrozenAffine)] == ["bn0", "bn1", "bn2"]
    assert not any("bn" in n for n, _ in folded.named_parameters())


def test_folding_keeps_the_mode_and_needs_statistics():
    network, x = build("vgg")
    folded = fold_batchnorm(network.train())
    assert folded.training
    assert network.training
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\) has no running statistics"):
        fold_batchnorm(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)))
    assert (folded.eval()(x) - network.eval()(x)).abs().max() < 1e-10


def test_relu_to_leaky():
    network, x = build("resnet18-imagenet-stem")
    leaky = relu_to_leaky(network, 0.2)
    assert not any(isinstance(m, nn.ReLU) for m in leaky.modules())
    assert {m.negative_slope for m in leaky.modules() if isinstance(m, nn.LeakyReLU)} == {0.2}
    assert any(isinstance(m, nn.ReLU) for m in network.modules())
    assert torch.equal(relu_to_leaky(network, 0.0)(x), network(x))
    assert leaky.state_dict().keys() == network.state_dict().keys()


def test_relu_to_leaky_replaces_a_shared_activation():
    relu = nn.ReLU()
    leaky = relu_to_leaky(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu), 0.1)
    assert [type(m) for m in leaky] == [nn.Linear, nn.LeakyReLU, nn.Linear, nn.LeakyReLU]
    assert isinstance(relu_to_leaky(relu, 0.3), nn.LeakyReLU)


@pytest.mark.parametrize(
    ("network", "slope", "message"),
    [
        (MLP(), 1.0, "slope is 1.0; it must be at least 0 and less than 1"),
        (nn.Linear(2, 2), 0.1, "Linear contains no nn.ReLU"),
        (nn.Sequential(SqueezeExcite(4), nn.ReLU()), 0.1, "calls relu as a function"),
    ],
)
def test_relu_to_leaky_refuses(network, slope, message):
    with pytest.raises(ValueError, match=message):
        relu_to_leaky(network, slope)


class NormAndActivation(nn.BatchNorm2d):
    """As other libraries have it: one module that normalises and activates."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize("merged", [True, False])
def test_the_activation_in_a_batchnorm_of_another_class_stays(merged):
    torch.manual_seed(0)
    norm = NormAndActivation(3)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    between = [] if merged else [nn.MaxPool2d(2)]
    network = nn.Sequential(nn.Conv2d(2, 3, 3), *between, norm, nn.Flatten()).double().eval()
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    folded = fold_batchnorm(network)
    assert torch.allclose(folded(x), network(x))
    assert not any(p.shape == (3,) for name, p in folded.named_parameters() if not name.startswith("0."))
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert torch.allclose(fold_batchnorm(norm)(images), norm(images))


@pytest.mark.parametrize("training", [True, False])
def test_a_network_with_a_cache_is_differentiated_again_and_again(training):
    torch.manual_seed(0)
    network, x = CachedBias().double().train(training), vectors()
    network(x)
    for _ in range(2):
        with evaluating(network):
            (gradient,) = torch.autograd.grad(network(x).sum(), network.bias)
        assert torch.allclose(gradient, 2 * network.bias * 3 * network.layer.weight.sum(0))
        with torch.no_grad():
            network.bias += 1
    assert network.training is training
