"""`Linearized` against finite differences and dense Jacobians, in float64, at delta ≠ 0."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from dlcft import Linearized
from tests.support.directions import Calling, close, directional, jacobian, set_delta
from tests.support.networks import MLP, NETWORKS, Shared, build, vectors


@pytest.mark.parametrize("name", NETWORKS)
def test_value_is_base_plus_jacobian_times_delta(name):
    network, x = build(name)
    linear = Linearized(network)
    assert close(linear(x), network(x), 1e-12)
    delta = set_delta(linear)
    dense = jacobian(network, x)
    expected = network(x) + sum((dense[n].flatten(1) @ delta[n].flatten()) for n in delta).view(linear(x).shape)
    assert close(linear(x), expected)
    assert close(linear(x) - network(x), directional(network, delta, x), 1e-6)
    assert (linear(x) - network(x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_linear_in_delta_and_gradient_is_the_frozen_jacobian(name):
    network, x = build(name)
    linear = Linearized(network).train()
    buffers = copy.deepcopy(dict(linear.base.named_buffers()))
    a, b = set_delta(linear, 1), set_delta(linear, 2, scale=5.0)
    values = []
    for weights in ((1, 0), (0, 1), (2, -3)):
        for n, p in linear.delta.named_parameters():
            p.data = weights[0] * a[n] + weights[1] * b[n]
        values.append(linear(x) - network(x))
    assert close(values[2], 2 * values[0] - 3 * values[1])

    cotangent = torch.randn(linear(x).shape, dtype=torch.float64)
    (linear(x) * cotangent).sum().backward()
    dense = jacobian(network, x)
    for n, p in linear.delta.named_parameters():
        assert close(p.grad.flatten(), cotangent.flatten() @ dense[n].flatten(1)), n
    assert all(p.grad is None and not p.requires_grad for p in linear.base.parameters())
    for n, buffer in linear.base.named_buffers():
        assert torch.equal(buffer, buffers[n]), n
    assert torch.equal(linear(x), linear.eval()(x))


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
DX = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def conv_rule(layer, delta, x, dx):
    stride, padding = layer.stride, layer.padding
    change = nn.functional.conv2d(x, delta["weight"], delta["bias"], stride, padding)
    return change + nn.functional.conv2d(dx, layer.weight, None, stride, padding)


def linear_rule(layer, delta, x, dx):
    return nn.functional.linear(x, delta["weight"], delta["bias"]) + nn.functional.linear(dx, layer.weight)


def max_rule(layer, delta, x, dx):
    _, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
    return dx.flatten(2).gather(2, indices.flatten(2)).view(indices.shape)


APPENDIX_B = {
    "identity": (nn.Identity(), lambda layer, delta, x, dx: dx),
    "linear": (nn.Linear(6, 3), linear_rule),
    "conv": (nn.Conv2d(4, 3, 3, stride=2, padding=1), conv_rule),
    "relu": (nn.ReLU(), lambda layer, delta, x, dx: dx * (x > 0)),
    "leaky-relu, default slope": (
        Calling(F.leaky_relu),
        lambda layer, delta, x, dx: dx * (x > 0) + 0.01 * dx * (x <= 0),
    ),
    "leaky-relu, negative": (
        Calling(lambda x: F.leaky_relu(x, -0.2)),
        lambda layer, delta, x, dx: dx * (x > 0) - 0.2 * dx * (x <= 0),
    ),
    "leaky-relu": (nn.LeakyReLU(0.1), lambda layer, delta, x, dx: dx * (x > 0) + 0.1 * dx * (x <= 0)),
    "max-pool": (nn.MaxPool2d(2), max_rule),
    "average-pool": (nn.AvgPool2d(2), lambda layer, delta, x, dx: nn.functional.avg_pool2d(dx, 2)),
}


class Source(nn.Module):
    """A layer behind an input that is itself a parameter, so that the incoming augmented state is DX."""

    def __init__(self, layer):
        super().__init__()
        self.x, self.layer = nn.Parameter(X.clone()), layer

    def forward(self):
        return self.layer(self.x)


@pytest.mark.parametrize("row", APPENDIX_B)
def test_appendix_b(row):
    layer, rule = APPENDIX_B[row]
    layer = layer.double()
    linear = Linearized(Source(layer))
    set_delta(linear)
    linear.delta.x.data.copy_(DX)
    hidden, augmented = linear.split()
    delta = {n.removeprefix("layer."): p for n, p in linear.delta.named_parameters()}
    assert close(hidden, layer(X), 1e-12)
    assert close(augmented, rule(layer, delta, X, DX), 1e-12)


def test_attention_kernels_are_arranged_and_put_back():
    network, x = build("vit")
    encoder, words = build("transformer-encoder")
    for flash in (True, False):
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.mha.set_fastpath_enabled(flash)
        try:
            Linearized(network)(x), Linearized(encoder)(words)
            with pytest.raises(IndexError):
                Linearized(encoder)(words + 1000)
            assert torch.backends.cuda.flash_sdp_enabled() is flash
            assert torch.backends.mha.get_fastpath_enabled() is flash
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
            torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", ["lstm", "gru", "vit", "transformer-encoder"])
def test_single_precision_kernels_have_forward_mode(name):
    network, x = build(name)
    network = network.float()
    x = x.float() if x.is_floating_point() else x
    linear = Linearized(network)
    delta = set_delta(linear)
    wide = Linearized(network.double())
    for n, p in wide.delta.named_parameters():
        p.data.copy_(delta[n])
    assert close(linear(x).double(), wide(x.double() if x.is_floating_point() else x), 1e-4)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, left, *, right, flip=False):
        y = torch.tanh(self.left(left)) * self.right(right)
        return {"features": -y if flip else y, "pair": (y, 2 * y), "count": torch.tensor(3)}


def test_several_inputs_and_outputs():
    torch.manual_seed(0)
    network, x = TwoInputs().double(), vectors()
    linear = Linearized(network, output="features")
    delta = set_delta(linear)
    change = linear(x, right=x + 1, flip=True) - network(x, right=x + 1, flip=True)["features"]
    assert close(change, directional(network, delta, x, right=x + 1, flip=True, pick=lambda o: o["features"]), 1e-6)
    pair = Linearized(network, output=lambda returned: returned["pair"][1])
    set_delta(pair)
    assert close(
        pair(x, right=x), 2 * Linearized(network, output=lambda r: r["pair"][0])(x, right=x) + pair.split(x, right=x)[1]
    )

    lstm = nn.LSTM(6, 4, batch_first=True).double()
    first = Linearized(lstm, output=0)
    delta = set_delta(first)
    sequence = torch.randn(2, 3, 6, dtype=torch.float64)
    assert close(first.split(sequence)[1], directional(lstm, delta, sequence, pick=lambda o: o[0]), 1e-6)


class Output:
    """An object with attributes, as Hugging Face models return."""

    def __init__(self, pooler_output):
        self.pooler_output = pooler_output


class HuggingFaceLike(MLP):
    def forward(self, x):
        return Output(super().forward(x))


def test_output_by_attribute():
    torch.manual_seed(0)
    network = HuggingFaceLike().double()
    linear = Linearized(network, output="pooler_output")
    assert torch.equal(linear(vectors()), network(vectors()).pooler_output)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned a dict with keys ['features', 'pair', 'count']; say which tensor is meant with output="),
        ("feature", "returned a dict with keys ['features', 'pair', 'count'], which has no output 'feature'"),
        ("pair", "returned a tuple of 2; say which tensor"),
        ("count", "dtype torch.int64; a floating-point tensor is needed"),
    ],
)
def test_wrong_output_is_named(output, message):
    linear = Linearized(TwoInputs().double(), output=output)
    with pytest.raises(ValueError, match=re.escape(message)):
        linear(vectors(), right=vectors())


def test_shared_parameters_are_one():
    network, _ = build("shared")
    names = [n for n, _ in Linearized(network).delta.named_parameters()]
    assert names == ["first.weight", "first.bias", "second.bias"]
    assert isinstance(network, Shared)


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ("4", ["4.weight", "4.bias"]),
        (["0.bias", "4"], ["0.bias", "4.weight", "4.bias"]),
        ("*.bias", ["0.bias", "2.bias", "4.bias"]),
        (lambda name: name.startswith("2"), ["2.weight", "2.bias"]),
    ],
)
def test_subset_of_parameters(chosen, kept):
    network, x = build("mlp")
    linear = Linearized(network, train=chosen)
    assert [n for n, _ in linear.delta.named_parameters()] == kept
    delta = set_delta(linear)
    assert close(linear.split(x)[1], directional(network, delta, x), 1e-6)
    linear(x).sum().backward()
    assert all(p.grad is not None for p in linear.delta.parameters())


class CountConvolutions(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func is torch.ops.aten.convolution.default
        self.backward += func is torch.ops.aten.convolution_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("chosen", "forward", "backward"),
    [(None, 59, 20), ("layer4", 20 + 2 * 5 - 2, 5), ("layer4.1.conv2", 21, 1)],
)
def test_frozen_layers_cost_one_forward_pass(chosen, forward, backward):
    """ResNet-18 has 20 convolutions; a trainable one costs two more, one where no tangent arrives."""
    network, x = build("resnet18-small-stem")
    linear = Linearized(network, train=chosen if chosen is None else lambda n: n.startswith(chosen) and "bn" not in n)
    if chosen is None:
        linear = Linearized(network, train=lambda n: "conv" in n or "downsample.0" in n)
    linear(x)  # the first call decides about in-place activations
    with CountConvolutions() as count:
        linear(x).sum().backward()
    assert (count.forward, count.backward) == (forward, backward)


def test_state_dict_round_trip_deepcopy_and_dtype():
    network, x = build("resnet18-small-stem")
    linear = Linearized(network, train="layer4")
    set_delta(linear)
    other = Linearized(
        copy.deepcopy(network).apply(lambda m: [p.data.zero_() for p in m.parameters(False)]), train="layer4"
    )
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other(x), linear(x))
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))
    assert close(linear.float()(x.float()).double(), other(x), 1e-3)
    meta = copy.deepcopy(linear).to("meta")
    assert meta(x.float().to("meta")).device.type == "meta"


def test_autocast():
    network, x = build("resnet18-small-stem")
    linear = Linearized(network.float())
    set_delta(linear, scale=0.02)
    exact = linear(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        rough = linear(x.float())
    rough.float().sum().backward()
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).abs().max() < 0.05 * exact.abs().max()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in linear.delta.parameters())


def test_inference_mode_and_function_transforms():
    network, x = build("mlp")
    linear = Linearized(network)
    set_delta(linear)
    with torch.inference_mode():
        inferred = linear(x)
    assert torch.equal(inferred, linear(x))
    names = dict(linear.named_parameters())

    def loss(parameters, sample):
        return functional_call(linear, parameters, (sample[None],)).square().sum()

    trainable = {n: p.detach() for n, p in names.items() if p.requires_grad}
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(trainable, x)
    linear(x).square().sum().backward()
    for n, gradient in per_sample.items():
        assert close(gradient.sum(0), names[n].grad)


def test_the_callers_network_is_left_alone():
    network, x = build("resnet18-small-stem")
    network.train()
    before = copy.deepcopy(network.state_dict())
    Linearized(network)(x)
    assert network.training
    assert all(p.requires_grad for p in network.parameters())
    assert all(torch.equal(network.state_dict()[n], before[n]) for n in before)


class ReadsAgain(nn.Module):
    """Reads a tensor again that an activation has changed in place."""

    def __init__(self, activation):
        super().__init__()
        self.a, self.b, self.activation = nn.Linear(4, 5), nn.Linear(5, 5), activation

    def forward(self, x):
        h = self.a(x)
        return self.b(self.activation(h)) + h


def rectified(h):
    return F.relu(h, inplace=True)


def leaky(h):
    return F.leaky_relu(h, 0.1, True)


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), rectified, leaky])
def test_an_activation_in_place_changes_its_input(activation):
    torch.manual_seed(0)
    network, x = ReadsAgain(activation).double(), torch.randn(6, 4, dtype=torch.float64)
    linear = Linearized(network)
    assert torch.equal(linear(x), network(x))
    delta = set_delta(linear)
    assert close(linear(x) - network(x), directional(network, delta, x), 1e-6)
    linear(x).sum().backward()
    dense = jacobian(network, x)
    for name, p in linear.delta.named_parameters():
        assert close(p.grad.flatten(), dense[name].flatten(1).sum(0))


class StandardisedWeights(nn.Conv2d):
    """Normalises its weight by batch_norm in training mode, as NFNets do."""

    def forward(self, x):
        flat = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0).reshape_as(self.weight)
        return F.conv2d(input=x, weight=weight, bias=self.bias)


def test_a_weight_that_is_normalised():
    torch.manual_seed(0)
    network = nn.Sequential(StandardisedWeights(2, 3, 3), nn.ReLU(), nn.Flatten()).double()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    linear = Linearized(network)
    delta = set_delta(linear)
    assert close(linear(x) - network(x), directional(network, delta, x), 1e-6)
