"""A method of your own in one class: stay near the pre-trained weights, and replay nothing.

    python examples/new_method.py

A `Method` is a dataclass: its fields are its settings, saved and loaded with it. It gives the objective of one batch;
the training loop, heads, growth, saving and resuming are the learner's. On the command line and in experiments it is
`--method new_method:StayNear --set strength=3`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlcft import Learner
from dlcft.methods import Batch, Method, Task


@dataclass
class StayNear(Method):
    """`L_data + (strength/2)·‖ψ‖²`: on a linearised network ψ = 0 is the pre-trained one."""

    strength: float = 1.0

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """The function to minimise, on one batch."""
        data = task.loss.value(task.model(batch.x, task.head), batch.y)
        moved = sum(p.square().sum() for p in task.model.params().values())
        return data + 0.5 * self.strength * moved


def main() -> None:
    """Learn two tasks with it."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    learner = Learner(backbone, StayNear(strength=0.1), epochs=20, lr=1e-2)
    for shift in (0.0, 1.0):
        x = torch.randn(100, 4) + shift
        learner.learn((x, (x[:, 0] > x[:, 1]).long()))
        print(f"accuracy on the latest task: {learner.evaluate((x, (x[:, 0] > x[:, 1]).long()))['accuracy']:.0%}")


if __name__ == "__main__":
    main()
