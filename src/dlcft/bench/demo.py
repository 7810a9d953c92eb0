"""The demonstration: a pre-trained network learns upright digits, then turned ones, and is asked for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlcft.bench.backbones import shipped_resnet18
from dlcft.bench.datasets import Images, digits
from dlcft.learner import Learner

METHODS = {
    "none-linear": "fine-tune on, no memory",
    "dlcft-kfac": "quadratic memory, K-FAC",
    "dlcft": "quadratic memory, exact TK",
    "ranpac": "closed form on frozen features",
    "joint-linear": "both tasks at once",
}


@dataclass(frozen=True)
class Outcome:
    """Accuracies of one method after both tasks, on test images."""

    method: str
    first: float
    second: float


def run(*, samples: int = 400, epochs: int = 5, seed: int = 0, report: Callable[[str], None]) -> list[Outcome]:
    """Learn two tasks one after the other by several methods, and both at once.

    Args:
        samples: training images a task.
        epochs: passes over them.
        seed: of everything random.
        report: called with each method's name before it starts.
    """
    tasks = [digits(rotation, seed=seed) for rotation in (0.0, 75.0)]
    tasks = [Images(t.x_train[:samples], t.y_train[:samples], t.x_test, t.y_test) for t in tasks]
    outcomes = []
    for method in METHODS:
        report(method)
        learner = Learner(shipped_resnet18(), method, scenario="data-il", seed=seed, epochs=epochs)
        stream = [(t.x_train, t.y_train) for t in tasks]
        if method == "joint-linear":
            stream = [(torch.cat([x for x, _ in stream]), torch.cat([y for _, y in stream]))]
        for data in stream:
            learner.learn(data)
        first, second = (learner.evaluate((t.x_test, t.y_test))["accuracy"] for t in tasks)
        outcomes.append(Outcome(method, first, second))
    return outcomes
