"""Derivatives along a direction in parameter space, by brute force."""

import copy

import torch
from torch import nn


def set_delta(linear, seed=3, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in linear.delta.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return {name: p.detach().clone() for name, p in linear.delta.named_parameters()}


@torch.no_grad()
def moved(network, delta, step):
    """A copy of the network, its parameters moved by a multiple of delta."""
    network = copy.deepcopy(network)
    for name, p in network.named_parameters():
        p.add_(step * delta.get(name, 0))
    return network


@torch.no_grad()
def directional(network, delta, *inputs, step=1e-5, pick=lambda out: out, **kwargs):
    """Central difference with one Richardson step: an error of order step⁴."""

    def central(h):
        forward, backward = (pick(moved(network, delta, s)(*inputs, **kwargs)) for s in (h, -h))
        return (forward - backward) / (2 * h)

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return (4 * central(step / 2) - central(step)) / 3
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def jacobian(network, *inputs):
    """d output / d parameter, one backward pass per output of the original network."""
    network = copy.deepcopy(network).requires_grad_(True)
    out = network(*inputs)
    names = [name for name, _ in network.named_parameters()]
    rows = [torch.autograd.grad(o, list(network.parameters()), retain_graph=True) for o in out.flatten()]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


class Calling(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)
