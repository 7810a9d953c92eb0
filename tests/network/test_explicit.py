"""Networks as graphs of ordinary operations: the same numbers, at batch sizes that no run had."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlcft import Linearized
from dlcft.network.explicit import NotOneGraph, explicit, sized
from tests.support.networks import NETWORKS, Encoder, build


def assert_same(module, network, x):
    for size in (1, 4, 7):
        batch = sized(x, size)
        batch = batch + 0.1 * torch.randn_like(batch) if batch.is_floating_point() else (batch + size) % 11
        with torch.no_grad():
            torch.testing.assert_close(module(batch), network(batch), rtol=1e-8, atol=1e-10)


SLOW = ("resnet18-imagenet-stem", "resnet18-small-stem", "gru")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NETWORKS]
)
def test_a_linearised_network(name):
    network, x = build(name)
    linear = Linearized(network).eval()
    for p in linear.delta.parameters():
        p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not torch.allclose(linear(x), network(x), rtol=1e-3)  # the change is there to be lost
    module = explicit(linear, x)
    assert_same(module, linear, x)
    assert not any(type(part).__module__.startswith(("dlcft", "tests")) for part in module.modules())
    assert {name.partition(".")[0] for name in module.state_dict()} >= {"base", "delta"}


class Gradient(nn.Module):
    """The gradient of the sum of a network's squares at its input."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(self.network(x).square().sum(), x)[0].flatten(1)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (3, 2), stride=(3, 2), padding=(2, 0), dilation=(1, 2), groups=2),
        nn.Conv2d(4, 4, 5, groups=4, bias=False),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d((2, 3), (3, 2)),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(3),
        nn.GroupNorm(2, 4),
        nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 3, 4, 3), nn.GELU()),
        nn.Sequential(nn.Flatten(2), nn.LayerNorm(99), nn.Softmax(-1), nn.SiLU()),
    ],
    ids=str,
)
def test_gradients_inside_a_network(layer):
    network = Gradient(layer.double().requires_grad_(False))
    x = torch.randn(3, 4, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_same(explicit(network, x), network, x)


def test_texts_of_any_length():
    torch.manual_seed(0)
    network = Encoder().double().eval()
    module = explicit(network, torch.randint(0, 11, (2, 4)), sequences=True)
    for samples, length in ((1, 3), (4, 9), (6, 20)):
        x = torch.randint(0, 11, (samples, length))
        torch.testing.assert_close(module(x), network(x))


def test_inputs_by_name():
    table = torch.randn(11, 5, dtype=torch.float64)

    def network(tokens, scale):
        return F.embedding(tokens, table).mean(1) * scale[:, None]

    x = {"tokens": torch.randint(0, 11, (2, 4)), "scale": torch.rand(2, dtype=torch.float64)}
    module, five = explicit(network, x), sized(x, 5)
    assert torch.equal(module(**five), network(**five))
    assert torch.equal(module(five["tokens"], five["scale"]), network(**five))


def test_numbers_that_depend_on_the_size():
    def network(x):
        last = x[len(x) - 1]  # one less than the size
        return x.flatten().reshape(2 * len(x), -1).repeat(1, 2).reshape(len(x), -1) + last.sum() / len(x)

    x = torch.randn(3, 6)
    assert_same(explicit(network, x), network, x)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (lambda x: x.sin() if len(x) > 4 else x.cos(), "other operations for another batch size"),
        (lambda x: x if len(x) > 4 else x.cos(), "other operations for another batch size"),
        (lambda x: x * (0.1 * len(x)), "other operations for another batch size"),
        (lambda x: x * torch.tensor([[1.0], [2.0]] * len(x))[: len(x)], "other operations for another batch size"),
        (lambda x: x.reshape(-1)[: len(x) * (len(x) - 1) // 2], "other operations for another batch size"),
        (lambda x: x * x.max().item(), "as a Python number"),
    ],
)
def test_networks_that_are_more_than_one_graph(network, words):
    with pytest.raises(NotOneGraph, match=words):
        explicit(network, torch.rand(3, 6))
