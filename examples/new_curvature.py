"""A curvature of your own in one class: one number a layer, the mean squared gradient of its weights.

    python examples/new_curvature.py

A `Statistics` sums one layer's rows over samples, and turns the sum into a block; hooks, passes over the data, the
head, merging and the penalty are there already. On the command line and in experiments it is
`--method dlcft --set adapt=always --set curvature=new_curvature:LayerMean`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlcft import Learner
from dlcft.curvature import grams
from dlcft.curvature.blocks import Block
from dlcft.curvature.statistics import Statistics, diagonal_blocks


class LayerMean(Statistics):
    """`E[‖D_n‖²]` spread evenly over the layer: between no curvature and a diagonal one."""

    def add(self, inputs: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> None:
        """One batch: the layer's inputs, and for each draw the gradients at its outputs."""
        for gs in grads:
            self.add_to("squares", grams.squared_gradient(self.layer, inputs, gs))

    def blocks(self, count: int) -> dict[str, Block]:
        """The blocks by name, of the mean over `count` samples."""
        mean = self.sums["squares"] / count
        return diagonal_blocks(self.layer, self.names, torch.full_like(mean, float(mean.mean())))


def main() -> None:
    """Learn two tasks with it, and say how much the first was hurt."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    learner = Learner(backbone, "dlcft", curvature=LayerMean, adapt="always", epochs=20, lr=1e-2)
    for shift in (0.0, 1.0):
        x = torch.randn(100, 4) + shift
        learner.learn((x, (x[:, 0] > x[:, 1]).long()))
    print(f"predicted rise of the first task's loss: {learner.predicted_increase():.3f}")


if __name__ == "__main__":
    main()
