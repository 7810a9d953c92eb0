"""Networks and arguments that `Linearized` refuses, each in one sentence."""

import pytest
import torch
from torch import nn

from dlcft import Linearized
from tests.support.directions import Calling, close, directional, set_delta
from tests.support.networks import MLP, ViT, build, vectors


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class DoublingWithRule(Doubling):
    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


def inside(module):
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), module), nn.Linear(6, 2)).double()


def test_the_module_without_a_derivative_is_named():
    x = vectors()
    with pytest.raises(ValueError, match=r"cannot linearise '1\.1' \(Calling\): .*jvp"):
        Linearized(inside(Calling(Doubling.apply)))(x)
    with pytest.raises(ValueError, match=r"cannot linearise '1\.1' \(Branch\): it calls \.item\(\)"):
        Linearized(inside(Branch()))(x)
    with pytest.raises(ValueError, match=r"cannot linearise '1\.1' \(Calling\): it calls \.tolist\(\)"):
        Linearized(inside(Calling(lambda x: x * x.tolist()[0][0])))(x)
    norm = inside(nn.BatchNorm1d(6))
    linear = Linearized(norm)
    linear.base.train()
    with pytest.raises(ValueError, match=r"'1\.1' \(BatchNorm1d\) is in training mode"):
        linear(x)
    with pytest.raises(ValueError, match=r"'1\.1' \(BatchNorm1d\) has no running statistics"):
        Linearized(inside(nn.BatchNorm1d(6, track_running_stats=False)))


def test_a_custom_function_with_a_forward_mode_rule_works():
    network = inside(Calling(DoublingWithRule.apply))
    linear = Linearized(network)
    delta = set_delta(linear)
    assert close(linear.split(vectors())[1], directional(network, delta, vectors()), 1e-6)


def test_a_branch_that_leads_nowhere_trainable_is_fine():
    """.item() on a value without a tangent loses nothing."""
    network = inside(Branch())
    linear = Linearized(network, train="2")
    assert torch.equal(linear(vectors()), network(vectors()))


def test_errors_of_the_network_itself_are_passed_on():
    network, _ = build("mlp")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linearized(network)(torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("mlp",), TypeError, "takes an nn.Module, not str"),
        ((MLP(), "5"), ValueError, "no parameter is named or lies under '5'"),
        ((ViT(), "attentoin"), ValueError, "Did you mean 'attention'"),
        ((MLP(), lambda name: False), ValueError, "no parameter is trainable"),
        ((MLP(), []), ValueError, "no parameter is trainable"),
        ((nn.ReLU(), None), ValueError, "no parameter is trainable: the network has 0"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    module, *train = arguments
    with pytest.raises(error, match=message):
        Linearized(module, train=train[0] if train else None)


def test_parameters_that_do_not_reach_the_output():
    network = nn.ModuleDict({"used": MLP(), "unused": MLP()}).double()
    network.forward = lambda x: network["used"](x)
    with pytest.raises(ValueError, match=r"no trainable parameter reaches the output: unused\.0\.weight"):
        Linearized(network, train="unused")(vectors())
