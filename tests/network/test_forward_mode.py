"""Single operations in forward mode against finite differences, in float64, and the gradient of the change."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from dlcft import Linearized
from tests.support.directions import Calling, close, directional, set_delta
from tests.support.networks import CachedBias, images, tokens, vectors

GRID = 0.8 * torch.rand(3, 4, 4, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def behind(*modules):
    """Modules behind a convolution, whose output is channels_last."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *modules)


NETWORKS = {
    "group norm": (lambda: behind(nn.GroupNorm(2, 4)), images),
    "group norm without affine map": (lambda: behind(nn.GroupNorm(4, 4, affine=False)), images),
    "group norm as a function": (lambda: behind(Calling(lambda x: torch.group_norm(x, 2))), images),
    "group norm, permuted": (lambda: behind(Calling(lambda x: x.transpose(1, 2)), nn.GroupNorm(2, 8)), images),
    "group norm between": (lambda: behind(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3)), images),
    "instance norm": (lambda: behind(nn.InstanceNorm2d(4, affine=True)), images),
    "instance norm, permuted": (lambda: behind(Calling(lambda x: x.mT), nn.InstanceNorm2d(4)), images),
    "layer norm": (lambda: behind(nn.LayerNorm((4, 8, 8))), images),
    "layer norm, permuted": (lambda: behind(Calling(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(4)), images),
    "layer norm, transposed": (lambda: behind(Calling(lambda x: x.transpose(1, 3)), nn.LayerNorm((8, 4))), images),
    "hard sigmoid": (lambda: behind(nn.Hardsigmoid()), images),
    "hard sigmoid in place": (lambda: behind(Calling(lambda x: F.hardsigmoid(4 * x, inplace=True))), images),
    "glu": (lambda: behind(nn.GLU(1)), images),
    "cdist": (lambda: nn.Sequential(nn.Linear(6, 5), Calling(lambda x: torch.cdist(x, x.tanh() + 1))), vectors),
    "grid sample": (lambda: behind(Calling(lambda x: F.grid_sample(x, GRID, align_corners=False))), images),
    "normalize": (lambda: behind(Calling(lambda x: F.normalize(x, dim=1))), images),
    "normalize, p=3": (lambda: behind(Calling(lambda x: F.normalize(x, 3, -1))), images),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2)), vectors),
    "weight norm of a convolution": (lambda: weight_norm(nn.Conv2d(3, 4, 3), dim=1), images),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 5), nn.Tanh(), nn.Linear(5, 2)), tokens),
    "embedding bag, sum": (lambda: nn.EmbeddingBag(11, 5, mode="sum"), tokens),
    "view and view_as": (
        lambda: behind(Calling(lambda x: (x.view(3, -1).view_as(x) ** 2).view(size=(3, 256)))),
        images,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_change_and_its_gradient(name):
    make, batch = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make().double().eval(), batch()
    linear = Linearized(network)
    delta = set_delta(linear)
    value, change = linear.split(x)
    assert close(value, network(x), 1e-12)
    assert close(change, directional(network, delta, x), 1e-6)
    assert change.abs().max() > 1e-3
    cotangent = torch.randn_like(change)
    grads = torch.autograd.grad(change, list(linear.delta.parameters()), cotangent)
    along = sum((grad * d).sum() for grad, d in zip(grads, delta.values(), strict=True))
    assert close(along, (change * cotangent).sum())


def test_normalised_zeros_have_a_finite_gradient():
    """Padding is zero, and a network may normalise it; its derivative is that of x / eps."""
    network = nn.Sequential(nn.Linear(6, 5, bias=False), Calling(lambda x: F.normalize(x, dim=-1))).double()
    linear = Linearized(network)
    delta = set_delta(linear)
    x = torch.cat([vectors(), torch.zeros(2, 6, dtype=torch.float64)])
    assert close(linear.split(x)[1], directional(network, delta, x), 1e-6)
    linear(x).square().sum().backward()
    assert linear.delta.get_parameter("0.weight").grad.isfinite().all()


def test_operations_without_a_rule_are_refused_with_the_name_of_their_module():
    moving = behind(Calling(lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False))).double()
    with pytest.raises(ValueError, match=r"cannot linearise '1' \(Calling\): .*grid_sampler_2d"):
        Linearized(moving)(images())
    bag = nn.Sequential(nn.EmbeddingBag(11, 5, mode="max")).double()
    with pytest.raises(ValueError, match=r"cannot linearise '0' \(EmbeddingBag\): embedding_bag with mode='max'"):
        Linearized(bag)(tokens())


def test_a_cached_function_of_parameters_is_computed_again():
    torch.manual_seed(0)
    network, x = CachedBias().double().eval(), vectors()
    linear = Linearized(network).train()
    delta = set_delta(linear)
    linear.value(x)
    assert close(linear.split(x)[1], directional(network, delta, x), 1e-6)
    for _ in range(2):
        linear(x).sum().backward()
    assert linear.delta.bias.grad is not None
    network(x)
    assert list(network.bias_cache) == ["cpu"], "the caller's network is as it was"
