"""The memory: quadratic losses are remembered exactly."""

import json
import sys

import pytest
import torch

from dlcft import CrossEntropy, ScaledMSE
from dlcft.curvature.blocks import Dense
from dlcft.curvature.form import Curvature
from dlcft.curvature.memory import Memory
from tests.support.brute_force import build, run
from tests.support.own_block import Isotropic, IsotropicStatistics


class Quadratic:
    """A loss ½ (θ−m)ᵀH(θ−m) on two parameters."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        self.hessian, self.minimum = root @ root.T, torch.randn(5, generator=generator, dtype=torch.float64)

    def __call__(self, params):
        d = torch.cat([params["w"], params["b"]]) - self.minimum
        return 0.5 * d @ self.hessian @ d

    def curvature(self):
        return Curvature({"all": Dense(("w", "b"), ((3,), (2,)), True, self.hessian)})

    def gradient(self, params):
        return torch.func.grad(self)(params)


def point(seed):
    vector = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"w": vector[:3], "b": vector[3:]}


def learned(weights=(1, 1, 1), first_order=True):
    """A memory of three quadratic losses, absorbed at three points that are minima of nothing."""
    losses = [Quadratic(seed) for seed in range(3)]
    memory = None
    for t, loss in enumerate(losses):
        gradient = loss.gradient(point(10 + t)) if first_order else None
        arguments = (point(10 + t), loss.curvature(), weights[t], gradient)
        memory = Memory.of(*arguments) if memory is None else memory.absorb(*arguments)
    return losses, memory


@pytest.mark.parametrize("weights", [(1, 1, 1), (100, 7, 50)])
def test_with_the_gradient_the_mean_loss_is_remembered_exactly(weights):
    losses, memory = learned(weights)

    def mean(params):
        return sum(w * loss(params) for w, loss in zip(weights, losses, strict=True)) / sum(weights)

    assert memory.weight == sum(weights)
    for seed in range(3):
        rise = mean(point(seed)) - mean(memory.anchor)
        assert memory.predicted_increase(point(seed)) == pytest.approx(float(rise), rel=1e-10)


def test_without_the_gradient_it_is_the_papers_penalty():
    losses, memory = learned(first_order=False)
    assert memory.gradient is None
    hessian = sum(loss.hessian for loss in losses) / 3
    d = torch.cat([point(5)["w"] - memory.anchor["w"], point(5)["b"] - memory.anchor["b"]])
    assert memory.penalty(point(5)) == pytest.approx(float(0.5 * d @ hessian @ d))
    assert memory.predicted_increase(memory.anchor) == 0


def test_the_penalty_is_differentiable():
    _, memory = learned()
    params = {n: p.requires_grad_() for n, p in point(5).items()}
    assert torch.autograd.gradcheck(lambda w, b: memory.penalty({"w": w, "b": b}), tuple(params.values()))


def test_state_and_growth():
    _, memory = learned()
    tensors, header = memory.state()
    again = Memory.from_state(tensors, json.loads(json.dumps(header)))
    assert torch.equal(again.penalty(point(5)), memory.penalty(point(5)))
    assert again.weight == memory.weight
    grown = memory.grow(("b",), 4)
    wider = {"w": point(5)["w"], "b": torch.cat([point(5)["b"], torch.zeros(2, dtype=torch.float64)])}
    assert torch.isclose(grown.penalty(wider), memory.penalty(point(5)))


def test_a_block_of_ones_own_is_estimated_merged_saved_and_loaded(monkeypatch):
    model, x, y = build("mlp")
    one, two = (run(IsotropicStatistics, model, x[p], y[p], ScaledMSE()) for p in (slice(0, 1), slice(1, 3)))
    params = {name: p.detach() for name, p in model.params("h").items()}
    memory = Memory.of(params, one.curvature, 1).absorb(params, two.curvature, 2)
    pooled = run(IsotropicStatistics, model, x, y, ScaledMSE()).curvature
    for name, block in memory.curvature.blocks.items():
        assert isinstance(block, Isotropic)
        assert torch.isclose(block.value, pooled.blocks[name].value)
    tensors, header = memory.state()
    assert header["blocks"]["heads.h"]["kind"] == "tests.support.own_block:Isotropic"
    header = json.loads(json.dumps(header))
    again = Memory.from_state(tensors, header).grow(model.head_names("h"), 5)
    assert again.curvature.blocks["heads.h"].shapes == ((5, 3), (5,))
    shifted = {name: p + 1 for name, p in params.items()}
    moved = {name: torch.cat([p, p.new_zeros(2 * ("heads" in name), *p.shape[1:])]) for name, p in shifted.items()}
    assert torch.isclose(again.penalty(moved), memory.penalty(shifted))
    assert memory.curvature.solve(shifted, 0.1).keys() == params.keys()
    monkeypatch.delitem(sys.modules, "tests.support.own_block")
    with pytest.raises(ValueError, match=r"block 'tests\.support\.own_block:Isotropic' of your own; import"):
        Memory.from_state(tensors, header)
    assert "tests.support.own_block" not in sys.modules


def test_the_moment_of_a_head():
    model, x, y = build("mlp")
    name = model.head_names("h")[0]
    found = run("kfac", model, x, y, ScaledMSE()).curvature
    z = torch.cat([model.features(x), torch.ones(3, 1, dtype=torch.float64)], 1)
    assert torch.allclose(found.head_moment(name), z.T @ z / 3)
    assert found.head_moment("backbone.delta.0.weight") is None
    assert found.head_moment("heads.other.weight") is None
    assert run("kfac", model, x, y, CrossEntropy()).curvature.head_moment(name) is None


def test_wrong_arguments():
    losses, memory = learned()
    with pytest.raises(ValueError, match="weight is 0; it must be positive"):
        Memory.of(point(0), losses[0].curvature(), 0)
    with pytest.raises(ValueError, match="the anchor lacks 'b'"):
        Memory({"w": point(0)["w"]}, losses[0].curvature(), 1)
    with pytest.raises(ValueError, match="covers 'b', which was not given"):
        memory.penalty({"w": point(0)["w"]})
    with pytest.raises(ValueError, match=r"'w' has shape \(1,\); in the memory it has \(3,\)"):
        memory.penalty({**point(0), "w": torch.ones(1)})
