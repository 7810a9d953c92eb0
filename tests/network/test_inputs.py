"""Calling a network: memory layout, and other tensors in place of its parameters."""

import copy

import pytest
import torch
from torch import nn

from dlcft import Linearized
from dlcft.network.inputs import AnyLayout, functional_call, use_channels_last
from tests.support.directions import close, directional, set_delta
from tests.support.networks import build, vectors


def is_channels_last(convolution):
    return convolution.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("narrow", "changed"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), False),
        (nn.Conv2d(4, 8, 1, stride=(1, 2)), False),
        (nn.Conv2d(16, 16, 1, stride=2, groups=4), False),
        (nn.Conv2d(8, 8, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1), True),
        (nn.Conv2d(4, 8, 3, stride=2), True),
    ],
)
def test_channels_last_where_it_is_safe(narrow, changed):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3), narrow, nn.Conv3d(2, 3, 3))
    use_channels_last(network)
    assert is_channels_last(network[0]) is is_channels_last(network[1]) is changed


def test_any_layout_runs_a_network_that_flattens_with_view():
    network, x = build("vgg")
    moved = copy.deepcopy(network)
    use_channels_last(moved)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        moved(x)
    with AnyLayout():
        assert close(moved(x), network(x))
        assert x.view(torch.int64).dtype == x.view(dtype=torch.int64).dtype == torch.int64


class SharedModule(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_functional_call_puts_the_parameters_of_a_shared_module_back():
    torch.manual_seed(0)
    network, x = SharedModule().double(), vectors()
    before = dict(network.named_parameters())
    doubled = {name: 2 * p.detach() for name, p in before.items()}
    expected = copy.deepcopy(network)
    expected.load_state_dict(doubled, strict=False)
    assert torch.equal(functional_call(network, doubled, x), expected(x))
    assert torch.equal(functional_call(network, doubled, (), {"x": x}), expected(x))
    assert all(p is before[name] for name, p in network.named_parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional_call(network, doubled, x[:, :2])
    assert all(p is before[name] for name, p in network.named_parameters())


def test_a_shared_module_linearises_again_and_again():
    torch.manual_seed(0)
    network, x = SharedModule().double(), vectors()
    linear = Linearized(network)
    delta = set_delta(linear)
    for _ in range(2):
        assert close(linear.split(x)[1], directional(network, delta, x), 1e-6)
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))
