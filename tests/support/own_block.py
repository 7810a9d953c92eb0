"""A block and an estimator of a user's own, in a module of their own."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlcft.curvature.blocks import Block
from dlcft.curvature.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Isotropic(Block):
    """One number for all entries of some parameters."""

    shapes: tuple[tuple[int, ...], ...]
    label: str
    value: Tensor

    def matvec(self, delta):
        return {name: self.value * delta[name] for name in self.names}

    def solve(self, delta, damping):
        return {name: delta[name] / (self.value + damping) for name in self.names}

    def trace(self, outputs):
        return float(self.value) * sum(torch.Size(shape).numel() for shape in self.shapes)

    def grow(self, names, outputs):
        return replace(self, shapes=tuple((outputs, *shape[1:]) for shape in self.shapes))


class IsotropicStatistics(Statistics):
    """The mean squared output gradient of a layer, for the head too."""

    def add(self, inputs, grads):
        self.add_to("squares", sum(g.square().sum() for gs in grads for g in gs))

    def blocks(self, count):
        shapes = tuple(tuple(p.shape) for p in self.layer.parameters())
        return {self.name: Isotropic(self.names, shapes, "mean", self.sums["squares"] / count)}

    @classmethod
    def on_head(cls, loss):
        return cls
