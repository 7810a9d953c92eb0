"""The memory: quadratic losses are remembered exactly."""

import json

import pytest
import torch

from dlcft.curvature.blocks import Dense
from dlcft.curvature.form import Curvature
from dlcft.curvature.memory import Memory


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


def test_state_to_and_growth():
    _, memory = learned()
    tensors, header = memory.state()
    again = Memory.from_state(tensors, json.loads(json.dumps(header)))
    assert torch.equal(again.penalty(point(5)), memory.penalty(point(5)))
    assert again.weight == memory.weight
    assert memory.to(torch.float32).anchor["w"].dtype == torch.float32
    grown = memory.grow(("b",), 4)
    wider = {"w": point(5)["w"], "b": torch.cat([point(5)["b"], torch.zeros(2, dtype=torch.float64)])}
    assert torch.isclose(grown.penalty(wider), memory.penalty(point(5)))


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
