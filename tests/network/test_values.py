"""Kept values: the same outputs and gradients as without them, and nothing below the first trainable layer is run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlcft import Linearized
from dlcft.network.values import NotKept, Values

SAMPLES = 7


class Residual(nn.Module):
    """A stem, a block with a shortcut around it, functional activations; 4 features."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = F.leaky_relu(self.stem(x), 0.1)
        y = F.leaky_relu(self.first(x), 0.1)
        return self.last(F.leaky_relu(self.second(y) + x, 0.1).mean((2, 3)))


def linearised(network, train=None, dtype=torch.float64):
    torch.manual_seed(0)
    linear = Linearized(network.to(dtype), train=train)
    with torch.no_grad():
        for p in linear.delta.parameters():
            p.normal_()
    return linear


def images(dtype=torch.float64):
    return torch.randn(SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def outputs_and_gradients(linear, x):
    linear.zero_grad()
    out = linear(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in linear.delta.parameters())]


NETWORKS = {
    "residual": Residual,
    "in place": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 4), nn.ReLU(inplace=True), nn.Flatten()
    ),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.GELU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4)
    ),
    "tokens": lambda: nn.Sequential(
        nn.Flatten(2), nn.Linear(36, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_are_the_same_with_kept_values(name):
    torch.manual_seed(2)
    linear, x = linearised(NETWORKS[name]()), images()
    values = Values(linear, x.split(3), SAMPLES, 1e9)
    indices = torch.tensor([5, 0, 3, 2])
    batch = x[indices]
    expected = outputs_and_gradients(linear, batch)
    with values.recalled(batch, indices):
        found = outputs_and_gradients(linear, batch)
        again = outputs_and_gradients(linear, batch)
    for a, b, c in zip(expected, found, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert torch.equal(b, c)


def test_values_hold_for_every_delta():
    linear, x = linearised(Residual()), images()
    values = Values(linear, [x], SAMPLES, 1e9)
    with torch.no_grad():
        for p in linear.delta.parameters():
            p.normal_()
    indices = torch.arange(SAMPLES)
    expected = linear(x)
    with values.recalled(x, indices):
        torch.testing.assert_close(linear(x), expected, rtol=1e-12, atol=1e-12)


def test_only_the_batch_itself_is_recalled():
    linear, x = linearised(Residual()), images()
    values = Values(linear, [x], SAMPLES, 1e9)
    other = x[:2] + 1
    expected = linear(other)
    with values.recalled(x[:2], torch.arange(2)):
        assert torch.equal(linear(other), expected)
    assert torch.equal(linear(x[:2]), linear(x[:2].clone()))


def test_layers_below_the_first_trainable_one_are_not_kept():
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
    )
    linear, x = linearised(network, train="4"), images()
    values = Values(linear, [x], SAMPLES, 1e9)
    assert values.bytes == SAMPLES * 8 * (8 * 2 * 2 + 4)  # the last layer's input and its value
    unseen = torch.full_like(x, float("nan"))  # the input is not looked at
    expected = linear(x)
    with values.recalled(unseen, torch.arange(SAMPLES)):
        torch.testing.assert_close(linear(unseen), expected, rtol=1e-12, atol=1e-12)


def test_a_shortcut_around_the_first_trainable_layer_keeps_what_it_carries():
    linear, x = linearised(Residual(), train=["second", "last"]), images()
    values = Values(linear, [x], SAMPLES, 1e9)
    indices = torch.arange(SAMPLES)
    expected = outputs_and_gradients(linear, x)
    with values.recalled(x, indices):
        for a, b in zip(expected, outputs_and_gradients(linear, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_float32_in_the_layout_that_convolutions_prefer():
    linear, x = linearised(Residual(), dtype=torch.float32), images(torch.float32)
    x = x.contiguous(memory_format=torch.channels_last)
    values = Values(linear, x.split(4), SAMPLES, 1e9)
    indices = torch.tensor([6, 1, 2, 4])
    batch = x[indices]
    expected = outputs_and_gradients(linear, batch)
    with values.recalled(batch, indices):
        for a, b in zip(expected, outputs_and_gradients(linear, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_more_than_the_bound_is_not_kept():
    with pytest.raises(NotKept, match=r"GB are allowed"):
        Values(linearised(Residual()), [images()], SAMPLES, 100)


def test_several_inputs_are_not_kept():
    x = images()
    with pytest.raises(NotKept, match="more than one tensor"):
        Values(linearised(Residual()), [(x, x)], SAMPLES, 1e9)
