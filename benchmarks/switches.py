"""The effect of each switch of `dlcft`: accuracy after a stream of tasks, and predicted against measured forgetting.

    python benchmarks/switches.py --data cifar100.npz   # 20 classes of CIFAR-100 in 5 tasks: about ten minutes
    python benchmarks/switches.py --data cifar100.npz --scenario class-il --only dlcft ridge
    python benchmarks/switches.py --quick               # the digits that come with scikit-learn: a minute

The file holds `x_train` (N×H×W×3, uint8) and `y_train`; nothing else in it is read. Accuracy is on a validation part of
these training images, never on test images, so that settings may be chosen by it.

The first table takes one step of a stream: task 1 is remembered by each curvature, task 2 learned without a penalty, so
that there is something to predict. Measured is the rise of task 1's own mean loss; the memory predicts it
without task 1's data.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import table
from torch import Tensor

from dlcft import Learner, ScaledMSE
from dlcft.backbones import MEAN, STD, shipped_resnet18
from dlcft.bench.datasets import load as load_images
from dlcft.curvature.memory import Memory
from dlcft.methods import Quadratic
from dlcft.methods.settings import Scenario

Pair = tuple[Tensor, Tensor]

ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "none (linearised)": ("none-linear", {"head_start": "zero"}),
    "dlcft-paper": ("dlcft-paper", {}),
    "… curvature=diagonal": ("dlcft-paper", {"curvature": "diagonal"}),
    "… curvature=kfac": ("dlcft-paper", {"curvature": "kfac"}),
    "… curvature=exact-tk": ("dlcft-paper", {"curvature": "exact-tk"}),
    "… curvature=exact-ekfac": ("dlcft-paper", {"curvature": "exact-ekfac"}),
    "… exact-tk, head=ridge": ("dlcft-paper", {"curvature": "exact-tk", "head_start": "ridge"}),
    "… exact-tk, first_order": ("dlcft-paper", {"curvature": "exact-tk", "first_order": True}),
    "… exact-tk, lr=3e-4": ("dlcft-paper", {"curvature": "exact-tk", "lr": 3e-4}),
    "… exact-tk, lr=1e-3": ("dlcft-paper", {"curvature": "exact-tk", "lr": 1e-3}),
    "… exact-tk, lr=1e-3, cosine": ("dlcft-paper", {"curvature": "exact-tk", "lr": 1e-3, "schedule": "cosine"}),
    "none, lr=1e-3": ("none-linear", {"head_start": "zero", "lr": 1e-3}),
    "dlcft": ("dlcft", {}),
    "dlcft, head=zero": ("dlcft", {"head_start": "zero"}),
    "dlcft, adapt=always": ("dlcft", {"adapt": "always"}),
    "ridge": ("ridge", {}),
    "dlcft-exact": ("dlcft-exact", {}),
    "joint (linearised)": ("none-linear", {"head_start": "zero"}),
    "joint, lr=1e-3": ("none-linear", {"head_start": "zero", "lr": 1e-3}),
}


def cifar(path: Path, classes: int, per_class: int) -> tuple[Pair, Pair]:
    """So many images of the first classes to learn from, and 40 others of each to validate."""
    with np.load(path, allow_pickle=False) as file:
        x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"].astype(np.int64))
    rank = torch.zeros_like(y)
    for label in y.unique():
        rank[y == label] = torch.arange(int((y == label).sum()))
    parts = (y < classes) & (rank < per_class), (y < classes) & (rank >= 160) & (rank < 200)
    images = [(x[p].permute(0, 3, 1, 2) / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1) for p in parts]
    return (images[0], y[parts[0]]), (images[1], y[parts[1]])


def few_digits() -> tuple[Pair, Pair]:
    data = load_images("digits")
    x, y = data.preprocess(data.x_train[:700]), data.y_train
    return (x[:400], y[:400]), (x[400:], y[400:700])


def tasks_of(data: Pair, count: int, seed: int, scenario: Scenario = "data-il") -> list[Pair]:
    order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed))
    if scenario == "class-il":
        order = data[1].argsort(stable=True)  # as many of each class
    return [(data[0][part], data[1][part]) for part in order.chunk(count)]


def final_accuracies(name: str, stream: list[Pair], held_out: list[Pair], seed: int, scenario: Scenario) -> list[float]:
    """On each part of the held-out images."""
    method, settings = ROWS[name]
    learner = Learner(shipped_resnet18(), method, scenario=scenario, seed=seed, **settings)
    if name.startswith("joint"):
        stream = [tuple(torch.cat(parts) for parts in zip(*stream, strict=True))]
    for task in stream:
        learner.learn(task)
    return [100 * learner.evaluate(part)["accuracy"] for part in held_out]


def accuracies(
    load: Callable[[], tuple[Pair, Pair]], tasks: int, seeds: int, only: list[str] | None, scenario: Scenario
) -> None:
    data, held_out = load()
    asked = tasks_of(held_out, tasks, 0, scenario) if scenario == "class-il" else [held_out]
    rows = []
    for name in ROWS:
        if only and name not in only:
            continue
        found = [final_accuracies(name, tasks_of(data, tasks, s, scenario), asked, s, scenario) for s in range(seeds)]
        means = [statistics.mean(one) for one in found]
        spread = f" ± {statistics.stdev(means):.1f}" if seeds > 1 else ""
        by_task = ", ".join(f"{value:.0f}" for value in found[0])
        rows.append([name, f"{statistics.mean(means):.1f}{spread}", by_task])
        print(rows[-1], flush=True)
    title = f"{tasks} tasks, {len(data[1])} images in all; accuracy on {len(held_out[1])} others"
    table(title, ["", "accuracy", "by task, first seed"], rows)


def forgetting(load: Callable[[], tuple[Pair, Pair]], tasks: int) -> None:
    first, second = tasks_of(load()[0], tasks, 0)[:2]
    rows = []
    for curvature in ("diagonal", "kfac", "tkfac", "exact-tk", "exact-ekfac"):
        for lr in (1e-4, 1e-3):
            learner = Learner(
                shipped_resnet18(), "dlcft-paper", scenario="data-il", curvature=curvature, first_order=True, lr=lr
            )
            learner.learn(first)
            before = learner.evaluate(first)["loss"]
            method = learner.method
            assert isinstance(method, Quadratic)
            memory, method.memory = method.memory, None
            assert isinstance(memory, Memory)
            learner.learn(second)
            measured = learner.evaluate(first)["loss"] - before
            params = learner.model.params("main")
            quadratic = Memory(memory.anchor, memory.curvature, memory.weight, None)
            with_gradient, without = memory.predicted_increase(params), quadratic.predicted_increase(params)
            rows.append([curvature, f"{lr:g}", f"{measured:.2f}", f"{with_gradient:.2f}", f"{without:.2f}"])
    header = ["curvature", "lr", "measured", "predicted, with gradient", "without"]
    table(f"Rise of task 1's mean loss ({ScaledMSE().scale:g}-scaled squared error) by task 2", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file with x_train and y_train of CIFAR-100")
    parser.add_argument("--quick", action="store_true", help="digits, two tasks")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="rows of the second table, by name; without the first table")
    parser.add_argument("--scenario", choices=["data-il", "class-il"], default="data-il", help="of the second table")
    options = parser.parse_args()
    if not options.quick and options.data is None:
        parser.error("--data is needed, or --quick for the digits that come with scikit-learn.")
    load = few_digits if options.quick else lambda: cifar(options.data, 20, 100)
    tasks = 2 if options.quick else 5
    if not options.only and options.scenario == "data-il":
        forgetting(load, tasks)
    accuracies(load, tasks, options.seeds, options.only, options.scenario)


if __name__ == "__main__":
    main()
